"""Facts about torch_npu, imported as a program would: `import torch` loads it by itself, and may die of it.

What its libraries need is read from the files first, so that the missing one is named even if the import kills the
interpreter.
"""

from __future__ import annotations

from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.elf import ElfError
from hyper_parallel.doctor.linking import Loader
from hyper_parallel.doctor.probes.answer import Answer

__all__ = ["probe"]


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Read its files, import torch with it, count its devices."""
    spec = util.find_spec("torch_npu")
    if spec is None:
        answer.fact("installed", None)
        return
    try:
        answer.fact("installed", metadata.version("torch_npu"))
    except metadata.PackageNotFoundError:
        answer.fact("installed", "")
    answer.step("reading the libraries of torch_npu")
    torch_spec = util.find_spec("torch")
    places = [Path(place) for place in (torch_spec.submodule_search_locations or [])] if torch_spec else []
    own = [Path(place) for place in spec.submodule_search_locations or []]
    loader = Loader(loaded=[place / "lib" for place in [*places, *own]])
    missing: dict[str, str] = {}
    for path in sorted(path for place in own for path in [*place.glob("*.so"), *place.glob("lib/*.so")]):
        try:
            for name in loader.link(path).missing:
                missing.setdefault(name, str(path))
        except (ElfError, OSError):
            continue
    answer.fact("missing", missing)
    answer.step("import torch, which loads torch_npu by itself")
    import_module("torch")
    answer.fact("autoload", True)
    answer.step("import torch_npu")
    npu = import_module("torch_npu")
    answer.fact("version", str(getattr(npu, "__version__", "")))
    answer.step("counting NPU devices")
    answer.fact("devices", int(npu.npu.device_count()))
