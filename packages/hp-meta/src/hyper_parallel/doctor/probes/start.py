"""The program of every probe: `python start.py NAME ANSWER REQUEST` runs `probes/NAME.py` and writes what it finds.

It is run by its path, so that imports resolve as in a script of the user's: neither this folder nor the working
directory comes before the installed packages.
"""

from __future__ import annotations

import json
import sys
from importlib import import_module
from pathlib import Path


def main() -> None:
    """Run the probe that the arguments name."""
    _, name, answer, request = sys.argv
    if Path(sys.path[0]).resolve() == Path(__file__).resolve().parent:  # not so under PYTHONSAFEPATH
        del sys.path[0]
    # The umbrella itself, where it isn't installed but merely on the parent's path.
    sys.path.append(str(Path(__file__).resolve().parents[3]))
    from hyper_parallel.doctor.probes.answer import Answer

    with open(answer, "a", encoding="utf-8", buffering=1) as file:
        writer = Answer(file)
        try:
            import_module(f"hyper_parallel.doctor.probes.{name}").probe(writer, json.loads(request))
        except Exception as error:
            writer.error(error)
            raise
        writer.end()


if __name__ == "__main__":
    main()
