"""Facts about PyTorch without its device extensions: version, ABI, backends, CUDA. One import gathers them all."""

from __future__ import annotations

import time
from importlib import import_module, metadata, util
from typing import Any

from hyper_parallel.doctor.probes.answer import Answer

__all__ = ["probe"]


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Import torch and ask it."""
    if util.find_spec("torch") is None:
        answer.fact("installed", None)
        return
    try:
        answer.fact("installed", metadata.version("torch"))
    except metadata.PackageNotFoundError:
        answer.fact("installed", "")
    answer.step("import torch")
    start = time.perf_counter()
    torch = import_module("torch")
    answer.fact("seconds", round(time.perf_counter() - start, 2))
    answer.fact("version", str(torch.__version__))
    answer.fact("place", str(torch.__file__))
    with answer.attempt("abi"):
        answer.fact("abi", bool(torch._C._GLIBCXX_USE_CXX11_ABI))
    with answer.attempt("backends"):
        distributed = torch.distributed
        available = distributed.is_available()
        names = ("gloo", "nccl", "mpi") if available else ()
        answer.fact("backends", [name for name in names if getattr(distributed, f"is_{name}_available")()])
    with answer.attempt("cuda"):
        answer.fact("cuda.build", torch.version.cuda)
        if torch.version.cuda:
            count = torch.cuda.device_count()
            answer.fact("cuda.devices", [torch.cuda.get_device_name(index) for index in range(count)])
            if "nccl" in names and available:
                answer.fact("cuda.nccl", ".".join(map(str, torch.cuda.nccl.version())))
