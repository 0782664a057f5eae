"""Merging attention that was computed in parts: over different keys, for the same queries.

Ring attention meets the keys block by block. Each partial is what attention over its block alone gives, `out`, and the
logarithm of the sum of its exponentials, `lse`; two of them make up the partial of both blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from hp_kernels.errors import KernelArgumentError
from hp_kernels.frameworks import platform_module

__all__ = ["LSE_LAYOUTS", "lse_merge", "lse_merge_", "merge_grid"]

LSE_LAYOUTS = {
    "bshd": ("bhs", "bsh"),
    "bhsd": ("bhs", "bsh"),
    "sbhd": ("bhs", "sbh"),
    "thd": ("ht", "th"),
}
"""Layouts of out -> those of lse that go with it: b batch, s sequence, h heads, d dim, t tokens of packed sequences."""

TensorT = TypeVar("TensorT")


def lse_merge(
    out_a: TensorT,
    lse_a: TensorT,
    out_b: TensorT,
    lse_b: TensorT,
    *,
    layout: str = "bshd",
    lse_layout: str = "bhs",
) -> tuple[TensorT, TensorT]:
    """Merge two attention partials; differentiable, with respect to both outs and both lse.

    With w_x = exp(lse_x - lse), lse = log(exp(lse_a) + exp(lse_b)) and out = w_a out_a + w_b out_b, which is the
    recurrence of online softmax (Milakov and Gimelshein, arXiv:1805.02867; ring attention: Liu et al., arXiv:2310.01889),
    in float32 (float64 for float64). A partial whose lse is -inf saw no key and doesn't contribute, even where its out
    holds NaN; two such make a row of zeros with lse -inf.

    Args:
        out_a: [batch, seq, heads, dim] for layout "bshd"; float32, bfloat16, float16 or float64; contiguous.
        lse_a: [batch, heads, seq] for lse_layout "bhs"; float32 (float64 with a float64 out); contiguous; natural logarithm.
        out_b: as out_a; its dtype may differ if one of the two is float32, such as a running result.
        lse_b: as lse_a.
        layout: one of `LSE_LAYOUTS`.
        lse_layout: one of those that go with it.

    Returns:
        out and lse of the merge: out of the wider of the two dtypes.

    Raises:
        KernelArgumentError: dtypes, shapes, devices or layouts that don't go together, or memory that isn't contiguous.
    """
    return _merge("lse_merge", out_a, lse_a, out_b, lse_b, layout, lse_layout)


def lse_merge_(
    out_a: TensorT,
    lse_a: TensorT,
    out_b: TensorT,
    lse_b: TensorT,
    *,
    layout: str = "bshd",
    lse_layout: str = "bhs",
) -> tuple[TensorT, TensorT]:
    """`lse_merge` in place: a running result `out_a`, `lse_a` takes up another partial, and nothing is allocated.

    Not differentiable: inside an autograd function of its own, or without gradients.

    Args:
        out_a: as for `lse_merge`; written to. Must have out_b's dtype or float32.
        lse_a: as for `lse_merge`; written to.
        out_b: as for `lse_merge`; may share no memory with the first two.
        lse_b: as for `lse_merge`; likewise.
        layout: as for `lse_merge`.
        lse_layout: as for `lse_merge`.

    Returns:
        out_a and lse_a.

    Raises:
        KernelArgumentError: as for `lse_merge`, or an argument requires gradients.
    """
    return _merge("lse_merge_", out_a, lse_a, out_b, lse_b, layout, lse_layout)


def _merge(name: str, out_a: Any, lse_a: Any, out_b: Any, lse_b: Any, layout: str, lse_layout: str) -> tuple[Any, Any]:
    platform: Any = platform_module(out_a, "lse_merging", name)
    grid, lse_grid, swapped = merge_grid(name, layout, lse_layout, tuple(out_a.shape), tuple(lse_a.shape))
    for what, tensor, like in (("out_b", out_b, out_a), ("lse_b", lse_b, lse_a)):
        if tuple(tensor.shape) != tuple(like.shape):
            raise KernelArgumentError(
                f"{name}: {what} is {list(tensor.shape)}, its counterpart {list(like.shape)}; merge partials of the same queries."
            )
    merge = platform.merge_in_place if name == "lse_merge_" else platform.merge
    out, lse = merge(name, out_a, lse_a, out_b, lse_b, grid, lse_grid, swapped)
    return out, lse


def merge_grid(
    name: str, layout: str, lse_layout: str, out_shape: Sequence[int], lse_shape: Sequence[int]
) -> tuple[list[int], list[int], bool]:
    """The shapes that kernels see: out [n0, n1, n2, dim], and lse with the last two in the same order or swapped.

    Args:
        name: of the caller, for messages.
        layout: of out.
        lse_layout: of lse.
        out_shape: of out, in its layout.
        lse_shape: of lse, in its layout.

    Returns:
        Both shapes, and whether the last two dims are swapped.

    Raises:
        KernelArgumentError: the layouts are unknown or don't go together, or the shapes don't.
    """
    if lse_layout not in LSE_LAYOUTS.get(layout, ()):
        known = "; ".join(f"{out} with {' or '.join(lse)}" for out, lse in LSE_LAYOUTS.items())
        raise KernelArgumentError(f"{name}: layout {layout!r} with lse_layout {lse_layout!r} is none of: {known}.")
    sizes = dict(zip(layout, out_shape, strict=False))
    if len(out_shape) != len(layout) or [sizes[axis] for axis in lse_layout] != list(lse_shape):
        raise KernelArgumentError(
            f"{name}: out {list(out_shape)} as {layout} doesn't go with lse {list(lse_shape)} as {lse_layout}."
        )
    dim = sizes["d"]
    if layout[:-1] == lse_layout:
        rows = 1
        for size in lse_shape:
            rows *= size
        return [1, 1, rows, dim], [1, 1, rows], False
    if layout == "thd":
        first, second, third = 1, sizes["t"], sizes["h"]
    elif layout == "sbhd":
        first, second, third = 1, sizes["s"], sizes["b"] * sizes["h"]
    else:
        first, second, third = out_shape[:3]
    return [first, second, third, dim], [first, third, second], True
