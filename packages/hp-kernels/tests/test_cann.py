"""Around the CANN kernels: whether they can be built, which library is used, and what torch_npu is asked for."""

from __future__ import annotations

import ctypes
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from hp_kernels import cann, moe_permute, moe_unpermute
from hp_kernels.platform.torch import npu, permute


def a_cann(root: Path, folder: str = "compiler") -> dict[str, str]:
    """A made-up CANN and the environment that its set_env.sh would make."""
    home = root / "ascend-toolkit" / "latest"
    compiler = home / folder / "tikcpp" / "ascendc_kernel_cmake"
    compiler.mkdir(parents=True)
    (compiler / "ascendc.cmake").write_text("")
    (home.parent / "set_env.sh").write_text("")
    tools = root / "bin"
    tools.mkdir()
    (tools / "cmake").write_text("#!/bin/sh\n")
    (tools / "cmake").chmod(0o755)
    return {
        "ASCEND_HOME_PATH": str(home),
        "ASCEND_OPP_PATH": str(home / "opp"),
        "LD_LIBRARY_PATH": f"/usr/lib:{home}/lib64",
        "HP_KERNELS_SOC": "Ascend910B3",
        "PATH": str(tools),
    }


@pytest.mark.parametrize("folder", ["compiler", "tools"])
def test_a_whole_cann_has_no_problems(tmp_path: Path, folder: str) -> None:
    environment = a_cann(tmp_path, folder)
    assert cann.cann_problems(environment) == []
    assert cann.decide(environment) == (True, "")


MISSING: dict[str, tuple[dict[str, str | None], str, str]] = {
    "no environment": (
        {"ASCEND_HOME_PATH": None},
        "ASCEND_HOME_PATH is not set",
        "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
    ),
    "a CANN that has gone": (
        {"ASCEND_HOME_PATH": "/nowhere/cann"},
        "/nowhere/cann, which is no folder",
        "ls -d /usr/local/Ascend/*/",
    ),
    "set_env.sh not sourced": (
        {"ASCEND_OPP_PATH": None},
        "set_env.sh was not sourced",
        "source {root}/ascend-toolkit/set_env.sh",
    ),
    "libraries of another": (
        {"LD_LIBRARY_PATH": "/usr/lib"},
        "set_env.sh was not sourced",
        "source {root}/ascend-toolkit/set_env.sh",
    ),
    "no NPU named": ({"HP_KERNELS_SOC": None}, "doesn't name the NPU", "npu-smi info"),
    "no cmake": ({"PATH": ""}, "cmake is not on the PATH", "pip install cmake"),
}


@pytest.mark.parametrize("missing", MISSING)
def test_what_is_missing_is_named_with_the_command_that_mends_it(tmp_path: Path, missing: str) -> None:
    changes, symptom, command = MISSING[missing]
    environment = {name: value for name, value in (a_cann(tmp_path) | changes).items() if value is not None}
    [problem] = cann.cann_problems(environment)
    assert symptom in problem
    assert command.format(root=tmp_path) in problem
    assert cann.decide(environment) == (False, problem)
    with pytest.raises(ValueError, match="HP_KERNELS_CANN=on, but the CANN kernels can't be built here"):
        cann.decide(environment | {"HP_KERNELS_CANN": "on"})
    assert cann.decide(environment | {"HP_KERNELS_CANN": "off"}) == (False, "HP_KERNELS_CANN=off")


def test_only_the_runtime_is_installed(tmp_path: Path) -> None:
    environment = a_cann(tmp_path)
    (Path(environment["ASCEND_HOME_PATH"]) / "compiler/tikcpp/ascendc_kernel_cmake/ascendc.cmake").unlink()
    [problem] = cann.cann_problems(environment)
    assert "only CANN's runtime" in problem
    assert "Ascend-cann-toolkit" in problem


