"""Facts about what is installed: distributions with their declared ranges, wheel tags, and the native parts' links."""

from __future__ import annotations

import re
import sys
from importlib import metadata, util
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.elf import ElfError
from hyper_parallel.doctor.linking import Linkage, Loader
from hyper_parallel.doctor.probes.answer import Answer

__all__ = ["link_facts", "probe"]


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Look at the distributions whose names match `request["ours"]`, and at those in `request["others"]`."""
    ours, others = re.compile(request["ours"]), set(request["others"])
    found: dict[str, dict[str, Any]] = {}
    answer.step("reading the metadata of installed distributions")
    for distribution in metadata.distributions():
        try:
            raw = distribution.metadata["Name"]
        except Exception:  # a damaged record of someone else's
            continue
        name = re.sub(r"[-_.]+", "-", raw or "").lower()
        if not (ours.fullmatch(name) or name in others):
            continue
        version, place = distribution.version, str(distribution.locate_file(""))
        if name in found:
            # The first on the path is the one that is imported; the same place twice is no second one.
            if found[name]["place"] != place or found[name]["version"] != version:
                found[name]["hidden"].append([version, place])
            continue
        wheel = distribution.read_text("WHEEL") or ""
        found[name] = {
            "version": version,
            "place": place,
            "hidden": [],
            "requires": distribution.requires or [] if ours.fullmatch(name) else [],
            "tags": re.findall(r"^Tag:\s*(\S+)", wheel, flags=re.M),
            "editable": '"editable": true' in (distribution.read_text("direct_url.json") or ""),
        }
    answer.fact("distributions", found)
    torch = util.find_spec("torch")
    folders = [Path(place) / "lib" for place in (torch.submodule_search_locations or [])] if torch else []
    loader = Loader(loaded=folders)
    answer.fact("native", [])
    native = []
    for name in sorted(found):
        if ours.fullmatch(name):
            for path in _native_parts(name.replace("-", "_")):
                answer.step(f"reading {path}")
                native.append(_link(loader, path))
    answer.fact("native", native)


def _native_parts(package: str) -> list[Path]:
    """The shared objects of a package, found without importing it."""
    try:
        spec = util.find_spec(package)
    except (ImportError, ValueError):
        return []
    places = list(spec.submodule_search_locations or []) if spec else []
    # The suffix alone would also find libraries that the package only brings along; they are needed all the same.
    return sorted({path.resolve() for place in places for path in Path(place).rglob("*.so*") if path.is_file()})


def _link(loader: Loader, path: Path) -> dict[str, Any]:
    try:
        return link_facts(loader.link(path))
    except (ElfError, OSError) as error:
        return {"path": str(path), "machine": "", "error": str(error), "missing": [], "unresolved": [], "wanted": []}


def link_facts(linkage: Linkage) -> dict[str, Any]:
    """A linkage as JSON has it."""
    return {
        "path": str(linkage.path),
        "machine": linkage.machine,
        "missing": list(linkage.missing),
        "unresolved": [[symbol.name, symbol.version, symbol.library] for symbol in linkage.unresolved],
        "wanted": [list(pair) for pair in linkage.wanted],
        "found": {name: str(path) for name, path in linkage.found.items()},
        "interpreter": sys.executable,
    }
