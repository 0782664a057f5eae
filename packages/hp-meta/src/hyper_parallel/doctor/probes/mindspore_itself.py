"""Facts about MindSpore: version, the NumPy beside it, and whether it adds two numbers."""

from __future__ import annotations

import re
from importlib import import_module, metadata, util
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.probes.answer import Answer

__all__ = ["probe"]


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Read what it was made for, import it, run one op on the CPU."""
    spec = util.find_spec("mindspore")
    if spec is None:
        answer.fact("installed", None)
        return
    try:
        answer.fact("installed", metadata.version("mindspore"))
    except metadata.PackageNotFoundError:
        answer.fact("installed", "")
    try:
        answer.fact("numpy", metadata.version("numpy"))
    except metadata.PackageNotFoundError:
        answer.fact("numpy", None)
    answer.fact("cann", _own_list([Path(place) for place in spec.submodule_search_locations or []]))
    answer.step("import mindspore")
    mindspore = import_module("mindspore")
    answer.fact("version", str(mindspore.__version__))
    answer.step("adding two tensors on the CPU")
    mindspore.set_device("CPU") if hasattr(mindspore, "set_device") else mindspore.set_context(device_target="CPU")
    total = mindspore.Tensor([1.0, 2.0]) + mindspore.Tensor([10.0, 20.0])
    answer.fact("sum", [float(value) for value in total.asnumpy()])


def _own_list(places: list[Path]) -> list[str]:
    """The CANN versions that this MindSpore itself accepts, read from the source of its check."""
    for place in places:
        path = place / "run_check" / "_check_version.py"
        try:
            source = path.read_text("utf-8")
        except OSError:
            continue
        section = source.partition("class AscendEnvChecker")[2]
        match = re.search(r"self\.version = \[([^\]]*)\]", section)
        if match:
            return re.findall(r"[\d.]+", match[1])
    return []
