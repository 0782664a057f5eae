"""The optional islands: what keeps them from being built, with the remedy; and torch's, which is built here and used."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from hp_kernels import build, islands
from hp_kernels.build import BuildError
from hp_kernels.platform.torch import building

ISLAND = """
import torch, hp_kernels
import hp_kernels.platform.torch
from hp_kernels.philox import philox_fill
from hp_kernels.platform.torch.arrays import array_of
assert "torch" not in hp_kernels.build_info()["left_out"]
flat, tensors = torch.zeros(40, dtype=torch.bfloat16), [torch.randn(3, 4), torch.randn(5, dtype=torch.float64)]
hp_kernels.pack_into(flat, tensors, [20, 3])
assert torch.equal(flat[20:32], tensors[0].flatten().bfloat16()) and torch.equal(flat[3:8], tensors[1].float().bfloat16())
back = [torch.empty(3, 4), torch.empty(5).double()]
hp_kernels.unpack_into(back, flat, [20, 3])
assert torch.equal(back[0], tensors[0].bfloat16().float()) and torch.equal(back[1], tensors[1].float().bfloat16().double())
hp_kernels.cast_into(back, tensors)
assert torch.equal(back[1], tensors[1])
numbers, twins = torch.empty(70), torch.empty(70)
arguments = ("normal", [1 << 40, 9, 7], [5, 0, 0], [6, 9, 7], -3, 1 << 62, 0.0)
torch.ops.hp_kernels.philox_fill(numbers[:63], *arguments)
philox_fill("normal", array_of(twins[:63]), (1 << 40, 9, 7), [(5, 6), (0, 9), (0, 7)], -3, 1 << 62)
assert torch.equal(numbers[:63], twins[:63])
for mistake in (
    lambda: hp_kernels.pack_into(flat, [flat[3:5]], [10]),
    lambda: hp_kernels.pack_into(flat, [torch.zeros(4, 4).t()], [0]),
    lambda: hp_kernels.pack_into(flat, [torch.zeros(4)], [38]),
    lambda: hp_kernels.pack_into(flat, [torch.zeros(4, dtype=torch.int64)], [0]),
    lambda: hp_kernels.cast_into([torch.zeros(3)], [torch.zeros(4)]),
    lambda: hp_kernels.fill_random(numbers, "poisson", (70,), [(0, 70)], 1, 2),
):
    try:
        mistake()
    except hp_kernels.KernelArgumentError as error:
        assert "hp_kernels:" not in str(error)
    else:
        raise AssertionError("no error")
torch.library.opcheck(torch.ops.hp_kernels.pack_into, (flat, tensors, [20, 3]), test_utils=("test_schema", "test_faketensor"))
print("the island works")
"""


@pytest.mark.timeout(900)  # it compiles
def test_the_torch_island_is_built_and_used(tmp_path: Path) -> None:
    environment = {**os.environ, "HP_KERNELS_HOME": str(tmp_path), "HP_KERNELS_TORCH": "on"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    missing = subprocess.run(
        [sys.executable, "-c", "import hp_kernels.platform.torch"],
        env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert "python -m hp_kernels.build torch" in missing.stderr
    command = [sys.executable, "-m", "hp_kernels.build", "torch"]
    completed = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    completed = subprocess.run(
        [sys.executable, "-c", ISLAND], env=environment, capture_output=True, text=True, check=False
    )
    assert "the island works" in completed.stdout, completed.stderr


def test_what_keeps_the_torch_island_from_being_built(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(building.torch, "__version__", "2.6.0+cpu")
    with pytest.raises(BuildError, match=r"torch 2\.6\.0\+cpu is installed, 2\.7 or newer.*pip install"):
        building.build_island()
    monkeypatch.setattr(building.torch, "__version__", "2.7.1")
    monkeypatch.setattr(building.torch, "compiled_with_cxx11_abi", lambda: False)
    with pytest.raises(BuildError, match=r"old C\+\+ ABI.*pip install --force-reinstall torch"):
        building.build_island()
    monkeypatch.undo()
    monkeypatch.setenv("HP_KERNELS_TORCH", "off")  # set by main, so that it is set back here
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert build.main(["torch"]) == 1
    assert "apt-get install g++" in capsys.readouterr().err


def test_switches(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HP_KERNELS_HOME", str(tmp_path))
    monkeypatch.setenv("HP_KERNELS_TORCH", "auto")
    building.load_island()
    assert "python -m hp_kernels.build torch" in islands.left_out("torch")
    place = islands.folder_of("torch", torch.__version__)
    place.mkdir(parents=True)
    (place / "_torch.so").write_bytes(b"no library")
    building.load_island()
    assert "doesn't load" in islands.left_out("torch")
    monkeypatch.setenv("HP_KERNELS_TORCH", "on")
    with pytest.raises(ImportError, match="Build it again"):
        building.load_island()
    monkeypatch.setenv("HP_KERNELS_TORCH", "perhaps")
    with pytest.raises(ImportError, match="must be auto, on or off"):
        building.load_island()
    monkeypatch.setenv("HP_KERNELS_TORCH", "off")
    building.load_island()
    assert islands.left_out("torch") == "HP_KERNELS_TORCH=off"
