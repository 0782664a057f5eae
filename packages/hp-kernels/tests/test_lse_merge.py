"""The merge of attention partials: against attention over all keys, and the native kernel against its twin."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
import torch

from hp_kernels import KernelArgumentError, loading, lse_merge, lse_merge_
from hp_kernels.loading import require_native
from hp_kernels.platform.torch.arrays import array_of
from hp_kernels.platform.torch.lse_merging import merge_backward_twin, merge_twin

BATCH, SEQ, HEADS = 2, 5, 3
SHORT = (torch.bfloat16, torch.float16)
PAIRS = [
    *((dtype, dtype) for dtype in (torch.float32, *SHORT, torch.float64)),
    *((torch.float32, short) for short in SHORT),
]


def wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def partials(
    first: torch.dtype, second: torch.dtype, *, dim: int = 33, swapped: bool = True, masked: bool = True
) -> list[torch.Tensor]:
    """out_a, lse_a, out_b, lse_b in the form of the ops, with rows that one partial, the other, or neither contributes to."""
    generator = torch.Generator().manual_seed(dim)
    shape = (BATCH, HEADS, SEQ) if swapped else (BATCH, SEQ, HEADS)
    tensors = []
    for index, dtype in enumerate((first, second)):
        out = torch.randn(BATCH, SEQ, HEADS, dim, generator=generator).to(dtype)
        lse = (4 * torch.randn(shape, generator=generator)).to(wide(first))
        if masked:
            lse[0, index, 0] = -torch.inf
            lse[1, 2, 2] = -torch.inf
            # What attention without keys gives is 0 / 0.
            out[0, 0 if swapped else index, index if swapped else 0] = torch.nan
            out[1, 2, 2] = torch.nan
        tensors += [out, lse]
    return tensors


def attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Result [batch, seq, heads, dim] and lse [batch, heads, seq]."""
    scores = torch.einsum("bshd,bthd->bhst", query, key)
    lse = scores.logsumexp(-1)
    return torch.einsum("bhst,bthd->bshd", (scores - lse.unsqueeze(-1)).exp(), value).contiguous(), lse


def test_partials_over_parts_of_the_keys_merge_to_attention_over_all() -> None:
    generator = torch.Generator().manual_seed(0)
    query, key, value = (
        torch.randn(BATCH, seq, HEADS, 4, generator=generator, dtype=torch.float64, requires_grad=True)
        for seq in (SEQ, 7, 7)
    )
    dense = attention(query, key, value)
    whole: tuple[torch.Tensor, torch.Tensor] | None = None
    for start, end in ((0, 3), (3, 4), (4, 7)):
        part = attention(query, key[:, start:end], value[:, start:end])
        whole = part if whole is None else lse_merge(*whole, *part)
    assert whole is not None
    weights = [torch.randn(tensor.shape, generator=generator, dtype=torch.float64) for tensor in dense]
    gradients = [
        torch.autograd.grad(
            [(tensor * weight).sum() for tensor, weight in zip(result, weights, strict=True)], (query, key, value)
        )
        for result in (dense, whole)
    ]
    torch.testing.assert_close(whole, dense)
    torch.testing.assert_close(gradients[1], gradients[0])


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
@pytest.mark.parametrize("swapped", [True, False])
def test_native_equals_twin(dtypes: tuple[torch.dtype, torch.dtype], swapped: bool) -> None:
    require_native()
    for dim in (1, 33, 128):
        inputs = partials(*dtypes, dim=dim, swapped=swapped)
        results = torch.ops.hp_kernels.lse_merge(*inputs, swapped)
        torch.testing.assert_close(results, merge_twin(*inputs, swapped))
        assert not any(result.isnan().any() for result in results)
        given = [torch.randn_like(result) for result in results]
        for grad_lse in (given[1], None):
            gradients = torch.ops.hp_kernels.lse_merge_backward(given[0], grad_lse, *inputs, swapped)
            torch.testing.assert_close(gradients, merge_backward_twin(given[0], grad_lse, *inputs, swapped))
            assert not any(gradient.isnan().any() for gradient in gradients)


def test_the_twin_has_the_gradients_that_torch_derives() -> None:
    inputs = [tensor.requires_grad_() for tensor in partials(torch.float64, torch.float64)]
    results = merge_twin(*inputs, True)
    given = tuple(torch.randn_like(result) for result in results)
    derived = torch.autograd.grad(results, inputs, given)
    torch.testing.assert_close(merge_backward_twin(*given, *inputs, True), derived)


