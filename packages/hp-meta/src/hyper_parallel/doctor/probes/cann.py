"""Facts about CANN: where it is installed, its version and pieces, and what the driver says of the devices.

Two layouts exist: up to CANN 8.3 `/usr/local/Ascend/ascend-toolkit/latest` with `set_env.sh` one folder above, from 8.5
`/usr/local/Ascend/cann` with `set_env.sh` inside.
"""

from __future__ import annotations

import os
import re
import shutil
import site
import subprocess
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.probes.answer import Answer

__all__ = ["probe"]

# What training needs below the home, each with the package that brings it.
_PIECES = {
    "lib64/libascendcl.so": "toolkit",
    "lib64/libhccl.so": "toolkit",
    "opp": "toolkit",
    "opp/built-in/op_impl/ai_core/tbe/kernel": "kernels",
}


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Look at the places where CANN is installed, below `request["root"]`, and at the one of the environment."""
    root = Path(request["root"])
    answer.step("looking for CANN")
    stated = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    answer.fact("stated", stated)
    homes = [Path(stated)] if stated else []
    places = [root / "usr/local/Ascend", Path(os.environ.get("HOME", "/nowhere")) / "Ascend"]
    places += [Path(place) / "ascend" for place in site.getsitepackages()]
    for place in places:
        homes += [place / "cann", place / "ascend-toolkit" / "latest"]
        homes += sorted((path for path in place.glob("cann-*") if path.is_dir()), reverse=True)
    found: list[dict[str, Any]] = []
    for home in homes:
        answer.step(f"reading {home}")
        # `cann` is a link to `cann-8.5.0`: one installation, two names.
        if home.is_dir() and not any(home.samefile(entry["home"]) for entry in found):
            found.append(_describe(home))
    answer.fact("homes", found)
    answer.fact("stated-exists", bool(stated) and Path(stated or "").is_dir())
    answer.step("reading the driver's version")
    answer.fact("driver", _field(root / "usr/local/Ascend/driver/version.info"))
    answer.fact("nodes", sorted(path.name for path in (root / "dev").glob("davinci[0-9]*")))
    tool = shutil.which("npu-smi") or next(
        (str(path) for path in (root / "usr/local/sbin/npu-smi", root / "usr/local/bin/npu-smi") if path.exists()), None
    )
    answer.fact("npu-smi", tool)
    if tool:
        answer.step("npu-smi info")
        try:
            done = subprocess.run([tool, "info"], capture_output=True, text=True, errors="replace")
        except OSError as error:  # of another architecture, or not executable
            answer.fact("npu-smi.error", str(error))
            return
        answer.fact("npu-smi.status", done.returncode)
        answer.fact("npu-smi.output", (done.stdout + done.stderr).strip().splitlines()[-20:])
        answer.fact("devices", _devices(done.stdout))


def _describe(home: Path) -> dict[str, Any]:
    """One installation."""
    layout = "ascend-toolkit" if home.resolve().parent.name == "ascend-toolkit" or home.name == "latest" else "cann"
    scripts = [home / "set_env.sh", home.parent / "set_env.sh"]
    script = next((path for path in scripts if path.is_file()), None)
    return {
        "home": str(home),
        "layout": layout,
        "version": _version(home),
        "script": str(script) if script else None,
        "missing": {piece: package for piece, package in _PIECES.items() if not (home / piece).exists()},
    }


def _version(home: Path) -> str | None:
    """The version of an installation, from the first of the files that say it."""
    records = [*sorted(home.glob("*-linux/ascend_toolkit_install.info")), home / "ascend_toolkit_install.info"]
    records += [home / "compiler" / "version.info", home / "opp" / "version.info", home / "version.info"]
    return next((version for version in map(_field, records) if version), None)


def _field(path: Path) -> str | None:
    """The version in a file of lines `name=value`."""
    try:
        text = path.read_text("utf-8", errors="replace")
    except OSError:
        return None
    match = re.search(r"^\s*version\s*=\s*(\S+)", text, flags=re.I | re.M)
    return match[1] if match else None


def _devices(table: str) -> list[list[str]]:
    """Number, name and health of each NPU in the table of `npu-smi info`."""
    rows = re.findall(r"^\|\s*(\d+)\s+([A-Za-z0-9]+\S*)\s*\|\s*(\w+)\s*\|", table, flags=re.M)
    return [list(row) for row in rows]
