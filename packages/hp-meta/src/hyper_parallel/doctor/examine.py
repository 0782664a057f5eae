"""Examines this machine: starts all probes at once, waits for each as long as it may take, and lets the judges judge."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from hyper_parallel.doctor.checks import CHECKS
from hyper_parallel.doctor.finding import Report
from hyper_parallel.doctor.judges import cann, hccl, host, launch, mindspore, torch, wheels
from hyper_parallel.doctor.probe import Outcome, Request, run_probes
from hyper_parallel.doctor.world import PROFILES, World

__all__ = ["diagnose", "judge", "requests"]

_OTHERS = ["torch", "torch-npu", "mindspore", "numpy", "click"]
_ALONE = {"TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}


def diagnose(
    profile: str | None = None,
    *,
    environment: Mapping[str, str] | None = None,
    root: Path = Path("/"),
    timeout: float = 60.0,
) -> Report:
    """Examine this machine.

    Args:
        profile: what must be there: `cpu`, `cuda`, `npu` or `mindspore`; None chooses by the devices that are here.
        environment: the environment variables to look at, and to give to the probes; those of this process by default.
        root: what stands for `/` when CANN, the driver and device files are looked for.
        timeout: seconds that each probe may take.

    Returns:
        One finding for each check but `run.collectives`, which takes `doctor run`.

    Raises:
        ValueError: there is no such profile.
    """
    if profile is not None and profile not in PROFILES:
        raise ValueError(f"there is no profile {profile!r}; there are {', '.join(PROFILES)}")
    start = time.perf_counter()
    variables = dict(os.environ if environment is None else environment)
    outcomes = run_probes(requests(variables, root), timeout)
    report = judge(outcomes, variables, profile)
    return replace(report, seconds=time.perf_counter() - start)


def requests(environment: Mapping[str, str], root: Path) -> dict[str, Request]:
    """What each probe is told, and its environment variables; those that import frameworks, which take longest, first."""
    variables = dict(environment)
    place: dict[str, object] = {"root": str(root)}
    wanted: dict[str, Request] = {
        "mindspore_itself": ({}, variables),
        "torch_itself": ({}, variables | _ALONE),
        "torch_npu": ({}, variables),
        "cann": (place, variables),
        "wheels": ({"ours": wheels.OURS, "others": _OTHERS}, variables),
        "host": (place, variables),
    }
    address, port = variables.get("MASTER_ADDR", "").strip(), variables.get("MASTER_PORT", "").strip()
    if address and port.isascii() and port.isdigit() and 0 < int(port) < 65536:
        wanted["network"] = ({"address": address, "port": int(port)}, variables)
    return wanted


def judge(outcomes: Mapping[str, Outcome], environment: Mapping[str, str], profile: str | None = None) -> Report:
    """Judge what the probes found; as `diagnose`, without looking at anything."""
    reason = ""
    if profile is None:
        profile, reason = _choose(World("cpu", environment, outcomes))
    world = World(profile, environment, outcomes)
    found = [
        finding for group in (host, wheels, torch, mindspore, cann, hccl, launch) for finding in group.judge(world)
    ]
    order = list(CHECKS)
    return Report(f"profile {profile}", reason, tuple(sorted(found, key=lambda finding: order.index(finding.id))))


def _choose(world: World) -> tuple[str, str]:
    """The profile of a machine, by what is plugged into it, and the reason."""
    cann_facts, torch_facts = world.facts("cann"), world.facts("torch_itself")
    if cann_facts.get("nodes"):
        return "npu", f"/dev/{cann_facts['nodes'][0]} is here"
    if cann_facts.get("stated"):
        return "npu", "ASCEND_HOME_PATH is set"
    if torch_facts.get("cuda.devices"):
        return "cuda", "PyTorch sees a CUDA device"
    if world.facts("host").get("nvidia"):
        return "cuda", f"/dev/{world.facts('host')['nvidia'][0]} is here"
    if world.environment.get("HYPER_PARALLEL_PLATFORM") == "mindspore":
        return "mindspore", "HYPER_PARALLEL_PLATFORM=mindspore"
    if world.has_mindspore and not world.has_torch:
        return "mindspore", "MindSpore is the only framework here"
    return "cpu", "no NPU and no CUDA device is here"
