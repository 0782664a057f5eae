"""Tokens to their experts and back: against a loop over tokens, and the native kernels against their twins, bit for bit."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_kernels import KernelArgumentError, loading, moe_permute, moe_unpermute
from hp_kernels.loading import require_native
from hp_kernels.platform.torch.arrays import array_of
from hp_kernels.platform.torch.permute import combine_backward_twin, combine_twin, dispatch_twin, sort_twin

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
ops = torch.ops.hp_kernels


def weights_of(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    return torch.rand(shape).to(torch.float64 if dtype == torch.float64 else torch.float32)


@given(data=st.data())
@settings(max_examples=60, deadline=None)
def test_rows_are_a_stable_sort(data: st.DataObject) -> None:
    num_experts = data.draw(st.integers(1, 9))
    top_k = data.draw(st.integers(1, 4))
    chosen = data.draw(st.lists(st.lists(st.integers(0, num_experts - 1), min_size=top_k, max_size=top_k), max_size=20))
    experts = torch.tensor(chosen, dtype=data.draw(st.sampled_from([torch.int64, torch.int32]))).view(-1, top_k)
    tokens = torch.arange(len(chosen) * 3.0).view(-1, 3)
    permuted = moe_permute(tokens, experts, num_experts)
    expected = [
        (token, slot)
        for expert in range(num_experts)
        for token, row in enumerate(chosen)
        for slot, e in enumerate(row)
        if e == expert
    ]
    assert permuted.counts.tolist() == [sum(row.count(expert) for row in chosen) for expert in range(num_experts)]
    assert permuted.offsets.tolist() == [0, *permuted.counts.cumsum(0).tolist()]
    assert [permuted.rows[place].item() for place in expected] == list(range(len(expected)))
    assert torch.equal(permuted.tokens, tokens[[token for token, _ in expected]])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("top_k", [1, 2, 3, 6, 8])
def test_native_equals_twin_bit_for_bit(dtype: torch.dtype, top_k: int) -> None:
    require_native()
    for dim in (1, 7, 64, 2051):
        tokens, num_experts = 23, 6
        # The last expert gets no token.
        experts = torch.randint(0, num_experts - 1, (tokens, top_k))
        sorted_rows = sort_twin(experts, num_experts)
        assert all(map(torch.equal, ops.moe_sort(experts, num_experts), sorted_rows))
        rows = sorted_rows[0]
        x, permuted = torch.randn(tokens, dim).to(dtype), torch.randn(tokens * top_k, dim).to(dtype)
        assert torch.equal(ops.moe_dispatch(x, rows), dispatch_twin(x, rows))
        for weights in (None, weights_of(dtype, tokens, top_k), torch.rand(tokens, top_k).to(dtype)):
            assert torch.equal(ops.moe_combine(permuted, rows, weights), combine_twin(permuted, rows, weights))
            if weights is not None:
                gradients = ops.moe_combine_backward(x, permuted, rows, weights)
                assert all(map(torch.equal, gradients, combine_backward_twin(x, permuted, rows, weights)))


@pytest.mark.parametrize(("dtype", "dim"), [(torch.float32, 1101), (torch.bfloat16, 2056), (torch.float16, 2051)])
def test_large_results_are_streamed_with_the_same_bits(dtype: torch.dtype, dim: int) -> None:
    """Beyond 8 MB rows are written past the caches, where they begin at multiples of 16 bytes."""
    tokens, top_k = 1100, 2
    rows = torch.randperm(tokens * top_k).view(tokens, top_k)
    x, permuted, weights = (
        torch.randn(tokens, dim).to(dtype),
        torch.randn(tokens * top_k, dim).to(dtype),
        torch.rand(tokens, top_k),
    )
    assert permuted.nbytes > 8 << 20
    assert torch.equal(ops.moe_dispatch(x, rows), dispatch_twin(x, rows))
    gradients = ops.moe_combine_backward(x, permuted, rows, weights)
    assert all(map(torch.equal, gradients, combine_backward_twin(x, permuted, rows, weights)))


def test_gradients_equal_those_of_a_loop_over_tokens() -> None:
    tokens, top_k, dim, num_experts = 9, 3, 5, 4
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64).requires_grad_()

    x, weights = random(tokens, dim), random(tokens, top_k)
    matrices = random(num_experts, dim, dim)
    experts = torch.randint(0, num_experts, (tokens, top_k), generator=generator)
    permuted = moe_permute(x, experts, num_experts)
    outputs = [
        permuted.tokens[start:end] @ matrix
        for start, end, matrix in zip(permuted.offsets[:-1], permuted.offsets[1:], matrices, strict=True)
    ]
    result = moe_unpermute(torch.cat(outputs), permuted.rows, weights)
    loop = torch.stack(
        [sum(weights[t, k] * (x[t] @ matrices[experts[t, k]]) for k in range(top_k)) for t in range(tokens)]
    )
    given = torch.randn(result.shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(result, loop)
    inputs = (x, weights, matrices)
    torch.testing.assert_close(torch.autograd.grad(result, inputs, given), torch.autograd.grad(loop, inputs, given))


def test_derivatives_are_those_of_the_functions() -> None:
    experts = torch.tensor([[0, 2], [2, 1], [0, 1]])
    rows = moe_permute(torch.zeros(3, 1), experts, 3).rows
    x, permuted, weights = (
        torch.randn(shape, dtype=torch.float64, requires_grad=True) for shape in ((3, 2), (6, 2), (3, 2))
    )
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda tokens: moe_permute(tokens, experts, 3).tokens, (x,))
        assert check(lambda rows_, weights_: moe_unpermute(rows_, rows, weights_), (permuted, weights))
        assert check(lambda rows_: moe_unpermute(rows_, rows), (permuted,))


def test_unpermute_takes_back_what_permute_did() -> None:
    tokens = torch.randn(8, 4)
    experts = torch.randint(0, 3, (8,))
    permuted = moe_permute(tokens, experts, 3)
    assert permuted.rows.shape == (8, 1)
    assert torch.equal(moe_unpermute(permuted.tokens, permuted.rows), tokens)


def test_threads_change_no_bit() -> None:
    module = require_native()
    experts = torch.randint(0, 8, (300, 4))
    tokens, weights = torch.randn(300, 600).bfloat16().requires_grad_(), torch.rand(300, 4, requires_grad=True)
    threads, results = module.thread_count(), []
    try:
        for count in (1, 2, 7):
            module.set_thread_count(count)
            permuted = moe_permute(tokens, experts, 8)
            out = moe_unpermute(permuted.tokens, permuted.rows, weights)
            results.append([out, *torch.autograd.grad(out, (tokens, weights), torch.ones_like(out))])
    finally:
        module.set_thread_count(threads)
    assert all(torch.equal(a, b) for result in results[1:] for a, b in zip(results[0], result, strict=True))


def test_no_tokens_and_no_columns() -> None:
    for tokens, dim in ((0, 4), (3, 0)):
        permuted = moe_permute(torch.randn(tokens, dim), torch.zeros(tokens, 2, dtype=torch.int64), 2)
        assert permuted.tokens.shape == (2 * tokens, dim)
        assert permuted.counts.tolist() == [2 * tokens, 0]
        assert moe_unpermute(permuted.tokens, permuted.rows, torch.rand(tokens, 2)).shape == (tokens, dim)


def test_opcheck() -> None:
    experts = torch.tensor([[0, 2], [2, 1], [0, 1]])
    rows = ops.moe_sort(experts, 3)[0]
    tokens, permuted, weights = (torch.randn(shape, requires_grad=True) for shape in ((3, 4), (6, 4), (3, 2)))
    torch.library.opcheck(ops.moe_sort, (experts, 3))
    torch.library.opcheck(ops.moe_dispatch, (tokens, rows))
    torch.library.opcheck(ops.moe_combine, (permuted, rows, weights))
    torch.library.opcheck(ops.moe_combine, (permuted, rows, None))
    torch.library.opcheck(ops.moe_combine_backward, (tokens.detach(), permuted.detach(), rows, weights.detach()))


def test_without_native_kernels_everything_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    experts = torch.randint(0, 5, (12, 3))
    tokens, weights = torch.randn(12, 9).bfloat16().requires_grad_(), torch.rand(12, 3, requires_grad=True)

    def run() -> list[torch.Tensor]:
        permuted = moe_permute(tokens, experts, 5)
        out = moe_unpermute(permuted.tokens, permuted.rows, weights)
        return [*permuted, out, *torch.autograd.grad(out, (tokens, weights), torch.ones_like(out))]

    native = run()
    monkeypatch.setenv("HP_KERNELS", "off")
    loading.reload()
    try:
        assert loading.native() is None
        portable = run()
        with pytest.raises(KernelArgumentError, match="there are 0 to 3"):
            moe_permute(tokens, torch.full((12, 1), 4), 4)
        with pytest.raises(KernelArgumentError, match="every row"):
            moe_unpermute(tokens, torch.zeros(12, 1, dtype=torch.int64))
    finally:
        monkeypatch.undo()
        loading.reload()
    assert all(map(torch.equal, portable, native))


X, E, R, W = torch.randn(6, 4), torch.tensor([[0, 1], [1, 2], [2, 0]]), torch.arange(6).view(3, 2), torch.rand(3, 2)
MISTAKES: dict[str, tuple[Callable[[], object], str]] = {
    "expert too large": (lambda: moe_permute(X[:3], E, 2), "slot 3 names expert 2, there are 0 to 1"),
    "expert negative": (lambda: moe_permute(X[:3], E - 1, 2), "slot 0 names expert -1"),
    "no experts": (lambda: moe_permute(X[:3], E, 0), "at least one"),
    "experts of other tokens": (lambda: moe_permute(X, E, 3), r"tokens \[6, 4\] and experts \[3, 2\]"),
    "experts as floats": (lambda: moe_permute(X[:3], E.float(), 3), "must be int64 or int32"),
    "tokens as integers": (lambda: moe_permute(X[:3].int(), E, 3), "tokens are torch.int32"),
    "strides": (lambda: moe_permute(X.t(), torch.zeros(4, 1, dtype=torch.int64), 3), "contiguous"),
    "devices": (lambda: moe_permute(X[:3].to("meta"), E, 3), "one device"),
    "row too large": (lambda: moe_unpermute(X, R + 1), "slot 5 names row 6"),
    "row twice": (lambda: moe_unpermute(X, R // 2 * 2), "row 0 appears twice"),
    "short rows": (lambda: moe_unpermute(X, R.int()), "rows are torch.int32"),
    "rows of others": (lambda: moe_unpermute(X[:4], R), r"permuted \[4, 4\] and rows \[3, 2\]"),
    "weights of others": (lambda: moe_unpermute(X, R, W[:2]), "must have the shape of rows"),
    "wide weights": (lambda: moe_unpermute(X, R, W.double()), "weights are torch.float64"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_mistakes_are_named(mistake: str) -> None:
    call, message = MISTAKES[mistake]
    with pytest.raises(KernelArgumentError, match=message):
        call()


def test_the_boundary_checks_for_itself() -> None:
    """What Python's checks let through by a fault of theirs is an error in C++, too."""
    module = require_native()
    tokens, rows, permuted = torch.randn(3, 4), torch.arange(6).view(3, 2), torch.zeros(6, 4)
    weights, out = torch.rand(3, 2), torch.zeros(3, 4)
    counts, offsets = torch.zeros(3, dtype=torch.int64), torch.zeros(4, dtype=torch.int64)

    def call(name: str, *tensors: torch.Tensor | None) -> None:
        getattr(module, name)(*(None if tensor is None else array_of(tensor) for tensor in tensors))

    for message, name, tensors in (
        ("must have the shape", "moe_sort", (rows, rows, counts, counts)),
        ("share memory", "moe_sort", (rows, rows, counts, offsets)),
        ("slot 3", "moe_sort", (rows, rows.clone(), counts, offsets)),
        ("must have the shape", "moe_dispatch", (tokens, rows, permuted[:4])),
        ("must be float32, not float64", "moe_dispatch", (tokens, rows, permuted.double())),
        ("must be int64", "moe_dispatch", (tokens, rows.int(), permuted)),
        ("share memory", "moe_dispatch", (permuted[:3], rows, permuted)),
        ("slot 0 names row 6", "moe_dispatch", (tokens, rows + 6, permuted)),
        ("row 3 appears twice", "moe_dispatch", (tokens, torch.full((3, 2), 3), permuted)),
        ("slot 0 names row -1", "moe_combine", (permuted, rows - 1, None, out)),
        ("must have the shape", "moe_combine", (permuted, rows, weights[:2], out)),
        ("must be float32", "moe_combine", (permuted, rows, weights.double(), out)),
        ("share memory", "moe_combine", (permuted, rows, weights, permuted[3:])),
        (
            "appears twice",
            "moe_combine_backward",
            (tokens, permuted, rows * 0, weights, permuted.clone(), weights.clone()),
        ),
        ("share memory", "moe_combine_backward", (tokens, permuted, rows, weights, permuted, weights.clone())),
    ):
        with pytest.raises(KernelArgumentError, match=message):
            call(name, *tensors)
