"""Judges of the group `torch`: version, whether it can be imported at all, ABI, gloo, CUDA, torch_npu."""

from __future__ import annotations

import re

from hyper_parallel.doctor.finding import Finding, failure, ok, skipped, warning
from hyper_parallel.doctor.versions import release
from hyper_parallel.doctor.world import World

__all__ = ["environment_script", "judge"]

_OLDEST = (2, 7)
# What the dynamic linker says of a library that it doesn't find.
_LIBRARY = re.compile(r"(lib[\w.+-]+\.so[\w.]*): cannot open shared object file")
_REINSTALL = 'pip install --force-reinstall --no-deps "torch>=2.7"'
_NO_AUTOLOAD = "export TORCH_DEVICE_BACKEND_AUTOLOAD=0"


def judge(world: World) -> list[Finding]:
    """The findings of the group."""
    return [_version(world), _import(world), _abi(world), _gloo(world), _cuda(world), _npu(world)]


def environment_script(world: World) -> str:
    """The `set_env.sh` of the CANN that was found, or of where it usually is."""
    home = world.cann_home
    return str(home["script"]) if home and home["script"] else "/usr/local/Ascend/cann/set_env.sh"


def _version(world: World) -> Finding:
    outcome = world.outcome("torch_itself")
    facts = outcome.facts
    if outcome.end and "installed" not in facts:
        text = f"looking for PyTorch: the probe {outcome.story}"
        return failure("torch.version", text, ["python -m pip show torch"], outcome.output, required=world.needs_torch)
    installed = facts.get("version") or facts.get("installed")
    if installed is None:
        if world.needs_torch and world.profile == "cpu":
            text = "no framework is installed: schedules can be planned, nothing can be trained"
            return warning(
                "torch.version", text, ['pip install "torch>=2.7"', "# or:", 'pip install "mindspore>=2.8" "numpy<2"']
            )
        if world.needs_torch:
            extra = (
                ["pip install torch-npu==2.9.0.post2 torch==2.9.0"] if world.needs_npu else ['pip install "torch>=2.7"']
            )
            return failure("torch.version", f"PyTorch is not installed; the profile {world.profile} needs it", extra)
        return skipped("torch.version", "PyTorch is not installed")
    if not installed:
        return warning(
            "torch.version", "there is a folder `torch` on the path, but no installed distribution", [_REINSTALL]
        )
    if release(installed) < _OLDEST:
        remedy = ['pip install --upgrade "torch>=2.7"']
        text = f"PyTorch {installed} is too old: 2.7 or newer is needed"
        return failure("torch.version", text, remedy, required=world.needs_torch)
    return ok("torch.version", f"PyTorch {installed}", [str(facts.get("place", ""))])


def _import(world: World) -> Finding:
    """`import torch` loads torch_npu by itself, and then fails, or dies, with it."""
    if not world.has_torch:
        return skipped("torch.import", "PyTorch is not installed")
    alone, extended = world.outcome("torch_itself"), world.outcome("torch_npu")
    if alone.end:
        remedy = [
            "# try it by hand:",
            'TORCH_DEVICE_BACKEND_AUTOLOAD=0 python -X faulthandler -c "import torch"',
            _REINSTALL,
        ]
        return failure("torch.import", f"import torch {alone.story}", remedy, alone.output, required=world.needs_torch)
    if world.has_torch_npu and extended.end and not extended.facts.get("autoload"):
        text = f"import torch fails, since it loads torch_npu by itself, and that {extended.cause}"
        remedy = [
            "# on an NPU machine, make CANN's libraries known:",
            f"source {environment_script(world)}",
            "# elsewhere, stop torch from loading torch_npu:",
            _NO_AUTOLOAD,
        ]
        return failure("torch.import", text, remedy, [extended.end, *extended.output])
    return ok("torch.import", f"import torch takes {alone.facts.get('seconds', 0):.1f} s")


def _abi(world: World) -> Finding:
    facts = world.facts("torch_itself")
    if facts.get("abi") is None:
        return skipped("torch.abi", "not known" if world.has_torch else "PyTorch is not installed")
    if facts["abi"]:
        return ok("torch.abi", "PyTorch is built with the CXX11 ABI")
    text = "PyTorch is built with the C++ ABI from before C++11: extensions of today's compilers don't fit it"
    return warning("torch.abi", text, ["# torch's own wheels have the CXX11 ABI since 2.7:", _REINSTALL])


def _gloo(world: World) -> Finding:
    facts = world.facts("torch_itself")
    if "backends" not in facts:
        return skipped("torch.gloo", "not known" if world.has_torch else "PyTorch is not installed")
    if "gloo" in facts["backends"]:
        return ok("torch.gloo", f"backends: {', '.join(facts['backends'])}")
    text = "this PyTorch is built without gloo, which carries collectives of CPU tensors"
    return failure("torch.gloo", text, [_REINSTALL], required=world.profile in ("cpu", "mindspore"))


