"""How ops run on flat operands, whatever their rule: the rule is asked about stand-ins that it knows how to treat.

A flat share is a piece of a vector. To elementwise ops, and to reductions over all elements, flat operands are shown as 1-D
tensors cut by the same axes, and what the rule says of these holds for the shares. All other ops see the layout in which the
pieces are whole, and so have them gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any

from hp_core.errors import HyperParallelError, ShardingRuleError
from hp_core.layout import Layout, intern
from hp_core.platform import get_platform
from hp_core.redistribute import plan_redistribute
from hp_core.rules.registry import Rule
from hp_core.rules.rule import Composite, OpCall, Strategy
from hp_core.rules.spec import TensorSpec, spec_of

__all__ = ["decide", "gathering"]


def decide(rule: Rule, call: OpCall, items: Sequence[int | None]) -> Strategy | Composite:
    """What the rule says of a call, some of whose operands may be flat.

    Args:
        rule: the rule.
        call: the call.
        items: for each operand its index in the list that it stands in, or None.

    Raises:
        ShardingRuleError: what the rule raises; or a list of flat tensors would be written to with operands that don't fit.
    """
    if rule.flat == "as is" or all(spec.layout.flat is None for spec in call.specs):
        return rule.function(call)  # type: ignore[no-any-return]
    on_shares = _view_in_own_shape(call) or _on_shares(rule, call, items)
    if on_shares is not None:
        return on_shares
    whole: Strategy | Composite = rule.function(_shown_as(call, [_unflat(spec) for spec in call.specs]))
    return Composite(gathering(whole.function)) if isinstance(whole, Composite) else whole


def gathering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, called with flat DTensors put together along the axis that shares them."""

    def run(*args: Any, **kwargs: Any) -> Any:
        return function(*map(_gathered, args), **{name: _gathered(value) for name, value in kwargs.items()})

    return run


def _gathered(value: Any) -> Any:
    if isinstance(value, (list, tuple)) and not hasattr(value, "_fields"):
        return type(value)(map(_gathered, value))
    layout = getattr(value, "layout", None)
    return value.redistribute(layout.unflat) if isinstance(layout, Layout) and layout.flat is not None else value


# -- operands and what they are shown as ----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Group:
    """Operands that meet elementwise, and the flat layout that those of full shape shall have.

    Attributes:
        layout: the flat layout, without what is pending; None if none is flat, or the op writes to one that isn't.
        shape: global shape of the flat operands.
        shown: what each operand is shown as, in the order of the group.
        flat: which of them are shown as vectors.
    """

    layout: Layout | None
    shape: tuple[int, ...]
    shown: tuple[TensorSpec, ...]
    flat: tuple[bool, ...]

    @property
    def cut(self) -> tuple[int, ...]:
        """The axes that cut the vectors."""
        return () if self.layout is None else tuple(sorted(self.layout.sharded_axes))


def _on_shares(rule: Rule, call: OpCall, items: Sequence[int | None]) -> Strategy | Composite | None:
    """The strategy on flat shares; None if the op can't run on them."""
    if rule.flat == "gathered" or (rule.flat == "reduces" and not _reduces_all(call)):
        return None
    numbers = sorted({item for item in items if item is not None})
    positions: list[int | None] = [*numbers] or [None]
    places = [[place for place, item in enumerate(items) if item == position] for position in positions]
    groups = [_group([call.specs[place] for place in group], rule.flat, call.inplace) for group in places]
    shown = [_unflat(spec) for spec in call.specs]
    owner: list[_Group | None] = [None] * len(shown)
    for places_of_group, group in zip(places, groups, strict=True):
        if group is None:
            if rule.flat == "alike":
                return rule.function(call)  # type: ignore[no-any-return]
            if call.inplace and numbers:
                _refuse_lost_write(call, [call.specs[place] for place in places_of_group])
            return None
        for place, spec, is_flat in zip(places_of_group, group.shown, group.flat, strict=True):
            shown[place] = spec
            owner[place] = group if is_flat else None
    try:
        strategy = rule.function(_shown_as(call, shown, reduces=rule.flat == "reduces"))
    except HyperParallelError:
        if numbers:
            raise
        return None  # asked again with the pieces whole, which are what the message should speak of
    if isinstance(strategy, Composite):
        return strategy
    lifted = _lifted(strategy, owner, [group for group in groups if group is not None])
    if lifted is not None and lifted.local is None and rule.flat == "reduces" and call.get("dim") not in (None, ()):
        return Composite(partial(_over_all, call.name))
    return lifted


def _group(specs: Sequence[TensorSpec], use: str, inplace: bool) -> _Group | None:
    """How operands that meet elementwise can meet on flat shares; None if they can't."""
    flats = [spec for spec in specs if spec.layout.flat is not None]
    target = specs[0] if inplace or not flats else flats[0]
    layout, shape = target.layout.gradient, tuple(target.shape)
    if layout.flat is None:
        if flats and use == "alike":
            return None
        return _Group(None, (), tuple(map(_unflat, specs)), (False,) * len(specs))
    shown, flat = [], []
    for spec in specs:
        is_full = tuple(spec.shape) == shape
        if not is_full and (spec.ndim or use == "alike"):
            return None
        if is_full and not _may_become(spec, layout, use, inplace):
            return None
        shown.append(_as_vector(spec, layout) if is_full else _unflat(spec))
        flat.append(is_full)
    return _Group(layout, shape, tuple(shown), tuple(flat))


