"""The bodies of the CANN kernels on a CPU, through the shim of Ascend C: the twins' values for tails, alignment and splits."""

from __future__ import annotations

import ctypes
import subprocess
from pathlib import Path

import pytest
import torch

from hp_kernels.dtypes import DTYPE_CODES
from hp_kernels.platform.torch.lse_merging import merge_twin
from hp_kernels.platform.torch.permute import combine_twin, dispatch_twin

CANN = Path(__file__).resolve().parents[1] / "cann"
UNIFIED_BYTES = 192 * 1024
DTYPES = (torch.float32, torch.float16, torch.bfloat16)


class Device:
    """A made-up NPU with the entry points of the real one."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self.library = library
        self.library.hp_shim_fault.restype = ctypes.c_char_p

    def run(
        self, name: str, dtype: torch.dtype, *arguments: object, watch: torch.Tensor, cores: int, unified_bytes: int
    ) -> None:
        code = DTYPE_CODES[str(dtype).removeprefix("torch.")]
        held = watch.numel() * watch.element_size()
        self.library.hp_shim_device(
            cores, ctypes.c_uint64(unified_bytes), ctypes.c_void_p(watch.data_ptr()), ctypes.c_uint64(held)
        )
        converted = [
            ctypes.c_void_p(argument.data_ptr())
            if isinstance(argument, torch.Tensor)
            else argument
            if argument is None or isinstance(argument, bool)
            else ctypes.c_uint64(argument)  # type: ignore[arg-type]
            for argument in arguments
        ]
        status = getattr(self.library, f"hp_cann_{name}")(None, code, *converted)
        if status:
            raise RuntimeError({1: "element type", 2: "no tiling"}.get(status) or self.library.hp_shim_fault().decode())

    def lse_merge(
        self, inputs: list[torch.Tensor], swapped: bool, cores: int = 5, unified_bytes: int = UNIFIED_BYTES
    ) -> tuple[torch.Tensor, torch.Tensor]:
        out, lse = torch.full_like(inputs[0], torch.nan), torch.full_like(inputs[1], torch.nan)
        self.run(
            "lse_merge",
            out.dtype,
            *inputs,
            out,
            lse,
            *out.shape[:3],
            swapped,
            out.shape[3],
            watch=out,
            cores=cores,
            unified_bytes=unified_bytes,
        )
        return out, lse

    def dispatch(
        self, tokens: torch.Tensor, rows: torch.Tensor, cores: int = 5, unified_bytes: int = UNIFIED_BYTES
    ) -> torch.Tensor:
        permuted = torch.full((rows.numel(), tokens.shape[1]), torch.nan, dtype=tokens.dtype)
        self.run(
            "moe_dispatch",
            tokens.dtype,
            tokens,
            rows.int(),
            permuted,
            *rows.shape,
            tokens.shape[1],
            watch=permuted,
            cores=cores,
            unified_bytes=unified_bytes,
        )
        return permuted

    def combine(
        self,
        permuted: torch.Tensor,
        rows: torch.Tensor,
        weights: torch.Tensor | None,
        cores: int = 5,
        unified_bytes: int = UNIFIED_BYTES,
    ) -> torch.Tensor:
        out = torch.full((rows.shape[0], permuted.shape[1]), torch.nan, dtype=permuted.dtype)
        self.run(
            "moe_combine",
            out.dtype,
            permuted,
            rows.int(),
            weights,
            out,
            *rows.shape,
            out.shape[1],
            watch=out,
            cores=cores,
            unified_bytes=unified_bytes,
        )
        return out


@pytest.fixture(scope="module")
def device(tmp_path_factory: pytest.TempPathFactory) -> Device:
    library = tmp_path_factory.mktemp("shim") / "libshim.so"
    command = ["c++", "-std=c++17", "-O1", "-shared", "-fPIC", "-ffp-contract=off", "-Wall", "-Wextra", "-Werror"]
    subprocess.run([*command, "-I", str(CANN / "shim"), "-o", str(library), str(CANN / "shim" / "run.cpp")], check=True)
    return Device(ctypes.CDLL(str(library)))


def partials(dtype: torch.dtype, batch: int, seq: int, heads: int, dim: int, swapped: bool) -> list[torch.Tensor]:
    shape = (batch, heads, seq) if swapped else (batch, seq, heads)
    tensors = []
    for _ in range(2):
        tensors += [torch.randn(batch, seq, heads, dim).to(dtype), 4 * torch.randn(shape)]
    # One row of the first partial without keys, whose out is NaN, and one of both.
    tensors[1].view(-1)[0] = -torch.inf
    tensors[0].view(-1)[:dim] = torch.nan
    tensors[1].view(-1)[-1] = tensors[3].view(-1)[-1] = -torch.inf
    return tensors


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("swapped", [True, False])
@pytest.mark.parametrize("dim", [1, 15, 16, 33, 128])
def test_merge_with_tails(device: Device, dtype: torch.dtype, swapped: bool, dim: int) -> None:
    for batch, seq, heads, cores in ((1, 1, 1, 8), (2, 7, 3, 5), (1, 65, 2, 1)):
        inputs = partials(dtype, batch, seq, heads, dim, swapped)
        torch.testing.assert_close(device.lse_merge(inputs, swapped, cores), merge_twin(*inputs, swapped))


@pytest.mark.parametrize("dtype", DTYPES)
def test_merge_in_small_buffers(device: Device, dtype: torch.dtype) -> None:
    """Tiles of a few rows, and rows that don't fit whole."""
    inputs = partials(dtype, 2, 9, 2, 200, True)
    for unified_bytes in (1024, 4096, 10_000):
        merged = device.lse_merge(inputs, True, 3, unified_bytes)
        torch.testing.assert_close(merged, merge_twin(*inputs, True))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 2, 5])
def test_dispatch_and_combine(device: Device, dtype: torch.dtype, top_k: int) -> None:
    for tokens, dim, cores, unified_bytes in (
        (1, 1, 8, UNIFIED_BYTES),
        (13, 16, 5, UNIFIED_BYTES),
        (13, 33, 4, 1000),
        (40, 100, 3, 700),
    ):
        rows = torch.randperm(tokens * top_k).view(tokens, top_k)
        x, permuted, weights = (
            torch.randn(tokens, dim).to(dtype),
            torch.randn(tokens * top_k, dim).to(dtype),
            torch.rand(tokens, top_k),
        )
        assert torch.equal(device.dispatch(x, rows, cores, unified_bytes), dispatch_twin(x, rows))
        for given in (weights, None):
            assert torch.equal(
                device.combine(permuted, rows, given, cores, unified_bytes), combine_twin(permuted, rows, given)
            )


def test_the_shim_sees_rows_out_of_range(device: Device) -> None:
    rows = torch.arange(6).view(3, 2)
    with pytest.raises(RuntimeError, match="offset"):
        device.dispatch(torch.randn(3, 8), rows + 5)
    with pytest.raises(RuntimeError, match="written 2 times"):
        device.dispatch(torch.randn(3, 8), rows // 2 * 2)
    with pytest.raises(RuntimeError, match="no tiling"):
        device.dispatch(torch.randn(3, 8), rows, unified_bytes=64)
