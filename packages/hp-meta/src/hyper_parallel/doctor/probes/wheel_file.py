"""Facts about a wheel that isn't installed: its own record of tags, what it requires, how its native parts would link.

Nothing of it is executed; its shared objects are unpacked into a folder that goes with the probe.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import zipfile
from email.parser import HeaderParser
from importlib import metadata, util
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.elf import ElfError
from hyper_parallel.doctor.linking import Loader
from hyper_parallel.doctor.probes.answer import Answer
from hyper_parallel.doctor.probes.wheels import link_facts

__all__ = ["probe"]

_LARGEST = 1 << 30  # bytes of one unpacked file: more is not a native part of ours


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Read the wheel at `request["path"]`."""
    answer.step("opening the archive")
    with zipfile.ZipFile(request["path"]) as archive:
        names = archive.namelist()
        answer.step("reading its metadata")
        records = {Path(name).name: name for name in names if re.fullmatch(r"[^/]+\.dist-info/(WHEEL|METADATA)", name)}
        for record in ("WHEEL", "METADATA"):
            text = archive.read(records[record]).decode("utf-8", errors="replace") if record in records else ""
            headers = HeaderParser().parsestr(text)
            if record == "WHEEL":
                answer.fact("tags", headers.get_all("Tag", []))
            else:
                answer.fact("requires-python", headers.get("Requires-Python"))
                requires = headers.get_all("Requires-Dist", [])
                answer.fact("requires", requires)
                answer.fact("installed", {name: _version(name) for name in map(_name, requires)})
        shared = [name for name in names if re.search(r"\.so(\.\d+)*$", name)]
        answer.fact("shared", shared)
        with tempfile.TemporaryDirectory(prefix="doctor-wheel-") as folder:
            parts = []
            for name in shared:
                answer.step(f"unpacking {name}")
                info = archive.getinfo(name)
                target = (Path(folder) / name).resolve()
                if info.file_size > _LARGEST or not target.is_relative_to(Path(folder).resolve()):
                    continue
                target.parent.mkdir(parents=True, exist_ok=True)
                with archive.open(info) as source, target.open("wb") as copy:
                    shutil.copyfileobj(source, copy)
                parts.append((name, target))
            spec = util.find_spec("torch")
            places = [Path(place) / "lib" for place in (spec.submodule_search_locations or [])] if spec else []
            loader = Loader(loaded=places)
            native = []
            for name, target in parts:
                answer.step(f"reading {name}")
                try:
                    facts = link_facts(loader.link(target))
                except (ElfError, OSError) as error:
                    facts = {"machine": "", "error": str(error).replace(str(target), name)}
                    facts |= {"missing": [], "unresolved": [], "wanted": []}
                native.append({**facts, "path": name})
            answer.fact("native", native)


def _name(requirement: str) -> str:
    match = re.match(r"[A-Za-z0-9][A-Za-z0-9._-]*", requirement)
    return re.sub(r"[-_.]+", "-", match[0]).lower() if match else requirement


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None