def test_weights_are_as_exact_as_float32_can_be() -> None:
    distances = torch.cat([torch.linspace(0, 120, 20_001), torch.tensor([1e-8, 1e-3, 87.5, 103.0, 103.9, 1e30])])
    lse_a, lse_b = torch.zeros(1, 1, len(distances)), -distances.view(1, 1, -1)
    ones = torch.ones(1, 1, len(distances), 1)
    sums, lse = torch.ops.hp_kernels.lse_merge(0 * ones, lse_a, ones, lse_b, False)
    exact = (-distances.double()).exp()
    expected = exact / (1 + exact)
    relative = ((sums.flatten().double() - expected) / expected).abs()[expected > 2.0**-126]
    assert relative.max() < 4 * 2.0**-24
    assert (sums.flatten().double() - expected).abs()[expected <= 2.0**-126].max() <= 2.0**-148
    relative = ((lse.flatten().double() - exact.log1p()) / exact.log1p()).abs()[exact > 2.0**-126]
    assert relative.max() < 4 * 2.0**-24


def test_derivatives_are_those_of_the_function() -> None:
    inputs = [
        tensor.double()[:, :2].contiguous().requires_grad_()
        for tensor in partials(torch.float64, torch.float64, dim=2, masked=False, swapped=False)
    ]

    def merge(*tensors: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return lse_merge(*tensors, lse_layout="bsh")

    assert torch.autograd.gradcheck(merge, inputs)
    assert torch.autograd.gradgradcheck(merge, inputs)


def test_rows_that_one_partial_makes_up_alone_are_its_rows() -> None:
    out_a, lse_a, out_b, lse_b = partials(torch.float32, torch.float32, masked=False)
    nothing = torch.full_like(lse_b, -torch.inf)
    undefined = torch.full_like(out_b, torch.nan)
    for merged in (lse_merge(out_a, lse_a, undefined, nothing), lse_merge(undefined, nothing, out_a, lse_a)):
        assert torch.equal(merged[0], out_a)
        assert torch.equal(merged[1], lse_a)
    out, lse = lse_merge(undefined, nothing, undefined, nothing)
    assert torch.equal(out, torch.zeros_like(out))
    assert torch.equal(lse, nothing)


@pytest.mark.parametrize(
    "layout", [("bshd", "bsh"), ("bhsd", "bhs"), ("bhsd", "bsh"), ("sbhd", "bhs"), ("sbhd", "sbh")], ids="-".join
)
def test_layouts_are_the_same_tensor_in_another_order(layout: tuple[str, str]) -> None:
    inputs = partials(torch.float32, torch.float32)
    expected = lse_merge(*inputs)
    axes = "bshd", "bhs"

    def reordered(tensor: torch.Tensor, index: int) -> torch.Tensor:
        return tensor.permute([axes[index].index(axis) for axis in layout[index]]).contiguous()

    merged = lse_merge(
        *(reordered(tensor, index % 2) for index, tensor in enumerate(inputs)), layout=layout[0], lse_layout=layout[1]
    )
    torch.testing.assert_close(
        merged, tuple(reordered(tensor, index) for index, tensor in enumerate(expected)), rtol=0, atol=0
    )


@pytest.mark.parametrize("lse_layout", ["ht", "th"])
def test_packed_sequences(lse_layout: str) -> None:
    inputs = [tensor[:1].contiguous() for tensor in partials(torch.float32, torch.float32, swapped=lse_layout == "ht")]
    expected = lse_merge(*inputs, lse_layout="bhs" if lse_layout == "ht" else "bsh")
    merged = lse_merge(*(tensor[0] for tensor in inputs), layout="thd", lse_layout=lse_layout)
    torch.testing.assert_close(merged, tuple(tensor[0] for tensor in expected), rtol=0, atol=0)


@pytest.mark.parametrize("dtypes", PAIRS, ids=str)
def test_in_place_is_the_same_merge(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    out_a, lse_a, out_b, lse_b = partials(*dtypes)
    expected = lse_merge(out_a, lse_a, out_b, lse_b)
    merged = lse_merge_(out_a, lse_a, out_b, lse_b)
    assert merged[0] is out_a
    assert merged[1] is lse_a
    torch.testing.assert_close(merged, expected, rtol=0, atol=0)


def test_the_wider_partial_may_come_second() -> None:
    out_a, lse_a, out_b, lse_b = partials(torch.float32, torch.bfloat16)
    torch.testing.assert_close(
        lse_merge(out_b, lse_b, out_a, lse_a), lse_merge(out_a, lse_a, out_b, lse_b), rtol=0, atol=0
    )


def test_threads_change_no_bit() -> None:
    module = require_native()
    inputs = partials(torch.bfloat16, torch.bfloat16, dim=8192)
    threads, results = module.thread_count(), []
    try:
        for count in (1, 2, 7):
            module.set_thread_count(count)
            results.append(lse_merge(*inputs))
    finally:
        module.set_thread_count(threads)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


def test_opcheck() -> None:
    inputs = partials(torch.float32, torch.float32, dim=4)
    needing = tuple(
        tensor.clone().requires_grad_() for tensor in partials(torch.float32, torch.float32, dim=4, masked=False)
    )
    torch.library.opcheck(torch.ops.hp_kernels.lse_merge, (*needing, True))
    torch.library.opcheck(torch.ops.hp_kernels.lse_merge_, (*inputs, True))
    torch.library.opcheck(torch.ops.hp_kernels.lse_merge_backward, (torch.randn_like(inputs[0]), None, *inputs, True))


def test_without_native_kernels_everything_works_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = partials(torch.bfloat16, torch.bfloat16)

    def run() -> list[torch.Tensor]:
        tensors = [tensor.clone().requires_grad_() for tensor in inputs]
        results = lse_merge(*tensors)
        gradients = torch.autograd.grad(results, tensors, [torch.ones_like(result) for result in results])
        return [*results, *gradients, *lse_merge_(*(tensor.detach() for tensor in tensors))]

    native = run()
    monkeypatch.setenv("HP_KERNELS", "off")
    loading.reload()
    try:
        assert loading.native() is None
        portable = run()
    finally:
        monkeypatch.undo()
        loading.reload()
    torch.testing.assert_close(portable, native)


MISTAKES: dict[str, tuple[Callable[[list[torch.Tensor]], object], str]] = {
    "shapes of the partials": (
        lambda t: lse_merge(t[0], t[1], t[2][:, :-1], t[3]),
        "merge partials of the same queries",
    ),
    "lse of other queries": (lambda t: lse_merge(t[0], t[1][:, :-1], t[2], t[3]), "doesn't go with lse"),
    "swapped lse": (lambda t: lse_merge(*t, lse_layout="bsh"), r"doesn't go with lse \[2, 3, 5\] as bsh"),
    "unknown layout": (lambda t: lse_merge(*t, layout="shbd"), "is none of: bshd with bhs or bsh"),
    "integers": (lambda t: lse_merge(t[0].int(), t[1], t[2].int(), t[3]), "out_a is torch.int32"),
    "short lse": (lambda t: lse_merge(t[0], t[1].half(), t[2], t[3]), "lse_a is torch.float16"),
    "two short types": (lambda t: lse_merge(t[0].half(), t[1], t[2].bfloat16(), t[3]), "must be equal, or one float32"),
    "strides": (lambda t: lse_merge(t[0].transpose(0, 1).contiguous().transpose(0, 1), *t[1:]), "contiguous"),
    "device": (lambda t: lse_merge(t[0], t[1], t[2].to("meta"), t[3]), "one device"),
    "no tensor": (lambda t: lse_merge([[1.0]], *t[1:]), "takes tensors of torch or mindspore, not list"),
    "in place, gradients": (lambda t: lse_merge_(t[0].requires_grad_(), *t[1:]), "not differentiable"),
    "in place, too short": (lambda t: lse_merge_(t[0].half(), *t[1:]), "can't hold a merge with torch.float32"),
    "in place, shared": (lambda t: lse_merge_(t[0], t[1], t[0], t[3]), "share memory"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(KernelArgumentError, match=message):
        call(partials(torch.float32, torch.float32))


def test_the_boundary_checks_for_itself() -> None:
    """What Python's checks let through by a fault of theirs is an error in C++, too, and nothing is written."""
    module = require_native()
    arrays = [array_of(tensor) for tensor in partials(torch.float32, torch.float32)]
    results = [torch.full((BATCH, SEQ, HEADS, 33), 7.0), torch.full((BATCH, HEADS, SEQ), 7.0)]
    good = [*arrays, *map(array_of, results)]
    address, held, code, shape = good[0]
    bad = {
        "the memory given holds": (address, held - 1, code, shape),
        "null": (0, held, code, shape),
        "multiple": (address + 2, held, code, shape),
        "64 bits": (address, held, code, (1 << 40, 1 << 40, 1, 1)),
        "negative": (address, held, code, (-1, -1, 1, 1)),
        "no element type": (address, held, 99, shape),
        "4 dims": (address, held, code, shape[1:]),
        "must have the shape": (address, held, code, (1, *shape[1:])),
        "tuple": (address, held),
    }
    for (message, array), position in itertools.product(bad.items(), (0, 2, 4)):
        arguments = list(good)
        arguments[position] = array
        with pytest.raises(ValueError, match="must have the shape" if message == "4 dims" and position else message):
            module.lse_merge(*arguments, True)
    shifted = torch.zeros(results[0].numel() + 1)
    arguments = [array_of(shifted[:-1].view(shape)), *good[1:4], array_of(shifted[1:].view(shape)), good[5]]
    with pytest.raises(KernelArgumentError, match="share memory"):
        module.lse_merge(*arguments, True)
    assert all((result == 7).all() for result in results)


def test_empty_partials() -> None:
    for shape in ((0, SEQ, HEADS, 4), (BATCH, SEQ, HEADS, 0)):
        out, lse = torch.randn(shape), torch.randn(shape[0], shape[2], shape[1])
        merged = lse_merge(out, lse, out.clone(), lse)
        assert merged[0].shape == shape
        torch.testing.assert_close(merged[1], torch.logaddexp(lse, lse))
