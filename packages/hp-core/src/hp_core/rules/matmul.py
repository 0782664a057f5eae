"""Products that contract dims: linear, matmul, einsum and their kin. Cutting a contracted dim leaves a pending sum."""

from __future__ import annotations

from collections import Counter
from functools import cache
from math import prod
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.rules.elementwise import broadcast_labels, elementwise
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, FACTOR, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__: list[str] = []

Labels = tuple["str | int | None", ...]


@rule("linear", "input weight bias")
def _linear(call: OpCall) -> Strategy:
    """[..., k] x [n, k] (+ [n]) -> [..., n]"""
    x, weight = call.spec("input"), call.spec("weight")
    batch = tuple(range(x.ndim - 1))
    _same(call, x, -1, weight, -1)
    operands = [Operand(x, (*batch, "k"), FACTOR), Operand(weight, ("n", "k")[-weight.ndim :], FACTOR)]
    if isinstance(call.get("bias"), TensorSpec):
        operands.append(Operand(call.spec("bias"), ("n",), ADDEND))
    return solve(operands, [Output((*batch, "n") if weight.ndim == 2 else batch)], reduced={"k": "sum"})


@rule("matmul mm bmm mv dot", "input other")
def _matmul(call: OpCall) -> Strategy:
    """Broadcasting matrix product with the conventions of numpy.matmul."""
    left, right, result, shape = _matmul_labels(call, call.spec("input"), call.spec("other"))
    return solve(
        [Operand(call.spec("input"), left, FACTOR), Operand(call.spec("other"), right, FACTOR)],
        [Output(result, shape)],
        reduced={"k": "sum"},
    )


@rule("rmatmul", "input other")
def _rmatmul(call: OpCall) -> Strategy:
    right, left, result, shape = _matmul_labels(call, call.spec("other"), call.spec("input"))
    return solve(
        [Operand(call.spec("input"), left, FACTOR), Operand(call.spec("other"), right, FACTOR)],
        [Output(result, shape)],
        reduced={"k": "sum"},
    )


@rule("addmm addmv addbmm baddbmm", "input batch1 batch2 beta alpha")
@rule("addr", "input batch1 batch2 beta alpha")
def _added_product(call: OpCall) -> Strategy:
    """Input + batch1 @ batch2 (addbmm: summed over the batch; addr: the outer product), the input broadcast to it."""
    first, second = call.spec("batch1"), call.spec("batch2")
    if call.name == "addr":
        sides: tuple[Labels, Labels, Labels, tuple[int, ...]]
        sides = (("m",), ("n",), ("m", "n"), (*first.shape, *second.shape))
    else:
        sides = _matmul_labels(call, first, second)
    left, right, result, shape = sides
    if call.name == "addbmm":
        result, shape = result[1:], shape[1:]
    bias = call.spec("input")
    offset = len(result) - bias.ndim
    if offset < 0 or any(size not in (1, shape[offset + dim]) for dim, size in enumerate(bias.shape)):
        raise ShardingRuleError(
            f"{call.name}: input of shape {tuple(bias.shape)} doesn't broadcast to the product's {shape}."
        )
    labels = tuple(result[offset + dim] if size == shape[offset + dim] else None for dim, size in enumerate(bias.shape))
    operands = [Operand(bias, labels, ADDEND), Operand(first, left, FACTOR), Operand(second, right, FACTOR)]
    reduced: dict[Any, str] = {"k": "sum", 0: "sum"} if call.name == "addbmm" else {"k": "sum"}
    return solve(operands, [Output(result, shape)], reduced=reduced, pinned=0 if call.inplace else None)


@rule("outer", "input vec2")
def _outer(call: OpCall) -> Strategy:
    operands = [Operand(call.spec("input"), ("m",), FACTOR), Operand(call.spec("vec2"), ("n",), FACTOR)]
    return solve(operands, [Output(("m", "n"))])