def _cuda(world: World) -> Finding:
    outcome = world.outcome("torch_itself")
    facts, needed = outcome.facts, world.profile == "cuda"
    if not needed and not facts.get("cuda.devices"):
        return skipped("torch.cuda", "no CUDA device, or a PyTorch without CUDA")
    if outcome.end or not world.has_torch:
        return failure("torch.cuda", "PyTorch can't be imported", ["# see torch.version and torch.import"])
    if not facts.get("cuda.build"):
        text = f"PyTorch {facts.get('version')} is built without CUDA"
        return failure(
            "torch.cuda",
            text,
            ["pip install --force-reinstall torch --index-url https://download.pytorch.org/whl/cu128"],
        )
    if not facts.get("cuda.devices"):
        text = f"PyTorch is built for CUDA {facts['cuda.build']}, but finds no device: {facts.get('cuda.error', 'none is visible')}"
        return failure("torch.cuda", text, ["nvidia-smi", "# is it hidden?", "echo $CUDA_VISIBLE_DEVICES"])
    if not facts.get("cuda.nccl"):
        return failure("torch.cuda", "this PyTorch is built without NCCL", [_REINSTALL], required=needed)
    names = facts["cuda.devices"]
    return ok("torch.cuda", f"{len(names)} x {names[0]}, CUDA {facts['cuda.build']}, NCCL {facts['cuda.nccl']}", names)


def _npu(world: World) -> Finding:
    outcome = world.outcome("torch_npu")
    facts, needed = outcome.facts, world.needs_npu and not world.needs_mindspore
    if not world.has_torch_npu:
        if not needed:
            return skipped("torch.npu", "torch_npu is not installed")
        return failure("torch.npu", "torch_npu is not installed", [f"pip install {_matching(world)}"])
    name = f"torch_npu {facts.get('version') or facts.get('installed', '')}".rstrip()
    contradiction, matching = _contradiction(world)
    if outcome.end:
        # The missing libraries are known even if the interpreter didn't live to say so.
        # The one that the error names first, then those that would come next.
        missing = list(dict.fromkeys([*_LIBRARY.findall(outcome.end), *sorted(facts.get("missing", {}))]))
        text = f"{name} can't be used: it {outcome.story}"
        if missing:
            more = f" and {len(missing) - 1} more can't" if len(missing) > 1 else " can't"
            where = (
                "CANN's libraries are not on the path"
                if world.cann_home
                else "CANN is not installed, or not on the path"
            )
            text = f"{name} can't be used: {missing[0]}{more} be found: {where}"
            # The error itself says no more than that; a signal does.
            text += "" if _LIBRARY.search(outcome.end) else f" (it {outcome.end})"
        if contradiction:
            text += f"; besides, {contradiction}"
        remedy = [f"source {environment_script(world)}"]
        if contradiction:
            remedy += ["# and, for this torch_npu:", f"pip install torch=={matching}"]
        if world.cann_home is None:
            remedy = ["# CANN is not installed here; install it, then:", *remedy]
            remedy += ["# or, without an NPU:", "pip uninstall torch-npu"]
        details = [f"{library} is needed by {path}" for library, path in sorted(facts.get("missing", {}).items())]
        # On the CPU it is enough that torch works without it.
        required = world.needs_npu or not facts.get("autoload")
        return failure(
            "torch.npu", text, remedy, [*details, *outcome.output], required=required and not _disabled(world)
        )
    if contradiction:
        return failure("torch.npu", f"{name}: {contradiction}", [f"pip install torch=={matching}"], required=needed)
    if not facts.get("devices"):
        return failure(
            "torch.npu", f"{name} finds no NPU", ["npu-smi info", "echo $ASCEND_RT_VISIBLE_DEVICES"], required=needed
        )
    return ok("torch.npu", f"{name}, {facts['devices']} NPU(s)")


def _contradiction(world: World) -> tuple[str, str]:
    """That torch_npu is for another PyTorch than the one that is here, and for which; empty if it isn't."""
    torch, installed = world.facts("torch_itself").get("version") or "", world.facts("torch_npu").get("installed", "")
    if not torch or not release(installed) or release(torch) == release(installed):
        return "", ""
    wanted = installed.partition(".post")[0].partition("rc")[0]
    return f"it is for PyTorch {wanted}, and {torch} is installed", wanted


def _disabled(world: World) -> bool:
    """The user has told torch not to load it, and doesn't mean to use it."""
    return world.environment.get("TORCH_DEVICE_BACKEND_AUTOLOAD") == "0" and not world.needs_npu


def _matching(world: World) -> str:
    torch = world.version("torch")
    numbers = (torch or "").partition("+")[0]
    return f'"torch-npu~={numbers}"' if numbers else "torch-npu"
