"""What a redistribution does, as values: the steps and the plan they make up.

A step is a kind and two layouts; all it moves follows from their bounds, so that planner, executor and simulator agree
by construction. Steps and plans are immutable, hold only facts that are equal on all ranks, and print for people.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import prod
from typing import ClassVar

from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh

__all__ = [
    "AllGather",
    "AllReduce",
    "AllToAll",
    "Pad",
    "Permute",
    "Plan",
    "ReduceScatter",
    "Scale",
    "Slice",
    "Step",
    "Transfer",
    "mesh_text",
]


@dataclass(frozen=True, slots=True)
class Step:
    """One step of a plan; the subclass says how `before` becomes `after`.

    Attributes:
        axes: indices of the mesh axes that the step is about, ascending, all of more than one rank (but for an axis that
            shares flat pieces). A collective runs once, over the group that they make when flattened. Over each of these
            axes something changes; over all others `before` and `after` agree.
        before: layout of what the step takes. Axes of one rank are left out, here and in `after`, but for one that shares
            flat pieces.
        after: layout of what the step gives.
        nbytes: bytes that a rank puts on the wire (the largest over the ranks); 0 for a local step.
    """

    kind: ClassVar[str]
    local: ClassVar[bool] = False

    axes: tuple[int, ...]
    before: Layout
    after: Layout
    nbytes: int = 0

    @property
    def messages(self) -> int:
        """Rounds of communication: 0 for a local step, or over an axis of one rank; else 1."""
        return 0 if self.local or self.group_size == 1 else 1

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Names of `axes`."""
        return tuple(self.before.mesh.mesh_dim_names[axis] for axis in self.axes)

    @property
    def group_size(self) -> int:
        """Number of ranks over which one instance of the step runs."""
        return prod(self.before.mesh.shape[axis] for axis in self.axes)

    @property
    def reduce_op(self) -> str | None:
        """The reduce op that the step finishes (all-reduce, reduce-scatter) or leaves pending (scale, pad), if any."""
        pending = dict(self.before.partials) | dict(self.after.partials)
        return next((pending[axis] for axis in self.axes if axis in pending), None)

    def describe(self, global_shape: Sequence[int]) -> str:
        """One line for people: kind, axes, layouts, largest local shapes, bytes."""
        reduce_op = f"({self.reduce_op})" if self.reduce_op else ""
        shapes = [layout.largest_local_shape(global_shape) for layout in (self.before, self.after)]
        cost = f"{self.nbytes} B" if self.messages else "local"
        return (
            f"{self.kind}{reduce_op} over {', '.join(self.axis_names)}: {self.before.compact_str} -> "
            f"{self.after.compact_str}, local {shapes[0]} -> {shapes[1]}, {cost}"
        )


@dataclass(frozen=True, slots=True)
class AllGather(Step):
    """Undo the innermost cuts: `axes` are suffixes of the dims' axis lists, of one dim or of several, and go away.

    Or put flat shares together, over the axis that shares.
    """

    kind: ClassVar[str] = "all_gather"


@dataclass(frozen=True, slots=True)
class AllReduce(Step):
    """Finish the reductions pending on `axes`; every rank gets the whole result."""

    kind: ClassVar[str] = "all_reduce"


@dataclass(frozen=True, slots=True)
class ReduceScatter(Step):
    """Finish the reductions pending on `axes`, each rank keeping its part: `axes` become innermost cuts of dims.

    Or the one axis, that which shares flat pieces.
    """

    kind: ClassVar[str] = "reduce_scatter"


@dataclass(frozen=True, slots=True)
class AllToAll(Step):
    """Undo innermost cuts, cut anew by the same axes: a rank sends what others' new boxes share with its own."""

    kind: ClassVar[str] = "all_to_all"


@dataclass(frozen=True, slots=True)
class Permute(Step):
    """An all-to-all in which every rank sends to at most one other and receives from at most one: point to point."""

    kind: ClassVar[str] = "permute"


