"""Products that contract dims: linear, matmul, einsum and their kin. Cutting a contracted dim leaves a pending sum."""

from __future__ import annotations

from hp_core.errors import ShardingRuleError
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, FACTOR, OpCall, Operand, Output, OutsideRule, Strategy, solve
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
def _added_product(call: OpCall) -> Strategy:
    """Input + batch1 @ batch2, the input broadcast to the product."""
    if call.name == "addbmm":
        raise OutsideRule("addbmm sums over the batch; write baddbmm(...).sum(0), which has a rule.")
    first, second = call.spec("batch1"), call.spec("batch2")
    left, right, result, shape = _matmul_labels(call, first, second)
    bias = call.spec("input")
    offset = len(result) - bias.ndim
    if offset < 0 or any(size not in (1, shape[offset + dim]) for dim, size in enumerate(bias.shape)):
        raise ShardingRuleError(
            f"{call.name}: input of shape {tuple(bias.shape)} doesn't broadcast to the product's {shape}."
        )
    labels = tuple(result[offset + dim] if size == shape[offset + dim] else None for dim, size in enumerate(bias.shape))
    operands = [Operand(bias, labels, ADDEND), Operand(first, left, FACTOR), Operand(second, right, FACTOR)]
    return solve(operands, [Output(result, shape)], reduced={"k": "sum"}, pinned=0 if call.inplace else None)


@rule("outer ger", "input vec2")
def _outer(call: OpCall) -> Strategy:
    operands = [Operand(call.spec("input"), ("m",), FACTOR), Operand(call.spec("vec2"), ("n",), FACTOR)]
    return solve(operands, [Output(("m", "n"))])


@rule("einsum", "equation *operands")
def _einsum(call: OpCall) -> Strategy:
    """Any contraction whose subscripts are spelled out; labels are the subscripts themselves."""
    equation = str(call.get("equation")).replace(" ", "")
    if "..." in equation:
        raise OutsideRule(f"einsum {equation!r}: spell out the dims that '...' stands for.")
    inputs, arrow, output = equation.partition("->")
    terms = inputs.split(",")
    if not arrow:
        output = "".join(sorted(letter for letter in set(inputs) - {","} if inputs.count(letter) == 1))
    if len(terms) != len(call.specs):
        raise ShardingRuleError(f"einsum {equation!r} names {len(terms)} operands, got {len(call.specs)} DTensors.")
    operands = []
    for term, spec in zip(terms, call.specs, strict=True):
        if len(term) != spec.ndim:
            raise ShardingRuleError(
                f"einsum {equation!r}: {term!r} doesn't fit an operand of shape {tuple(spec.shape)}."
            )
        # a repeated subscript takes a diagonal: those dims must be whole
        operands.append(Operand(spec, tuple(c if term.count(c) == 1 else None for c in term), FACTOR))
    reduced: dict[object, str] = {c: "sum" for term in terms for c in term if c not in output}
    return solve(operands, [Output(tuple(output))], reduced=reduced)


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
