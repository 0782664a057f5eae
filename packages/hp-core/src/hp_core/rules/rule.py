"""The mechanism of sharding rules: dims get labels, mesh axes are assigned to labels, the cheapest assignment wins.

A rule names, for each operand and output of an op, what its dims mean: dims with the same label are cut alike, a dim
without label must be whole, a label that vanishes leaves a pending reduction. `solve` does the rest for nearly every family.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import Any

from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.layout import Layout, intern
from hp_core.platform import get_platform
from hp_core.redistribute import plan_redistribute
from hp_core.rules.spec import TensorSpec

__all__ = [
    "ADDEND",
    "FACTOR",
    "PLAIN",
    "Composite",
    "OpCall",
    "Operand",
    "Output",
    "OutsideRule",
    "Strategy",
    "solve",
]

Label = Hashable

FACTOR = "factor"
"""The op is linear in this operand while the others are held fixed: it may stay partial, alone."""
ADDEND = "addend"
"""The op adds this operand: it must be pending wherever the output is, which costs nothing to arrange."""
PLAIN = "plain"
"""The op needs this operand's final values."""

_LATENCY_BYTES = 200_000
"""What one message is worth in bytes on the wire when assignments are compared."""


class OutsideRule(ShardingRuleError):
    """Raised by a rule that doesn't cover a legal call: the framework's own distributed op is tried instead."""


@dataclass(frozen=True)
class OpCall:
    """What a rule sees of a call; also all that the cache of plans distinguishes.

    Attributes:
        name: canonical name of the op, without the trailing underscore of in-place ops.
        arguments: by canonical name; tensors (also within lists) are replaced by their `TensorSpec`. A floating-point
            number stands as the type `float` unless the op's rule asks to see floats.
        specs: specs of all tensor operands, in order of appearance.
        inplace: whether the op writes to its first operand.
    """

    name: str
    arguments: Mapping[str, Any]
    specs: tuple[TensorSpec, ...]
    inplace: bool = False

    def get(self, name: str, default: Any = None) -> Any:
        """An argument, or `default` if it was not given."""
        return self.arguments.get(name, default)

    def spec(self, name: str) -> TensorSpec:
        """The spec of a tensor argument.

        Raises:
            ShardingRuleError: the argument isn't a DTensor.
        """
        value = self.arguments.get(name)
        if not isinstance(value, TensorSpec):
            raise OutsideRule(
                f"{self.name}: argument {name!r} must be a DTensor, got {value!r}. Wrap plain tensors with distribute_tensor() or "
                f"DTensor.from_local()."
            )
        return value

    def dim(self, name: str = "dim", default: int | None = None, ndim: int | None = None) -> int:
        """A dim argument of the first operand, counted from the front."""
        value = self.arguments.get(name, default)
        count = self.specs[0].ndim if ndim is None else ndim
        if not isinstance(value, int) or not -max(count, 1) <= value < max(count, 1):
            raise ShardingRuleError(
                f"{self.name}: {name}={value!r} is out of range for {count} dims (shape {tuple(self.specs[0].shape)})."
            )
        return value % max(count, 1)

    def dims(self, name: str = "dim") -> tuple[int, ...]:
        """One dim or several of the first operand, counted from the front; None and () mean all."""
        value = self.arguments.get(name)
        ndim = self.specs[0].ndim
        if value is None or value == ():
            return tuple(range(ndim))
        values = (value,) if isinstance(value, int) else tuple(value)
        for one in values:
            if not -max(ndim, 1) <= one < max(ndim, 1):
                raise ShardingRuleError(
                    f"{self.name}: {name}={value!r} is out of range for shape {tuple(self.specs[0].shape)}."
                )
        return tuple(one % max(ndim, 1) for one in values)


@dataclass(frozen=True)
class Operand:
    """One tensor operand of a rule.

    Attributes:
        spec: what it is.
        labels: one label per dim; None where the dim must be whole.
        role: FACTOR, ADDEND or PLAIN.
    """

    spec: TensorSpec
    labels: tuple[Label | None, ...]
    role: str = PLAIN


@dataclass(frozen=True)
class Output:
    """One tensor output of a rule.

    Attributes:
        labels: one label per dim; None where the dim is whole.
        shape: global shape; needed where a labelled dim has another size than in the operands.
    """

    labels: tuple[Label | None, ...]
    shape: tuple[int, ...] | None = None