@rule("einsum", "equation *operands")
def _einsum(call: OpCall) -> Strategy:
    """Any contraction: labels are the subscripts themselves, and those that "..." stands for, counted from the last."""
    equation = str(call.get("equation")).replace(" ", "")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if len(terms) != len(call.specs):
        raise ShardingRuleError(f"einsum {equation!r} names {len(terms)} operands, got {len(call.specs)} DTensors.")
    expanded = [_subscripts(equation, term, spec) for term, spec in zip(terms, call.specs, strict=True)]
    counts = Counter(subscript for labels in expanded for subscript in labels)
    stretched = sorted((one for one in counts if type(one) is int), reverse=True)  # "..." of the longest operand
    if arrow:
        before, dots, after = output.partition("...")
        result: tuple[str | int, ...] = (*before, *(stretched if dots else ()), *after)
    else:
        result = (*stretched, *sorted(one for one, count in counts.items() if type(one) is str and count == 1))
    sizes: dict[str | int, int] = {}
    for labels, spec in zip(expanded, call.specs, strict=True):
        for label, size in zip(labels, spec.shape, strict=True):
            sizes[label] = max(size, sizes.get(label, size)) if size != 1 else sizes.get(label, 1)
    # a subscript that is repeated in one operand takes a diagonal; no axis can cut it, for it would cut two dims
    operands = [
        Operand(
            spec,
            tuple(label if size == sizes[label] else None for label, size in zip(labels, spec.shape, strict=True)),
            FACTOR,
        )
        for labels, spec in zip(expanded, call.specs, strict=True)
    ]
    reduced: dict[object, str] = {label: "sum" for label in counts if label not in result}
    return solve(operands, [Output(result, tuple(sizes[label] for label in result))], reduced=reduced)


def _subscripts(equation: str, term: str, spec: TensorSpec) -> tuple[str | int, ...]:
    """One subscript for each dim; the dims of "..." are numbered from the last, which is how they broadcast."""
    before, dots, after = term.partition("...")
    count = spec.ndim - len(before) - len(after)
    if count < 0 or (count and not dots):
        raise ShardingRuleError(f"einsum {equation!r}: {term!r} doesn't fit an operand of shape {tuple(spec.shape)}.")
    return (*before, *range(count - 1, -1, -1), *after)


@rule("inner", "input other")
def _inner(call: OpCall) -> Strategy:
    """[..., k] x [..., k] -> all other dims; a product with a scalar is the elementwise one."""
    first, second = call.spec("input"), call.spec("other")
    if not first.ndim or not second.ndim:
        return elementwise(call, [FACTOR, FACTOR])
    _same(call, first, -1, second, -1)
    left: tuple[Any, ...] = tuple(("left", dim) for dim in range(first.ndim - 1))
    right: tuple[Any, ...] = tuple(("right", dim) for dim in range(second.ndim - 1))
    operands = [Operand(first, (*left, "k"), FACTOR), Operand(second, (*right, "k"), FACTOR)]
    return solve(operands, [Output((*left, *right))], reduced={"k": "sum"})


@rule("vdot", "input other")
@rule("vecdot", "input other dim")
def _vecdot(call: OpCall) -> Strategy:
    """The sum of elementwise products along one dim, the first conjugated."""
    labels, result, shape = broadcast_labels(call.specs)
    dim = call.dim(default=-1, ndim=len(result))
    operands = [Operand(spec, own, FACTOR) for spec, own in zip(call.specs, labels, strict=True)]
    kept = tuple(label for label in result if label != dim)
    return solve(operands, [Output(kept, tuple(shape[d] for d in kept))], reduced={dim: "sum"})


@rule("tensordot", "input other dims")
def _tensordot(call: OpCall) -> Strategy:
    """Sums over pairs of dims, or over the last `dims` of the first and the first of the second."""
    first, second, dims = call.spec("input"), call.spec("other"), call.get("dims", 2)
    if isinstance(dims, int):
        pairs = [(first.ndim - dims + i, i) for i in range(dims)]
    else:
        ones, others = ([one] if isinstance(one, int) else list(one) for one in dims)
        pairs = [(one % first.ndim, other % second.ndim) for one, other in zip(ones, others, strict=True)]
    left: list[Any] = [("left", dim) for dim in range(first.ndim)]
    right: list[Any] = [("right", dim) for dim in range(second.ndim)]
    for number, (one, other) in enumerate(pairs):
        _same(call, first, one, second, other)
        left[one] = right[other] = ("pair", number)
    result = tuple(label for label in (*left, *right) if label[0] != "pair")
    operands = [Operand(first, tuple(left), FACTOR), Operand(second, tuple(right), FACTOR)]
    return solve(operands, [Output(result)], reduced={("pair", number): "sum" for number in range(len(pairs))})


