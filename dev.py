"""The two commands of the README: `python3 dev.py train` and `python3 dev.py test`.

Each does all of its own set-up on a machine that has Python 3.10 or newer and git: it makes a small environment with
nox (`.venv-dev`), and nox makes the rest (`.nox`). Standard library only, and written so that an older Python 3 gets
as far as saying what it lacks.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent
HOME = ROOT / ".venv-dev"
PYTHON = HOME / "bin" / "python"
OLDEST, FIRST_UNTRIED = (3, 10), (3, 14)

USAGE = """usage: python3 dev.py train [arguments of examples/train_lm.py]
       python3 dev.py test

train   trains a small language model on 4 processes of this machine (dp=2, tp=2), and checks it against one process
test    lint, types, docs, wheels and all tests, as CI runs them
"""

# These need no framework, and run while the environment that has one is made (for the types).
FIRST, BESIDE = ["lint", "docs", "wheel_smoke"], ["typecheck"]
# The tests come last, so that a run ends with their summary.
TESTS = ["tests_mindspore", "tests"]


def main(arguments: list[str]) -> int:
    """Set up what is missing and run the sessions of one command; returns the exit status."""
    if arguments != ["test"] and arguments[:1] != ["train"]:
        sys.stderr.write(USAGE)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    command, rest = arguments[0], arguments[1:]
    check_python()
    make_environment()
    nox = [str(PYTHON), "-m", "nox", "--noxfile", str(ROOT / "noxfile.py")]
    if command == "train":
        return subprocess.call([*nox, "--session", "train", "--", *rest])
    return test(nox)


def test(nox: list[str]) -> int:
    """Run all sessions of the tests; the first that fails ends the run, since what follows would only hide it."""
    sessions = [*nox, "--stop-on-first-error", "--session"]
    with tempfile.TemporaryFile() as output:
        beside = subprocess.Popen([*sessions, *BESIDE], stdout=output, stderr=subprocess.STDOUT)
        try:
            status = subprocess.call([*sessions, *FIRST])
        finally:
            beside.wait()
        output.seek(0)
        sys.stdout.write(output.read().decode("utf-8", "replace"))
        sys.stdout.flush()
    return status or beside.returncode or subprocess.call([*sessions, *TESTS])


def check_python() -> None:
    """Refuse a Python that the packages don't support, and name the one to use."""
    if OLDEST <= sys.version_info[:2] < FIRST_UNTRIED:
        return
    sys.exit(
        f"dev.py: this is Python {sys.version.split()[0]} ({sys.executable}); HyperParallel runs on 3.10 to 3.13.\n"
        "Run it with one of those, for example: python3.11 dev.py " + " ".join(sys.argv[1:])
    )


def make_environment() -> None:
    """Make `.venv-dev` with nox, or bring it up to date when the pins have changed."""
    constraints = ROOT / "build" / "constraints.txt"
    stamp = HOME / ".installed"
    wanted = sys.version.split()[0] + "\n" + constraints.read_text("utf-8")
    if PYTHON.exists() and stamp.exists() and stamp.read_text("utf-8") == wanted:
        return
    print(f"dev.py: making {HOME.name} with nox", flush=True)
    made = subprocess.run(
        [sys.executable, "-m", "venv", "--clear", str(HOME)], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        name = "python{}.{}-venv".format(*sys.version_info[:2])
        sys.exit(
            f"dev.py: {sys.executable} can't make a virtual environment:\n{(made.stdout + made.stderr).strip()}\n"
            f"On Debian and Ubuntu, venv is a package of its own: sudo apt-get install {name}"
        )
    pip = [str(PYTHON), "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check"]
    installed = subprocess.run(
        [*pip, "--constraint", str(constraints), "nox"], check=False, env={**os.environ, "PIP_NO_INPUT": "1"}
    )
    if installed.returncode != 0:
        sys.exit("dev.py: pip could not install nox; its message is above. Can pip reach a package index from here?")
    stamp.write_text(wanted, "utf-8")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