def _may_become(spec: TensorSpec, layout: Layout, use: str, inplace: bool) -> bool:
    """Whether an operand of full shape shall be flat for the op: if it is, if that is free, or if the op writes to such."""
    if spec.layout.gradient is layout:
        return True
    if use == "alike" or spec.layout.mesh is not layout.mesh:
        return False
    if inplace:
        return True
    target = layout.with_partials(_pending_beside(spec, layout))
    itemsize = get_platform().tensors.itemsize(spec.dtype)
    return not plan_redistribute(spec.layout, target, tuple(spec.shape), itemsize).messages


def _pending_beside(spec: TensorSpec, layout: Layout) -> tuple[tuple[int, str], ...]:
    """What may stay pending of an operand that is to be cut as the flat layout is."""
    return tuple(pair for pair in spec.layout.partials if pair[0] not in layout.sharded_axes)


def _as_vector(spec: TensorSpec, layout: Layout) -> TensorSpec:
    """The spec of a 1-D tensor cut by the axes of the flat layout, with what may stay pending."""
    vector = intern(layout.mesh, (tuple(sorted(layout.sharded_axes)),), _pending_beside(spec, layout))
    return spec_of(vector, (prod(spec.shape),), spec.dtype)


def _unflat(spec: TensorSpec) -> TensorSpec:
    return spec if spec.layout.flat is None else spec_of(spec.layout.unflat, tuple(spec.shape), spec.dtype)


def _shown_as(call: OpCall, shown: Sequence[TensorSpec], *, reduces: bool = False) -> OpCall:
    """The call with other specs in place of its own. Arguments name the operands in their order, if they name them."""
    place = 0

    def visible(value: Any) -> Any:
        nonlocal place
        if isinstance(value, TensorSpec):
            place = call.specs.index(value, place)
            place += 1
            return shown[place - 1]
        return type(value)(map(visible, value)) if type(value) in (list, tuple) else value

    arguments = {name: visible(value) for name, value in call.arguments.items()}
    if reduces and "dim" in arguments:
        arguments["dim"] = None
    return OpCall(call.name, arguments, tuple(shown), call.inplace)


def _view_in_own_shape(call: OpCall) -> Strategy | None:
    """Of `x.view_as(y)` and the like, where nothing changes: a view of the share, so that writing to it isn't lost."""
    if call.name not in ("view", "reshape", "view_as", "reshape_as"):
        return None
    spec, shape = call.specs[0], tuple(call.specs[0].shape)
    given = call.get("shape", ())
    wanted = call.spec("other").shape if call.name.endswith("_as") else given[0] if len(given) == 1 else given
    if spec.layout.flat is None or not isinstance(wanted, (tuple, list)) or tuple(wanted) != shape:
        return None
    local_shape = spec.layout.local_shape(shape)
    layouts = tuple(one.layout for one in call.specs)
    output = (spec.layout, shape)
    return Strategy(layouts, (output,), local="view_first", bound={"shape": local_shape}, complete=frozenset({0}))


# -- from the answer on vectors to that on shares -------------------------------------------------------------------


def _lifted(strategy: Strategy, owner: Sequence[_Group | None], groups: Sequence[_Group]) -> Strategy | None:
    """The strategy for the shares; None if the rule wants other pieces than there are."""
    layouts = []
    for layout, group in zip(strategy.layouts, owner, strict=True):
        lifted = layout if group is None else _flat_again(layout, group)
        if lifted is None:
            return None
        layouts.append(lifted)
    outputs = []
    for number, (layout, sizes) in enumerate(strategy.outputs):
        group = groups[number if len(groups) > 1 else 0]
        if group.layout is None or not sizes:
            outputs.append((layout, sizes))
            continue
        lifted = _flat_again(layout, group)
        if lifted is None:
            return None
        outputs.append((lifted, group.shape))
    return replace(strategy, layouts=tuple(layouts), outputs=tuple(outputs))


def _flat_again(layout: Layout, group: _Group) -> Layout | None:
    """The flat layout that is shown as this one of a vector."""
    assert group.layout is not None
    return group.layout.with_partials(layout.partials) if layout.dim_axes == (group.cut,) else None


# -- reductions and refusals ----------------------------------------------------------------------------------------


def _reduces_all(call: OpCall) -> bool:
    """Whether the call reduces its one operand over all dims, to no dims."""
    dim = call.get("dim")
    if len(call.specs) != 1 or call.get("keepdim") or (call.name in ("max", "min") and dim is not None):
        return False
    return dim is None or len(set(call.dims())) == call.specs[0].ndim


def _over_all(name: str, x: Any, dim: Any = None, keepdim: bool = False, **arguments: Any) -> Any:
    """The reduction without naming the dims, which the flat shares don't have."""
    return getattr(x, name)(**arguments)


def _refuse_lost_write(call: OpCall, specs: Sequence[TensorSpec]) -> None:
    """What a list op writes to gathered copies doesn't come back."""
    told = " and ".join(map(str, specs))
    raise ShardingRuleError(
        f"{call.name} would write to a flat tensor with an operand of another shape, or on another mesh: {told}. Give operands "
        f"of one shape on one mesh, or call the op on one tensor at a time."
    )