@rule("kron", "input other")
def _kron(call: OpCall) -> Strategy:
    """Each element of the first times all of the second: the first may be cut in equal pieces, or else the second."""
    specs = call.spec("input"), call.spec("other")
    ndim = max(spec.ndim for spec in specs)
    first, second = ((1,) * (ndim - spec.ndim) + tuple(spec.shape) for spec in specs)
    labels: tuple[list[Any], list[Any]] = [None] * ndim, [None] * ndim
    result: list[Any] = [None] * ndim
    for dim in range(ndim):
        side = 1 if first[dim] == 1 else 0
        labels[side][dim] = result[dim] = (side, dim)
    mesh = specs[0].layout.mesh

    def aligned(label: Any, axes: tuple[int, ...]) -> bool:
        side, dim = label
        return bool(side == 1 or first[dim] % prod(mesh.shape[axis] for axis in axes) == 0)

    operands = [Operand(spec, tuple(own[ndim - spec.ndim :]), FACTOR) for spec, own in zip(specs, labels, strict=True)]
    shape = tuple(one * other for one, other in zip(first, second, strict=True))
    return solve(operands, [Output(tuple(result), shape)], aligned=aligned)


@rule("cross linalg_cross", "input other dim")
def _cross(call: OpCall) -> Strategy:
    """The vector product along one dim of size 3, which is whole; torch.cross looks for the first such dim."""
    labels, result, shape = broadcast_labels(call.specs)
    default = -1 if call.name == "linalg_cross" or 3 not in shape else shape.index(3)
    dim = default if call.get("dim") is None else call.get("dim")
    whole = dim % len(shape)
    operands = [
        Operand(spec, tuple(None if label == whole else label for label in own), FACTOR)
        for spec, own in zip(call.specs, labels, strict=True)
    ]
    return solve(operands, [Output(tuple(None if label == whole else label for label in result), shape)])


@rule("bilinear", "input1 input2 weight bias")
def _bilinear(call: OpCall) -> Strategy:
    """[..., i] x [out, i, j] x [..., j] (+ [out]) -> [..., out]"""
    first, second = call.spec("input1"), call.spec("input2")
    batch = tuple(range(first.ndim - 1))
    operands = [
        Operand(first, (*batch, "i"), FACTOR),
        Operand(second, (*batch, "j"), FACTOR),
        Operand(call.spec("weight"), ("out", "i", "j"), FACTOR),
    ]
    if isinstance(call.get("bias"), TensorSpec):
        operands.append(Operand(call.spec("bias"), ("out",), ADDEND))
    strategy = solve(operands, [Output((*batch, "out"))], reduced={"i": "sum", "j": "sum"})
    own = (layout.local_shape(tuple(spec.shape)) for layout, spec in zip(strategy.layouts, call.specs, strict=True))
    if any(prod(shape) == 0 for shape in own):
        strategy.local = "bilinear_of_nothing"
    return strategy


@rule("chain_matmul", "*matrices", decomposed=True)
def _chain_matmul(matrices: Any) -> Any:
    """The product of several matrices, in the cheapest order."""
    return _multi_dot(list(matrices))


