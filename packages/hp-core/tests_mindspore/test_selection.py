"""Both frameworks in one process: it works with one of them, and what belongs to the other is refused by name."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

_SETTING = """
import os
import mindspore as ms
import numpy as np
import torch
import hp_core as hp

mesh = hp.DeviceMesh((1,), ("tp",))
ones = {"torch": torch.ones(4, 4), "mindspore": ms.Tensor(np.ones((4, 4), np.float32))}
models = {"torch": torch.nn.Sequential(torch.nn.Linear(4, 4)), "mindspore": ms.nn.SequentialCell(ms.nn.Dense(4, 4))}
own = hp.get_platform().name
other = "mindspore" if own == "torch" else "torch"
cut = hp.DTensor.from_local(ones[own], mesh, [hp.Shard(0)])

def switched():
    os.environ["HYPER_PARALLEL_PLATFORM"] = other
    try:
        hp.init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    finally:
        del os.environ["HYPER_PARALLEL_PLATFORM"]

situations = {
    "from_local": lambda: hp.DTensor.from_local(ones[other], mesh, [hp.Replicate()]),
    "distribute_tensor": lambda: hp.distribute_tensor(ones[other], mesh, [hp.Shard(0)]),
    "no tensor": lambda: hp.distribute_tensor([1.0, 2.0], mesh, [hp.Shard(0)]),
    "function": lambda: (torch if own == "torch" else ms.mint).matmul(cut, ones[other]),
    "operator": lambda: cut + ones[other],
    "parallelize_module": lambda: hp.parallelize_module(models[other], mesh, {"0": hp.ColwiseParallel()}),
    "one style": lambda: hp.parallelize_module(models[other], mesh, hp.ColwiseParallel()),
    "distribute_module": lambda: hp.distribute_module(models[other], mesh),
    "shard_module": lambda: hp.shard_module(models[other], mesh, {}),
    "init_parameters": lambda: hp.init_parameters(models[other]),
    "no module": lambda: hp.distribute_module({}, mesh),
    "switched": switched,
}
print("own", own, flush=True)
for name, situation in situations.items():
    try:
        situation()
    except Exception as error:
        print(f"{name}|{type(error).__name__}|{' '.join(str(error).split())}", flush=True)
    else:
        print(f"{name}|passed|", flush=True)
"""

Refusals = tuple[str, str, dict[str, list[str]]]
"""The framework that a process works with, the other one, and by situation the type and the message of the error."""

TENSORS = {"torch": "torch.Tensor", "mindspore": "mindspore.Tensor"}
MODULES = {"torch": "torch.nn.Module", "mindspore": "mindspore.nn.Cell"}
TITLES = {"torch": "PyTorch", "mindspore": "MindSpore"}


def _process(script: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if name != "HYPER_PARALLEL_PLATFORM"}
    return subprocess.run(
        [sys.executable, "-c", script],
        env={**inherited, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), **environment},
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module", params=["torch", "mindspore"])
def refusals(request: pytest.FixtureRequest) -> Refusals:
    """What a process that works with one framework says to things of the other."""
    own = request.param
    done = _process(_SETTING, HYPER_PARALLEL_PLATFORM=own)
    assert not done.returncode, done.stderr
    lines = [line.split("|", 2) for line in done.stdout.splitlines() if "|" in line]
    assert f"own {own}" in done.stdout
    return own, "mindspore" if own == "torch" else "torch", {name: said for name, *said in lines}


@pytest.mark.parametrize("situation", ["from_local", "distribute_tensor"])
def test_the_other_frameworks_tensor_is_refused(refusals: Refusals, situation: str) -> None:
    own, other, said = refusals
    kind, message = said[situation]
    assert kind == "PlatformError"
    assert f"Tensor was given, but this process works with {TITLES[own]}: give a {TENSORS[own]}" in message
    assert f"set HYPER_PARALLEL_PLATFORM={other} before the first use" in message


@pytest.mark.parametrize("situation", ["function", "operator"])
def test_the_other_frameworks_tensor_is_no_operand(refusals: Refusals, situation: str) -> None:
    own, _, said = refusals
    kind, message = said[situation]
    # most often the framework itself refuses it; what MindSpore hands on is told by us
    assert kind == ("ShardingRuleError" if (own, situation) == ("mindspore", "operator") else "TypeError")
    assert kind == "TypeError" or "a torch.Tensor was given, but this process works with MindSpore" in message


@pytest.mark.parametrize(
    "situation", ["parallelize_module", "one style", "distribute_module", "shard_module", "init_parameters"]
)
def test_the_other_frameworks_module_is_refused(refusals: Refusals, situation: str) -> None:
    own, other, said = refusals
    kind, message = said[situation]
    assert kind == "PlatformError"
    assert f"Sequential{'' if other == 'torch' else 'Cell'} was given, but this process works with" in message
    assert f"give a {MODULES[own]}" in message


def test_what_is_no_tensor_and_no_module_is_refused(refusals: Refusals) -> None:
    own, _, said = refusals
    assert said["no tensor"] == ["PlatformError", f"a builtins.list was given where a {TENSORS[own]} is needed."]
    assert said["no module"] == ["PlatformError", f"a builtins.dict was given where a {MODULES[own]} is needed."]


def test_a_process_stays_with_its_framework(refusals: Refusals) -> None:
    own, other, said = refusals
    kind, message = said["switched"]
    assert kind == "PlatformError"
    assert f"={other} was set after this process had begun to work with {own}" in message


def test_the_framework_that_is_imported_is_taken() -> None:
    done = _process("import mindspore, hp_core; print('chosen', hp_core.get_platform().name)")
    assert "chosen mindspore" in done.stdout, done.stderr


def test_a_numpy_under_which_mindspore_lacks_its_types_is_named() -> None:
    # MindSpore itself comes up under NumPy 2, with a warning, and without bfloat16 arrays
    script = "from mindspore.common import np_dtype; del np_dtype.bfloat16; import hp_core; hp_core.get_platform()"
    done = _process(script, HYPER_PARALLEL_PLATFORM="mindspore")
    assert "PlatformError: MindSpore needs NumPy below 2, and 1." in done.stderr
    assert "pip install 'numpy<2'" in done.stderr


def test_the_first_use_leaves_the_device_to_be_set() -> None:
    # an op would start MindSpore's runtime, after which it refuses set_device()
    done = _process("import mindspore, hp_core; hp_core.DTensor; mindspore.set_device('CPU'); print('set')")
    assert "set" in done.stdout, done.stderr