def test_cmake_asks_the_file_as_a_script() -> None:
    """Without the package around it, as it is while the package is being built."""

    def ask(switch: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-I", "-S", cann.__file__]
        return subprocess.run(command, env={"HP_KERNELS_CANN": switch}, capture_output=True, text=True, check=False)

    assert ask("auto").stdout.startswith("left out: ASCEND_HOME_PATH is not set")
    assert ask("on").returncode == 1
    assert "1. ASCEND_HOME_PATH is not set" in ask("on").stderr
    assert "must be auto, on or off, not 'maybe'" in ask("maybe").stderr


def test_without_a_library_the_switch_decides(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(cann, "_LIBRARY", tmp_path / "libhp_kernels_cann.so")
    cann.reload()
    assert cann.cann_library() is None
    assert "built without CANN" in cann.why_not_cann()
    monkeypatch.setenv("HP_KERNELS_CANN", "on")
    cann.reload()
    try:
        with pytest.raises(ImportError, match=r"source its set_env\.sh"):
            cann.cann_library()
    finally:
        monkeypatch.undo()
        cann.reload()


@pytest.fixture
def torch_npu(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, Any]]:
    """A made-up torch_npu that notes what it is asked for, and CPU tensors that pass for the NPU's."""
    asked: list[tuple[str, Any]] = []

    def npu_moe_token_permute(tokens: torch.Tensor, experts: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        asked.append(("permute", experts.dtype))
        rows = permute.sort_twin(experts, int(experts.max()) + 1)[0]
        return permute.dispatch_twin(tokens, rows), rows.flatten().int()

    def npu_moe_token_unpermute(
        permuted: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None
    ) -> torch.Tensor:
        asked.append(("unpermute", (rows.dtype, tuple(rows.shape))))
        return permute.combine_twin(
            permuted, rows.long().view(len(rows) if weights is None else weights.shape[0], -1), weights
        )

    fake = SimpleNamespace(npu_moe_token_permute=npu_moe_token_permute, npu_moe_token_unpermute=npu_moe_token_unpermute)
    monkeypatch.setitem(sys.modules, "torch_npu", fake)  # type: ignore[arg-type]
    monkeypatch.setattr(npu, "on_npu", lambda tensor: True)
    return asked


def test_torch_npu_permutes_where_it_can(torch_npu: list[tuple[str, Any]]) -> None:
    tokens, experts, weights = torch.randn(6, 4), torch.randint(0, 3, (6, 2)), torch.rand(6, 2)
    experts[0] = torch.tensor([2, 0])
    permuted = moe_permute(tokens, experts, 3)
    out = moe_unpermute(permuted.tokens, permuted.rows, weights)
    assert torch_npu == [("permute", torch.int64), ("unpermute", (torch.int32, (12,)))]
    rows, counts, offsets = permute.sort_twin(experts, 3)
    expected = (permute.dispatch_twin(tokens, rows), rows, counts, offsets)
    assert all(map(torch.equal, permuted, expected))
    assert torch.equal(out, permute.combine_twin(expected[0], rows, weights))
    # Of several rows without weights it would make a token each.
    moe_unpermute(permuted.tokens, permuted.rows)
    assert len(torch_npu) == 2


def test_the_launch_passes_what_the_host_code_takes() -> None:
    calls: list[tuple[Any, ...]] = []

    def hp_cann_lse_merge(*arguments: Any) -> int:
        calls.append(arguments)
        return 2 if len(calls) == 2 else 0

    library: Any = SimpleNamespace(hp_cann_lse_merge=hp_cann_lse_merge)
    out, lse = torch.zeros(2, 3, 4, 8, dtype=torch.bfloat16), torch.zeros(2, 4, 3)
    npu.launch_lse_merge(library, 77, out, lse, out, lse, out, lse, True)
    [(stream, code, *pointers, outer, middle, inner, swapped, dim)] = calls
    assert isinstance(stream, ctypes.c_void_p)
    assert stream.value == 77
    assert code == 3
    assert [pointer.value for pointer in pointers] == [out.data_ptr(), lse.data_ptr()] * 3
    assert [size.value for size in (outer, middle, inner, swapped, dim)] == [2, 3, 4, 1, 8]
    with pytest.raises(RuntimeError, match="can't be cut for its cores"):
        npu.launch_lse_merge(library, 77, out, lse, out, lse, out, lse, True)
