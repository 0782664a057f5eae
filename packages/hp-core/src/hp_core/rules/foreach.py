"""`_foreach_*` and fused optimizer ops: lists of tensors, each position an elementwise op of its own.

Positions may lie on different meshes. The written list keeps its layouts; the others follow it.
"""

from __future__ import annotations

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.rules.elementwise import broadcast_labels
from hp_core.rules.reduce import root, sum_of_squares
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, FACTOR, PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__: list[str] = []

_UNARY = """
    abs exp expm1 log log10 log1p log2 sqrt rsqrt reciprocal sign neg zero round floor ceil trunc frac sigmoid tanh erf erfc
    lgamma acos asin atan cos cosh sin sinh tan clone
"""
_BINARY = "add sub mul div maximum minimum clamp_max clamp_min pow copy"
_ROLES = {"add": ADDEND, "sub": ADDEND, "mul": FACTOR, "neg": FACTOR, "zero": FACTOR, "copy": ADDEND, "clone": FACTOR}


@rule(" ".join(f"_foreach_{name}" for name in _UNARY.split()), "self", flat="elementwise")
@rule(" ".join(f"_foreach_{name}" for name in _BINARY.split()), "self other alpha", flat="elementwise")
@rule("_foreach_addcmul _foreach_addcdiv", "self tensor1 tensor2 value", flat="elementwise")
@rule("_foreach_lerp", "self end weight", flat="elementwise")
def _foreach(call: OpCall) -> Strategy:
    """One strategy per position, then joined in the order in which the call lists its tensors.

    A lone tensor of one element, such as the factor of gradient clipping, takes part in every position and is whole.
    """
    lists = _tensor_lists(call)
    lone = [value for value in call.arguments.values() if isinstance(value, TensorSpec)]
    if any(spec.ndim for spec in lone):
        raise ShardingRuleError(
            f"{call.name}: a tensor beside the lists must have no dims, got {[tuple(s.shape) for s in lone]}."
        )
    role = _ROLES.get(call.name.removeprefix("_foreach_"), PLAIN)
    if role == ADDEND and len(lists) == 1:
        role = PLAIN  # adding a number to a pending sum would add it once per rank
    pieces = []
    for specs in zip(*lists, strict=True):
        labels, result, shape = broadcast_labels(specs)
        operands = [Operand(spec, own, role) for spec, own in zip(specs, labels, strict=True)]
        operands += [Operand(spec, (), PLAIN) for spec in lone]
        pieces.append(solve(operands, [Output(result, shape)], pinned=0 if call.inplace else None))
    layouts = [piece.layouts[position] for position in range(len(lists)) for piece in pieces]
    layouts += [spec.layout.gradient for spec in lone]
    # a replicated tensor varies only on the axes on which its own position is cut
    own = [frozenset[int]().union(*(layout.active_axes for layout in piece.layouts)) for piece in pieces]
    active = [*own * len(lists), *[frozenset[int]().union(*own)] * len(lone)]
    return Strategy(tuple(layouts), tuple(piece.outputs[0] for piece in pieces), active=tuple(active))


@rule("_foreach_norm", "self ord dtype", sees_floats=True, decomposed=True, flat="as is")
def _foreach_norm(tensors, ord=2, dtype=None):  # type: ignore[no-untyped-def]
    """The norm of each tensor. 2-norms that share a mesh are reduced together: one message for all, not one for each."""
    kinds = {(getattr(tensor, "device_mesh", None), tensor.dtype) for tensor in tensors}
    if ord != 2 or len(tensors) < 2 or len(kinds) > 1:
        return tuple(tensor.norm(ord, dtype=dtype) for tensor in tensors)
    tensors = [tensor if dtype is None else tensor.to(dtype) for tensor in tensors]
    squares = [sum_of_squares(tensor) for tensor in tensors]
    # stacking DTensors is dispatched like any op: the pending sums become one
    norms = root(get_platform().ops.local("stack")(squares), 2).to(tensors[0].dtype)
    return tuple(norms.unbind(0))


@rule("_foreach_max", "self", decomposed=True, flat="as is")
def _foreach_max(tensors):  # type: ignore[no-untyped-def]
    """The largest element of each tensor."""
    return tuple(tensor.max() for tensor in tensors)


@rule("_foreach_mm", "self mat2", decomposed=True)
def _foreach_mm(tensors, mat2):  # type: ignore[no-untyped-def]
    """The matrix product of each pair."""
    return tuple(first @ second for first, second in zip(tensors, mat2, strict=True))


@rule("_fused_adam _fused_adamw", "self grads exp_avgs exp_avg_sqs max_exp_avg_sqs state_steps", flat="alike")
@rule("_fused_sgd", "params grads momentum_buffer_list", flat="alike")
@rule("_fused_adagrad", "self grads state_sums state_steps", flat="alike")
def _fused(call: OpCall) -> Strategy:
    """Everything is elementwise in the parameters: all lists are cut like them."""
    parameters, *others = _tensor_lists(call)
    for spec in (spec for specs in (parameters, *others) for spec in specs):
        if spec.layout.is_partial():
            raise ShardingRuleError(
                f"{call.name}: a parameter, gradient or state has a pending reduction ({spec.layout}); call reduce_partial() on it."
            )
    for specs in others:
        for own, spec in zip(parameters, specs, strict=True):
            if own.layout is not spec.layout:
                raise ShardingRuleError(
                    f"{call.name}: a parameter laid out {own.layout} has state or a gradient laid out {spec.layout}; make the "
                    f"optimizer after the parameters are distributed."
                )
    return Strategy(tuple(spec.layout for specs in (parameters, *others) for spec in specs), ())


def _tensor_lists(call: OpCall) -> list[list[TensorSpec]]:
    """The call's lists of DTensors; plain numbers and lists of numbers pass through."""
    lists = []
    for name, value in call.arguments.items():
        if isinstance(value, (list, tuple)) and any(isinstance(item, TensorSpec) for item in value):
            if not all(isinstance(item, TensorSpec) for item in value):
                raise ShardingRuleError(
                    f"{call.name}: list {name!r} mixes DTensors and plain tensors; make all of them DTensors "
                    f"(distribute_tensor), or use an optimizer that doesn't group (foreach=False)."
                )
            lists.append(list(value))
    if len({len(items) for items in lists}) > 1:
        raise ShardingRuleError(f"{call.name}: lists of different lengths: {[len(items) for items in lists]}.")
    return lists
