"""Cutting a tensor into several and joining several into one: the dim that is cut or joined must be whole."""

from __future__ import annotations

from hp_core.errors import ShardingRuleError
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, FACTOR, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.view import ANY_PENDING

__all__: list[str] = []


@rule("split", "input split_size dim")
@rule("split_with_sizes", "input split_sizes dim")
def _split(call: OpCall) -> Strategy:
    sizes = call.get("split_size", call.get("split_sizes"))
    dim = call.dim(default=0)
    total = call.specs[0].shape[dim]
    pieces = -(-total // sizes) if isinstance(sizes, int) else len(sizes)
    return _pieces(call, dim, max(pieces, 1))


@rule("chunk", "input chunks dim")
def _chunk(call: OpCall) -> Strategy:
    dim = call.dim(default=0)
    total, chunks = call.specs[0].shape[dim], call.get("chunks")
    size = -(-total // chunks)
    return _pieces(call, dim, max(-(-total // size), 1) if size else chunks)


@rule("tensor_split", "input indices_or_sections dim")
def _tensor_split(call: OpCall) -> Strategy:
    sections = call.get("indices_or_sections")
    return _pieces(call, call.dim(default=0), sections if isinstance(sections, int) else len(sections) + 1)


@rule("unbind", "input dim")
def _unbind(call: OpCall) -> Strategy:
    spec = call.specs[0]
    dim = call.dim(default=0)
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    rest = tuple(d for d in range(spec.ndim) if d != dim)
    return solve([Operand(spec, labels, FACTOR)], [Output(rest)] * spec.shape[dim], keeps=ANY_PENDING)


@rule("cat concat concatenate", "tensors dim")
def _cat(call: OpCall) -> Strategy:
    """Along a whole dim; the others are cut alike in all."""
    real = [spec for spec in call.specs if tuple(spec.shape) != (0,)]
    ndim = real[0].ndim if real else 1
    dim = call.dim(default=0, ndim=ndim)
    labels = tuple(None if d == dim else d for d in range(ndim))
    operands = [Operand(spec, labels if spec.ndim == ndim else (None,) * spec.ndim, ADDEND) for spec in call.specs]
    return solve(operands, [Output(labels)], keeps=ANY_PENDING)


@rule("stack", "tensors dim")
def _stack(call: OpCall) -> Strategy:
    """Along a new, whole dim."""
    first = call.specs[0]
    if any(tuple(spec.shape) != tuple(first.shape) for spec in call.specs):
        raise ShardingRuleError(f"stack: shapes differ: {[tuple(spec.shape) for spec in call.specs]}.")
    dim = call.dim(default=0, ndim=first.ndim + 1)
    labels = tuple(range(first.ndim))
    result = (*labels[:dim], None, *labels[dim:])
    return solve([Operand(spec, labels, ADDEND) for spec in call.specs], [Output(result)], keeps=ANY_PENDING)


def _pieces(call: OpCall, dim: int, count: int) -> Strategy:
    spec = call.specs[0]
    labels = tuple(None if d == dim else d for d in range(spec.ndim))
    return solve([Operand(spec, labels, FACTOR)], [Output(labels)] * count, keeps=ANY_PENDING)