@rule("multi_dot", "tensors", decomposed=True)
def _multi_dot(tensors: Any) -> Any:
    """The product of several matrices, in the cheapest order; the first and the last may be vectors."""
    sizes = [1 if tensors[0].ndim == 1 else tensors[0].shape[0], *(tensor.shape[0] for tensor in tensors[1:])]
    if tensors[0].ndim == 1:
        sizes[1] = tensors[0].shape[0]
    sizes.append(1 if tensors[-1].ndim == 1 else tensors[-1].shape[1])

    @cache
    def cheapest(start: int, stop: int) -> tuple[int, int]:
        """Multiplications that the product of these takes, and where to cut it in two."""
        if stop - start == 1:
            return 0, start
        return min(
            (cheapest(start, cut)[0] + cheapest(cut, stop)[0] + sizes[start] * sizes[cut] * sizes[stop], cut)
            for cut in range(start + 1, stop)
        )

    def product(start: int, stop: int) -> Any:
        cut = cheapest(start, stop)[1]
        return tensors[start] if stop - start == 1 else product(start, cut) @ product(cut, stop)

    return product(0, len(tensors))


@rule("trace", "input", decomposed=True)
def _trace(x: Any) -> Any:
    """The sum of the diagonal."""
    return x.diagonal().sum()


@rule("linalg_diagonal", "input offset dim1 dim2", decomposed=True)
def _linalg_diagonal(x: Any, offset: int = 0, dim1: int = -2, dim2: int = -1) -> Any:
    """The diagonals of a batch of matrices."""
    return x.diagonal(offset, dim1, dim2)


@rule("cov", "input correction fweights aweights", decomposed=True)
def _covariance(x: Any, correction: int = 1, fweights: Any = None, aweights: Any = None) -> Any:
    """Of variables (rows) over observations (columns), which may be cut."""
    if fweights is not None or aweights is not None:
        raise ShardingRuleError(
            "cov with weights has no rule; weight the rows and call cov without, or use .full_tensor()."
        )
    rows = (x.reshape(1, -1) if x.ndim < 2 else x).reduce_partial()
    centred = rows - rows.mean(1, keepdim=True)
    result = (centred @ centred.mH) / max(rows.shape[1] - correction, 0)
    return result.reshape(()) if x.ndim < 2 else result


@rule("corrcoef", "input", decomposed=True)
def _correlation(x: Any) -> Any:
    """The covariance divided by the deviations, kept within [-1, 1]."""
    covariance = _covariance(x).reduce_partial()
    if x.ndim < 2:
        return covariance / covariance
    deviations = covariance.diagonal().sqrt()
    return (covariance / deviations.unsqueeze(1) / deviations.unsqueeze(0)).clamp(-1, 1)


def _matmul_labels(call: OpCall, left: TensorSpec, right: TensorSpec) -> tuple[Labels, Labels, Labels, tuple[int, ...]]:
    _same(call, left, -1, right, -2 if right.ndim > 1 else -1)
    rows: Labels = ("m",) if left.ndim > 1 else ()
    columns: Labels = ("n",) if right.ndim > 1 else ()
    left_batch, right_batch = tuple(left.shape[:-2]), tuple(right.shape[:-2])
    ndim = max(len(left_batch), len(right_batch))
    shape = [1] * ndim
    for batch in (left_batch, right_batch):
        for dim, size in enumerate(batch, ndim - len(batch)):
            if size != 1:
                if shape[dim] not in (1, size):
                    raise ShardingRuleError(
                        f"{call.name}: batches of shapes {tuple(left.shape)} and {tuple(right.shape)} don't broadcast."
                    )
                shape[dim] = size

    def batch_labels(batch: tuple[int, ...]) -> Labels:
        return tuple(dim if size == shape[dim] else None for dim, size in enumerate(batch, ndim - len(batch)))

    result_shape = (*shape, *(left.shape[-2:-1] if rows else ()), *(right.shape[-1:] if columns else ()))
    inner: Labels = ("k", *columns) if right.ndim > 1 else ("k",)
    return (
        (*batch_labels(left_batch), *rows, "k"),
        (*batch_labels(right_batch), *inner),
        (*range(ndim), *rows, *columns),
        result_shape,
    )


def _same(call: OpCall, left: TensorSpec, left_dim: int, right: TensorSpec, right_dim: int) -> None:
    if not left.ndim or not right.ndim or left.shape[left_dim] != right.shape[right_dim]:
        raise ShardingRuleError(
            f"{call.name}: shapes {tuple(left.shape)} and {tuple(right.shape)} don't fit: the contracted dims must be equal."
        )
