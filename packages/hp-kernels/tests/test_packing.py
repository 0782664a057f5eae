"""Packing, unpacking and casting equal torch's own copies, bit for bit (a NaN being a NaN), natively and by the twins."""

from __future__ import annotations

from itertools import product

import pytest
import torch

from hp_kernels import KernelArgumentError, cast_into, pack, pack_into, unpack, unpack_into
from hp_kernels.loading import require_native

DTYPES = [torch.float32, torch.float64, torch.float16, torch.bfloat16]
KERNELS = pytest.mark.parametrize("kernels", ["native", "portable"])


@pytest.fixture(autouse=True)
def _which(request: pytest.FixtureRequest) -> None:
    if "kernels" in request.fixturenames and request.getfixturevalue("kernels") == "portable":
        request.getfixturevalue("portable_kernels")


def same(first: torch.Tensor, second: torch.Tensor) -> bool:
    """Equal bits, a NaN being a NaN: torch itself gives NaNs other bits in vectors than in single numbers."""
    return first.dtype == second.dtype and first.shape == second.shape and torch.equal(
        torch.where(first.isnan(), torch.zeros_like(first), first).view(-1).view(torch.uint8),
        torch.where(second.isnan(), torch.zeros_like(second), second).view(-1).view(torch.uint8),
    ) and torch.equal(first.isnan(), second.isnan())  # fmt: skip


def difficult(dtype: torch.dtype) -> torch.Tensor:
    """All numbers of 16 bits; of wider types those around what the shorter types hold, ties and their neighbours."""
    if dtype.itemsize == 2:
        return torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(dtype)
    short = torch.cat([difficult(torch.float16).float(), difficult(torch.bfloat16).float()])
    ordered = short[short.isfinite()].unique()
    ties = ((ordered[1:].double() + ordered[:-1].double()) / 2).float()
    numbers = torch.cat(
        [short, ties, ties.nextafter(torch.tensor(torch.inf)), ties.nextafter(torch.tensor(-torch.inf))]
    )
    if dtype == torch.float32:
        return numbers
    wide = numbers.double()
    return torch.cat([wide, wide.nextafter(torch.tensor(torch.inf).double()), torch.tensor([1e308, -1e-320]).double()])