@dataclass
class Strategy:
    """How a call runs on local tensors.

    Attributes:
        layouts: the layout each operand must have.
        outputs: per output tensor its layout and, for each dim, the global size (None: the local one, for uncut dims).
        local: name of a local implementation of the platform, instead of the op itself.
        bound: keyword arguments for it.
        complete: operands whose local gradient is already whole, so they never vary.
        check: called before each such call; for what depends on more than the call itself.
        active: per operand, the mesh axes that the computation it takes part in is active on; None: those of all operands.
            Lists of tensors, each position an op of its own, say so.
        detached: of an op that gives a view in the dense program: True if the local implementation copies, so that what is
            written to the result would be lost; False if the dense op itself copies for these arguments; None if it
            depends only on whether the first operand had to move.
    """

    layouts: tuple[Layout, ...]
    outputs: tuple[tuple[Layout, tuple[int | None, ...]], ...]
    local: str | None = None
    bound: dict[str, Any] = field(default_factory=dict)
    complete: frozenset[int] = frozenset()
    check: Callable[[], None] | None = None
    active: tuple[frozenset[int], ...] | None = None
    detached: bool | None = None


@dataclass(frozen=True)
class Composite:
    """A call that is computed from other ops on DTensors, each planned and cached for itself.

    What a rule gives instead of a strategy where no single local call would do, for example because the dim to reduce is
    cut. Gradients follow from those of the ops.

    Attributes:
        function: called with the call's first argument, and the others by canonical name; returns what the op returns.
    """

    function: Callable[..., Any]


Option = tuple[str, Any, Any] | None


def solve(
    operands: Sequence[Operand],
    outputs: Sequence[Output],
    *,
    reduced: Mapping[Label, str] | None = None,
    keeps: frozenset[str] = frozenset({"sum", "avg"}),
    aligned: Callable[[Label, tuple[int, ...]], bool] | None = None,
    pinned: int | None = None,
    unequal: frozenset[Label] = frozenset(),
) -> Strategy:
    """Assign mesh axes to labels so that the operands are redistributed as cheaply as possible.

    Args:
        operands: the tensor operands, in order of appearance.
        outputs: the tensor outputs.
        reduced: labels that vanish in the outputs, with the op of the reduction that is then pending.
        keeps: pending reduce ops that a FACTOR may carry through.
        aligned: further condition: may these axes (outermost first) cut this label?
        pinned: an operand that must keep its layout, because the op writes to it.
        unequal: labels of dims that may differ in size between operands.

    Raises:
        ShardingRuleError: the operands are on different meshes, dims with one label differ in size, or the pinned operand
            can't keep its layout.
    """
    mesh = operands[0].spec.layout.mesh
    for operand in operands:
        if operand.spec.layout.mesh is not mesh:
            raise ShardingRuleError(
                f"operands are on different meshes: {mesh!r} and {operand.spec.layout.mesh!r}; redistribute one of them first."
            )
    _check_sizes(operands, unequal)
    reduced = reduced or {}
    options = [_options(operands, axis, keeps) for axis in range(mesh.ndim)]
    best: Strategy | None = None
    best_cost = float("inf")
    for choice in product(*options):
        strategy = _assign(operands, outputs, choice, reduced, aligned)
        if strategy is None:
            continue
        if pinned is not None:  # what is written to keeps its layout, and that is the result's
            kept = operands[pinned].spec.layout
            if strategy.layouts[pinned] is not kept or strategy.outputs[0][0] is not kept:
                continue
        cost = _cost(operands, strategy.layouts, best_cost)
        if cost < best_cost:
            best, best_cost = strategy, cost
            if not cost:
                break
    if best is None:
        layouts = ", ".join(str(operand.spec.layout) for operand in operands)
        raise ShardingRuleError(f"the op can't write in place to an operand laid out {layouts}; redistribute it first.")
    return best


def _options(operands: Sequence[Operand], axis: int, keeps: frozenset[str]) -> list[Option]:
    """What a mesh axis may do, cheapest guesses first: cut a label, carry a pending reduction, or nothing."""
    found: list[Option] = []
    factors = any(operand.role == FACTOR for operand in operands)
    for index, operand in enumerate(operands):
        layout = operand.spec.layout
        for dim, label in enumerate(operand.labels):
            if label is not None and axis in layout.axes_of(dim):
                found.append(("cut", label, layout.ragged if dim == 0 else None))
        reduce_op = layout.partial[axis]
        if reduce_op is not None and reduce_op in keeps:
            if operand.role == FACTOR:
                found.append(("pend", index, reduce_op))
            elif operand.role == ADDEND and not factors:
                found.append(("pend", None, reduce_op))
    return [*dict.fromkeys(found), None]