@dataclass(frozen=True, slots=True)
class Slice(Step):
    """Local: each rank keeps its part of what was replicated over `axes`; they become innermost cuts of some dims.

    Or the one axis shares the flattened piece.
    """

    kind: ClassVar[str] = "slice"
    local: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Scale(Step):
    """Local: a value replicated over `axes` becomes a pending reduction over them.

    For "sum" the rank at coordinate 0 of all `axes` keeps it and the others hold zeros; for "avg", "max" and "min"
    every rank keeps it as it is.
    """

    kind: ClassVar[str] = "scale"
    local: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Pad(Step):
    """Local: innermost cuts, or flat shares, become a pending sum, each rank putting zeros around its part.

    Undoes a reduce-scatter.
    """

    kind: ClassVar[str] = "pad"
    local: ClassVar[bool] = True


@dataclass(frozen=True, slots=True)
class Transfer(Step):
    """To another mesh, point to point: each of its ranks gets what it shall hold from ranks that hold it.

    `before` and `after` lie on different meshes, nothing is pending in either, and `axes` is empty. Which of several
    replicas sends what is said by `routes.route`. Ranks of the first mesh only end with nothing.
    """

    kind: ClassVar[str] = "transfer"

    @property
    def messages(self) -> int:
        """Rounds of communication: 0 if every rank already holds what it shall hold, else 1."""
        return 1 if self.nbytes else 0

    def describe(self, global_shape: Sequence[int]) -> str:
        """One line for people: both meshes and layouts, largest local shapes, bytes."""
        shapes = [layout.largest_local_shape(global_shape) for layout in (self.before, self.after)]
        cost = f"{self.nbytes} B" if self.nbytes else "local"
        return (
            f"{self.kind}: {self.before.compact_str} on {mesh_text(self.before.mesh)} -> {self.after.compact_str} on "
            f"{mesh_text(self.after.mesh)}, local {shapes[0]} -> {shapes[1]}, {cost}"
        )


@dataclass(frozen=True, slots=True)
class Plan:
    """The steps from one layout to another, and what they cost.

    Attributes:
        src: layout to start from.
        dst: layout to reach.
        global_shape: shape of the global tensor.
        itemsize: bytes per element.
        steps: what to do, in order; empty when every rank already holds what it shall hold. The first `before` and the
            last `after` are `src` and `dst` without the axes of one rank. (Between two meshes of the same ranks they may
            be the same layouts written on a common refinement of both meshes.)
        messages: rounds of communication.
        nbytes: bytes that a rank puts on the wire, summed over the steps (each counted at its busiest rank).
        peak_bytes: size of the largest local tensor on the way, `src` and `dst` included.
    """

    src: Layout
    dst: Layout
    global_shape: tuple[int, ...]
    itemsize: int
    steps: tuple[Step, ...]
    messages: int
    nbytes: int
    peak_bytes: int

    def __hash__(self) -> int:
        """By the question, not by the answer: cheap, and equal plans still hash equal."""
        return hash((self.src, self.dst, self.global_shape, self.itemsize))

    def __str__(self) -> str:
        """A headline and one line per step."""
        src, dst = self.src.compact_str, self.dst.compact_str
        if self.src.mesh is not self.dst.mesh:
            src, dst = f"{src} on {mesh_text(self.src.mesh)}", f"{dst} on {mesh_text(self.dst.mesh)}"
        lines = [
            f"{src} -> {dst}, shape {self.global_shape}, {self.itemsize} B per "
            f"element: {self.messages} message{'' if self.messages == 1 else 's'}, {self.nbytes} B sent per rank, "
            f"peak {self.peak_bytes} B"
        ]
        lines += [f"  {number}. {step.describe(self.global_shape)}" for number, step in enumerate(self.steps, 1)]
        return "\n".join(lines if self.steps else [*lines, "  nothing to do"])


def mesh_text(mesh: DeviceMesh) -> str:
    """A mesh for people: axes and ranks, such as `[dp=2, tp=2: ranks 0-3]`; long lists of ranks are cut short."""
    axes = ", ".join(f"{name}={size}" for name, size in zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    runs: list[list[int]] = []
    for rank in mesh.rank_list:
        if runs and rank == runs[-1][-1] + 1:
            runs[-1] = [runs[-1][0], rank]
        else:
            runs.append([rank])
    texts = ["-".join(map(str, run)) for run in runs[:8]] + ["..."] * (len(runs) > 8)
    return f"[{axes}: ranks {','.join(texts)}]"