def converted(source: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """By way of float32 from float64 to 16 bits, which is what the format of random numbers asks for, too."""
    return source.float().to(dtype) if source.dtype == torch.float64 and dtype.itemsize == 2 else source.to(dtype)


@KERNELS
@pytest.mark.parametrize(("to", "origin"), list(product(DTYPES, DTYPES)))
def test_conversions_round_to_nearest_even(to: torch.dtype, origin: torch.dtype, kernels: str) -> None:
    source = difficult(origin)
    target = torch.empty(len(source), dtype=to)
    cast_into([target], [source])
    assert same(target, converted(source, to))


@KERNELS
@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_and_unpack(dtype: torch.dtype, kernels: str) -> None:
    tensors = [
        torch.randn(3, 4),
        torch.randn(5).double(),
        torch.randn(0, 7),
        torch.randn(6, 2).t().bfloat16(),
        torch.randn(()),
    ]
    flat = pack(tensors, dtype)
    assert same(flat, torch.cat([converted(tensor, dtype).flatten() for tensor in tensors]))
    for part, tensor in zip(unpack(flat, tensors), tensors, strict=True):
        assert same(part, converted(converted(tensor, dtype), tensor.dtype).contiguous())


@KERNELS
def test_places_in_a_larger_buffer(kernels: str) -> None:
    flat, tensors = torch.full((40,), 9.0, dtype=torch.bfloat16), [torch.randn(3, 4), torch.randn(5), torch.randn(0)]
    pack_into(flat, tensors, [20, 3, 40])
    assert same(flat[20:32], tensors[0].flatten().bfloat16())
    assert same(flat[3:8], tensors[1].bfloat16())
    assert (flat[:3] == 9).all()
    assert (flat[8:20] == 9).all()
    assert (flat[32:] == 9).all()
    back = [torch.empty(3, 4), torch.empty(5), torch.empty(0)]
    unpack_into(back, flat, [20, 3, 40])
    assert same(back[0], tensors[0].bfloat16().float())
    assert same(back[1], tensors[1].bfloat16().float())


@pytest.mark.parametrize("threads", [1, 3])
def test_tensors_that_threads_share(threads: int) -> None:
    """Ranges of threads begin inside of tensors, and hold several."""
    require_native().set_thread_count(threads)
    tensors = [torch.randn(size) for size in (100_000, 7, 150_001, 0, 64, 1, 33_333)]
    assert same(pack(tensors, torch.float16), torch.cat(tensors).half())
    integers = [torch.randint(0, 99, (70_000,)), torch.randint(0, 99, (3, 5))]
    assert torch.equal(pack(integers, torch.int64), torch.cat([one.flatten() for one in integers]))


@KERNELS
def test_gradients(kernels: str) -> None:
    tensors = [torch.randn(3, 4, dtype=torch.float64, requires_grad=True), torch.randn(5, requires_grad=True)]
    torch.autograd.gradcheck(lambda first: pack([first, first * 2], torch.float64), tensors[:1])
    like = [torch.empty(2, 3, dtype=torch.float64), torch.empty(6, dtype=torch.float64)]
    torch.autograd.gradcheck(
        lambda first: unpack(first, like), torch.randn(12, dtype=torch.float64, requires_grad=True)
    )
    weights = torch.randn(17)
    (pack(tensors, torch.float32) * weights).sum().backward()
    assert torch.equal(tensors[0].grad, weights[:12].view(3, 4).double())
    assert torch.equal(tensors[1].grad, weights[12:])


def test_opcheck() -> None:
    ops, sources = torch.ops.hp_kernels, [torch.randn(3, 4), torch.randn(5, dtype=torch.float64)]
    leaves = [source.clone().requires_grad_() for source in sources]
    torch.library.opcheck(ops.pack, (leaves, torch.bfloat16))
    torch.library.opcheck(ops.unpack, (torch.randn(17, requires_grad=True), sources))
    # without gradients, tracing them adds nothing
    quick = ("test_schema", "test_autograd_registration", "test_faketensor")
    torch.library.opcheck(ops.pack_into, (torch.zeros(40), sources, [20, 3]), test_utils=quick)
    torch.library.opcheck(ops.unpack_into, (sources, torch.zeros(40), [20, 3]), test_utils=quick)
    torch.library.opcheck(ops.cast_into, ([torch.empty(3, 4).bfloat16()], sources[:1]), test_utils=quick)


def _flat() -> torch.Tensor:
    return torch.zeros(20)


BAD = {
    "no tensors": lambda: pack([], torch.float32),
    "integers into floats": lambda: pack([torch.arange(3)], torch.float32),
    "several devices": lambda: pack([torch.zeros(3), torch.zeros(3, device="meta")], torch.float32),
    "a flat tensor of another size": lambda: unpack(torch.zeros(5), [torch.zeros(4)]),
    "a flat tensor of two dims": lambda: pack_into(torch.zeros(4, 5), [torch.zeros(3)], [0]),
    "an offset before the beginning": lambda: pack_into(_flat(), [torch.zeros(3)], [-1]),
    "an offset too near to the end": lambda: pack_into(_flat(), [torch.zeros(3)], [18]),
    "an offset that overflows": lambda: pack_into(_flat(), [torch.zeros(3)], [2**63 - 2]),
    "fewer offsets than tensors": lambda: pack_into(_flat(), [torch.zeros(3), torch.zeros(3)], [0]),
    "places that overlap": lambda: pack_into(_flat(), [torch.zeros(3), torch.zeros(3)], [0, 2]),
    "a source that isn't dense": lambda: pack_into(_flat(), [torch.zeros(4, 4)[:, 1]], [0]),
    "a target that isn't dense": lambda: pack_into(torch.zeros(40)[::2], [torch.zeros(4)], [0]),
    "a source within flat": lambda: (lambda flat: pack_into(flat, [flat[5:8]], [0]))(_flat()),
    "a target within flat": lambda: (lambda flat: unpack_into([flat[5:8]], flat, [0]))(_flat()),
    "targets that overlap": lambda: (lambda one: unpack_into([one[:4], one[3:]], _flat(), [0, 4]))(torch.zeros(8)),
    "shapes that differ": lambda: cast_into([torch.zeros(3, 2)], [torch.zeros(2, 3)]),
    "fewer targets than sources": lambda: cast_into([torch.zeros(3)], [torch.zeros(3)] * 2),
    "a cast in place": lambda: (lambda one: cast_into([one], [one]))(torch.zeros(3)),
    "a cast onto another's source": lambda: (lambda one: cast_into([one[2:], _flat()[:4]], [torch.zeros(2), one]))(torch.zeros(4)),
}  # fmt: skip


@KERNELS
@pytest.mark.parametrize("name", BAD)
def test_bad_arguments(name: str, kernels: str) -> None:
    with pytest.raises(KernelArgumentError):
        BAD[name]()


def test_the_native_boundary_refuses_by_itself() -> None:
    """What the Python side would have refused before."""
    native = require_native()
    base = torch.zeros(64)
    at = base.data_ptr()

    def part(start: int, count: int, dtype: int = 0) -> tuple[object, ...]:
        return at + 4 * start, 256 - 4 * start, dtype, (count,)

    for name, call in {
        "share memory": lambda: native.pack(part(0, 8), [0], [part(4, 8)]),
        "apart": lambda: native.pack(part(0, 8), [0, 3], [part(16, 4), part(24, 4)]),
        "would lie at": lambda: native.pack(part(0, 8), [5], [part(16, 4)]),
        "64 bits": lambda: native.pack(part(0, 8), [2**63 - 1], [part(16, 4)]),
        "1 for 2": lambda: native.pack(part(0, 8), [0], [part(16, 4), part(24, 4)]),
        "isn't converted": lambda: native.pack(part(0, 8), [0], [part(16, 4, 4)]),
        "one of them|apart": lambda: native.unpack([part(0, 4), part(2, 4)], part(32, 8), [0, 4]),
        "memory of their own": lambda: native.cast([part(0, 4)], [part(2, 4)]),
        "must have the shape": lambda: native.cast([part(0, 4)], [part(8, 5)]),
        "needs": lambda: native.cast([part(60, 5)], [part(8, 5)]),
    }.items():
        with pytest.raises(KernelArgumentError, match=name):
            call()
    assert not base.any()