def _assign(
    operands: Sequence[Operand],
    outputs: Sequence[Output],
    choice: Sequence[Option],
    reduced: Mapping[Label, str],
    aligned: Callable[[Label, tuple[int, ...]], bool] | None,
) -> Strategy | None:
    """The strategy of one choice per axis, or None if it contradicts itself."""
    mesh = operands[0].spec.layout.mesh
    axes_of: dict[Label, list[int]] = {}
    ragged: dict[Label, tuple[int, ...]] = {}
    for operand in operands:  # the order of several axes on one label is taken from the first operand that has them
        for dim, label in enumerate(operand.labels):
            for axis in operand.spec.layout.axes_of(dim):
                option = choice[axis]
                if option is not None and option[:2] == ("cut", label) and axis not in axes_of.setdefault(label, []):
                    axes_of[label].append(axis)
                    if option[2] is not None:
                        ragged[label] = option[2]
    if any(len(axes_of[label]) > 1 for label in ragged):
        return None
    if aligned is not None and not all(aligned(label, tuple(axes)) for label, axes in axes_of.items()):
        return None

    pending: dict[int, str] = {}
    for axis, option in enumerate(choice):
        if option is not None and option[0] == "pend":
            pending[axis] = option[2]
    for label, reduce_op in reduced.items():
        for axis in axes_of.get(label, ()):
            pending[axis] = reduce_op
    if len(set(pending.values())) > 1:
        return None

    def layout_for(labels: Sequence[Label | None], partials: dict[int, str]) -> Layout | None:
        dim_axes = tuple(() if label is None else tuple(axes_of.get(label, ())) for label in labels)
        shares = [ragged[label] for dim, label in enumerate(labels) if label in ragged and dim == 0]
        if any(label in ragged for label in labels[1:]):
            return None
        try:
            return intern(mesh, dim_axes, tuple(sorted(partials.items())), shares[0] if shares else None)
        except LayoutError:  # one axis on two dims of one operand: x @ x.T and the like
            return None

    layouts = []
    for index, operand in enumerate(operands):
        if operand.role == ADDEND:
            # an addend that is itself cut by what vanishes gives each rank's own share already
            own = {axis for label in operand.labels for axis in axes_of.get(label, ()) if label is not None}
            partials = {axis: reduce_op for axis, reduce_op in pending.items() if axis not in own}
        else:
            partials = {axis: op for axis, op in pending.items() if choice[axis] == ("pend", index, op)}
        layouts.append(layout_for(operand.labels, partials))
    results = []
    for output in outputs:
        layout = layout_for(output.labels, pending)
        if layout is None:
            return None
        sizes = _sizes(operands) if output.shape is None else {}
        results.append(
            (
                layout,
                tuple(
                    output.shape[dim] if output.shape is not None else sizes[label] if layout.axes_of(dim) else None
                    for dim, label in enumerate(output.labels)
                ),
            )
        )
    if any(layout is None for layout in layouts):
        return None
    return Strategy(tuple(layouts), tuple(results))  # type: ignore[arg-type]


def _check_sizes(operands: Sequence[Operand], unequal: frozenset[Label]) -> None:
    """Shapes that don't fit are told before anything moves; the local op would tell it after."""
    sizes: dict[Label, int] = {}
    for operand in operands:
        for label, size in zip(operand.labels, operand.spec.shape, strict=True):
            if label is not None and label not in unequal and sizes.setdefault(label, size) != size:
                shapes = ", ".join(str(tuple(other.spec.shape)) for other in operands)
                raise ShardingRuleError(f"operands of shapes {shapes} don't fit: {sizes[label]} meets {size}.")


def _sizes(operands: Sequence[Operand]) -> dict[Label, int]:
    return {
        label: size
        for operand in operands
        for label, size in zip(operand.labels, operand.spec.shape, strict=True)
        if label is not None
    }


def _cost(operands: Sequence[Operand], layouts: Sequence[Layout], limit: float) -> float:
    """What moving the operands costs; at least `limit` is all that is told of what isn't cheaper."""
    itemsize = get_platform().tensors.itemsize
    moves = [
        (operand.spec, layout, _LATENCY_BYTES if _must_send(operand.spec.layout, layout) else 1)
        for operand, layout in zip(operands, layouts, strict=True)
        if layout is not operand.spec.layout
    ]
    total = sum(least for _, _, least in moves)
    for spec, layout, least in moves:
        if total >= limit:
            break
        plan = plan_redistribute(spec.layout, layout, tuple(spec.shape), itemsize(spec.dtype))
        # a copy without communication is cheap, but not free: prefer the operand that already lies right
        total += plan.nbytes + _LATENCY_BYTES * plan.messages + 1 - least
    return total


def _must_send(src: Layout, dst: Layout) -> bool:
    """Whether something is cut or pending in `src` that isn't in `dst`; the rest is cutting further, which is local."""
    if set(src.partials) - set(dst.partials):
        return True
    return any(dst.axes_of(dim)[: len(axes)] != axes for dim, axes in enumerate(src.dim_axes))
