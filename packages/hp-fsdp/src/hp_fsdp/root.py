"""The driver of all units below one module: when each is gathered, resharded and reduced, in an order equal on all ranks.

Collectives are issued in a fixed order of units, whatever this rank runs: units that its forward or backward skips are
gathered and reduced in their turn all the same, so that ranks never wait for each other's different ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any
from weakref import WeakSet

from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor, Work
from hp_fsdp.platform import get_tools
from hp_fsdp.replicated import ReplicatedSegment
from hp_fsdp.segment import Segment
from hp_fsdp.signature import check_alike, exchange
from hp_fsdp.unit import State, Unit

__all__ = ["ForwardPass", "Root", "hsdp_sync_stream"]


_roots: WeakSet[Root] = WeakSet()


def hsdp_sync_stream() -> None:
    """Wait for every gradient reduction in flight. Backwards and optimizer steps do it themselves."""
    for root in list(_roots):
        root.wait_for_reductions()


@dataclass(eq=False)
class ForwardPass:
    """One forward of a root, or of a unit below it that was called by itself.

    Attributes:
        entry: the unit whose module was called.
        order: the units that it may use, in the order in which they are gathered.
        records: whether gradients are recorded.
        issued: units whose gather was begun in this pass.
        entered: units whose forward has begun, in order of their first time, and that moment.
        left: units whose forward has ended, in order of their last time, and that moment.
        calls: how many forwards of a unit's modules have ended.
        moment: counts entries and exits.
    """

    entry: Unit
    order: list[Unit]
    records: bool
    issued: set[Unit] = field(default_factory=set)
    entered: dict[Unit, int] = field(default_factory=dict)
    left: dict[Unit, int] = field(default_factory=dict)
    calls: dict[Unit, int] = field(default_factory=dict)
    moment: int = 0


@dataclass(eq=False)
class Backward:
    """One run of the engine through units of a root.

    Attributes:
        gathers: units that are gathered, in order.
        reductions: units that are reduced, in order.
        expected: forwards that may turn out to be part of it.
        passes: forwards whose backward this is.
        issued: units whose gather was begun.
        begun: units at whose outputs gradients have arrived.
        holding: of these, those that still have something to compute.
        over: of these, those that have computed everything.
        done: units whose gradients are complete.
        reduced: how many of the reductions were begun.
        any_arrived: whether some unit was done.
    """

    gathers: list[Unit]
    reductions: list[Unit]
    expected: list[ForwardPass]
    passes: set[ForwardPass] = field(default_factory=set)
    issued: set[Unit] = field(default_factory=set)
    begun: set[Unit] = field(default_factory=set)
    holding: dict[Unit, None] = field(default_factory=dict)
    over: set[Unit] = field(default_factory=set)
    done: set[Unit] = field(default_factory=set)
    reduced: int = 0
    any_arrived: bool = False


@dataclass(eq=False)
class InFlight:
    """A reduction on its way."""

    unit: Unit
    parts: list[tuple[Segment, Tensor, Work | None]]
    across_replicas: bool = False


class Root:
    """All units below a module that is called from outside."""

    def __init__(self, module: Any, units: list[Unit]) -> None:
        self.module = module
        self.units = units
        self.entry_order = list(units)
        self.exit_order = _exit_order(module, units)
        self.observed = False  # whether the order is that of a forward which has run
        self.checked = False  # whether all ranks were found to have the same units
        self.current: ForwardPass | None = None
        self.latest: ForwardPass | None = None
        self.outstanding: WeakSet[ForwardPass] = WeakSet()  # whose graph is alive, and whose backward hasn't run
        self.backward: Backward | None = None
        self.flying: list[InFlight] = []
        for unit in units:
            unit.root = self
        _roots.add(self)

    # -- forward ----------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """A module of a unit is about to compute."""
        tools = get_tools()
        if self.latest is not None and tools.in_backward():  # recomputation, after which its backward follows
            self.begin_backward(unit, self.latest, recomputes=True)
            self._gather_for_backward(unit)
            unit.activate()
            return
        current = self.current
        if current is None:
            current = self.current = self.latest = self._begin_forward(unit)
        first = unit not in current.entered
        if first:
            current.moment += 1
            current.entered[unit] = current.moment
            self._gather_for_forward(unit, current)
        else:
            unit.finish_gather()
        unit.activate()

    def leave(self, unit: Unit, outputs: Any) -> None:
        """A module of a unit has computed."""
        tools = get_tools()
        unit.deactivate()
        if tools.in_backward():
            if self.latest is not None and tools.records():
                self._await_backward(unit, self.latest, outputs)
            return
        current = self.current
        if current is None:
            return
        current.moment += 1
        current.left.pop(unit, None)
        current.left[unit] = current.moment
        current.calls[unit] = calls = current.calls.get(unit, 0) + 1
        needs_backward = current.records and self._await_backward(unit, current, outputs)
        if not unit.active and not unit.by_hand and calls % len(unit.modules) == 0:
            last = unit is current.entry or unit is current.order[-1] or unit.shared
            if not needs_backward:
                unit.free()
            elif unit.switches.reshard_after_forward and not last:
                unit.free(unit.switches.keep_among)
        if unit is current.entry and not unit.active:
            self._end_forward(current)

    def _await_backward(self, unit: Unit, forward: ForwardPass, outputs: Any) -> bool:
        tools = get_tools()
        return tools.on_gradient(tools.tensors(outputs), lambda _: (unit.root or self).begin_backward(unit, forward))

    def fail(self, unit: Unit) -> None:
        """An exception passes through the forward of a unit's module."""
        unit.deactivate()
        current = self.current
        if current is not None and unit is current.entry and not unit.active:
            self.current = None
            self._settle(current.order)

    def _begin_forward(self, unit: Unit) -> ForwardPass:
        if self.backward is not None:
            self.recover()
        if not self.checked:
            check_alike(self.units)
            self.checked = True
        order = self.entry_order if unit.modules[0] is self.module else self._below(unit)
        for one in order:
            if one.state is not State.SHARDED and not one.by_hand and one.switches.reshard_after_backward:
                one.free()
            one.refresh()
            one.forget_kept()
        forward = ForwardPass(unit, order, get_tools().records())
        if forward.records:
            self.outstanding.add(forward)
        return forward

    def _below(self, unit: Unit) -> list[Unit]:
        inside = {id(one) for module in unit.modules for _, one in get_platform().modules.named_modules(module)}
        return [
            one
            for one in self.entry_order
            if one is unit or any(id(module) in inside for member in one.members for module, _ in member.holders)
        ]

    def _gather_for_forward(self, unit: Unit, current: ForwardPass) -> None:
        place = current.order.index(unit)
        for one in current.order[: place + 1]:
            self._issue(one, current)
        unit.finish_gather()
        if self.observed:  # else those before may follow, on some ranks only, and must not be gathered again
            for one in current.order[:place]:  # skipped here: gathered because other ranks may use them
                if one not in current.entered and one.state is not State.SHARDED and not one.by_hand:
                    one.free()
        if unit.overlap:
            chosen = unit.switches.forward_prefetch
            for one in current.order[place + 1 : place + 2] if chosen is None else chosen:
                self._issue(one, current)

    def _issue(self, unit: Unit, current: ForwardPass) -> None:
        if unit not in current.issued:
            current.issued.add(unit)
            unit.start_gather()

    def _end_forward(self, current: ForwardPass) -> None:
        for one in current.order:
            if one not in current.issued:
                self._issue(one, current)
            if one not in current.entered and not one.by_hand:
                one.free()
            elif (
                current.calls.get(one, 0) % len(one.modules) and not one.by_hand and one.switches.reshard_after_forward
            ):
                one.free(one.switches.keep_among)
        self.current = None
        if not self.observed and len(current.order) == len(self.units):
            self._observe(current)

    def _observe(self, current: ForwardPass) -> None:
        """Take the order in which the first forward ran as the order of all, agreed on by all ranks."""
        self.observed = True
        number = {unit: index for index, unit in enumerate(self.units)}
        entered = [number[unit] for unit in current.entered]
        left = [number[unit] for unit in current.left]
        entered, left = agree_on_order(self, entered, left)
        self.entry_order = _completed([self.units[i] for i in entered], self.entry_order)
        self.exit_order = _completed([self.units[i] for i in left], self.exit_order)

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self, unit: Unit, forward: ForwardPass, recomputes: bool = False) -> None:
        """A gradient has arrived at an output of a unit, or its forward is recomputed for one that is about to."""
        tools = get_tools()
        if self.backward is None:
            self.backward = Backward([], [], list(self.outstanding))
            tools.at_end_of_backward(self._end_backward)
        backward = self.backward
        if forward not in backward.passes:
            self._join(backward, forward)
        if not recomputes:
            self._release_behind(unit, forward, backward)
        if unit in backward.begun:
            if unit in backward.over:  # used by an earlier forward, too
                backward.over.remove(unit)
                backward.holding[unit] = None
                self._gather_for_backward(unit)
            return
        backward.begun.add(unit)
        backward.holding[unit] = None
        self._gather_for_backward(unit)
        unit.open_gradients()

    def begin_late(self, unit: Unit) -> None:
        """A gradient has arrived at a parameter that was used outside of its unit's modules, gathered by hand."""
        forward = self.latest
        if forward is None or unit not in forward.order:
            forward = ForwardPass(unit, [unit], True)
        self.begin_backward(unit, forward, recomputes=True)

    def _release_behind(self, unit: Unit, forward: ForwardPass, backward: Backward) -> None:
        """Free the units whose backward is over when this one's begins.

        The engine runs operations in the reverse order of the forward. So everything has run of a unit that was entered after this
        one had been left: also what leads to its inputs only, by frozen or detached parameters, and that no gradient of its own
        tells of.
        """
        left = forward.left.get(unit)
        if left is None:
            return
        for one in list(backward.holding):
            if forward.entered.get(one, 0) > left:
                del backward.holding[one]
                backward.over.add(one)
                if one in backward.done or not one.expected:
                    self._reshard_behind(one)

    def _reshard_behind(self, unit: Unit) -> None:
        if unit.switches.reshard_after_backward and not unit.active and not unit.by_hand:
            unit.free()

    def _join(self, backward: Backward, forward: ForwardPass) -> None:
        """The units of a forward whose backward this is take part: alike on all ranks, whichever of them it used here."""
        backward.passes.add(forward)
        part = set(forward.order)
        entry_order = [unit for unit in self.entry_order if unit in part]
        trainable = [unit.trainable for unit in entry_order]
        first = trainable.index(True) if True in trainable else len(trainable)
        reached = set(entry_order[first:]).difference(backward.gathers)
        backward.gathers += [u for u in reversed(self.exit_order) if u in reached and needs_parameters(u)]
        backward.reductions += [
            unit
            for unit, wanted in zip(reversed(entry_order), reversed(trainable), strict=True)
            if wanted and unit not in backward.reductions
        ]

    def _gather_for_backward(self, unit: Unit) -> None:
        backward = self.backward
        assert backward is not None
        if unit in backward.gathers:
            place = backward.gathers.index(unit)
            for one in backward.gathers[: place + 1]:
                self._issue_again(one, backward)
            unit.finish_gather()
            if unit.overlap:
                chosen = unit.switches.backward_prefetch
                for one in backward.gathers[place + 1 : place + 2] if chosen is None else chosen:
                    self._issue_again(one, backward)
        elif needs_parameters(unit) or get_tools().records():
            unit.finish_gather()

    def _issue_again(self, unit: Unit, backward: Backward) -> None:
        if unit not in backward.issued:
            backward.issued.add(unit)
            unit.start_gather()

    def unit_done(self, unit: Unit) -> None:
        """All gradients of a unit have arrived."""
        backward = self.backward
        if backward is None or unit in backward.done:
            return
        backward.done.add(unit)
        backward.any_arrived = True
        unit.close_gradients()
        if unit in backward.over:
            self._reshard_behind(unit)
        self._reduce_in_turn(backward)

    def _reduce_in_turn(self, backward: Backward, all_of_them: bool = False) -> None:
        while backward.reduced < len(backward.reductions):
            unit = backward.reductions[backward.reduced]
            awaited = unit not in backward.done and any(
                unit in forward.entered for forward in (*backward.expected, *backward.passes)
            )
            if awaited and not all_of_them:
                return
            backward.reduced += 1
            if unit.switches.sync:
                self._reduce(unit)

    def _reduce(self, unit: Unit) -> None:
        # what is on its way had the whole backward of a unit to arrive, and its buffers are as large as the unit
        for flight in list(self.flying):
            self._land(flight)
        self.flying.append(InFlight(unit, unit.start_reduce()))
        if not unit.overlap:
            self.wait_for_reductions()

    def _land(self, flight: InFlight) -> None:
        """Wait for one reduction; with HSDP it may go on to the replicas."""
        unit = flight.unit
        for _, _, work in flight.parts:
            if work is not None:
                work.wait()
        if not flight.across_replicas:
            for segment, _, _ in flight.parts:
                segment.drop_gradients()
            if unit.data.replica_group is not None and not flight.across_replicas:
                self._cross_replicas(flight)
                return
        self.flying.remove(flight)
        for segment, reduced, _ in flight.parts:
            unit.finish_reduce(segment, reduced)

    def _cross_replicas(self, flight: InFlight) -> None:
        unit, tools = flight.unit, get_tools()
        for segment, reduced, _ in flight.parts:  # those of replicated parameters are complete
            if isinstance(segment, ReplicatedSegment):
                unit.finish_reduce(segment, reduced)
        flight.parts = [part for part in flight.parts if not isinstance(part[0], ReplicatedSegment)]
        reduced = [part[1] for part in flight.parts]
        if unit.partial is not None:
            for total, more in zip(reduced, unit.partial, strict=True):
                tools.add(total, more)
        if not unit.switches.all_reduce:
            unit.partial = reduced
            self.flying.remove(flight)
            return
        unit.partial = None
        group = unit.data.replica_group
        assert group is not None
        collectives = get_platform().collectives
        flight.parts = [
            (segment, total, collectives.all_reduce(total, "sum", group, async_op=True))
            for segment, total, _ in flight.parts
        ]
        flight.across_replicas = True
        if not unit.overlap:
            self._land(flight)

    def wait_for_reductions(self) -> None:
        """Return when no reduction is on its way."""
        while self.flying:
            self._land(self.flying[0])

    def settle_for_state(self) -> None:
        """Before parameters are read or written as a whole: no reduction and no failed pass is left over."""
        if self.backward is not None and not get_tools().in_backward():
            self.recover()
        self.wait_for_reductions()

    def _end_backward(self) -> None:
        backward = self.backward
        if backward is None:
            return
        if backward.any_arrived or any(unit.arrived for unit in backward.begun):
            for unit in backward.gathers:
                self._issue_again(unit, backward)
            for unit in backward.begun:
                unit.close_gradients()
            self._reduce_in_turn(backward, all_of_them=True)
        else:  # gradients of something else were asked for
            for unit in backward.begun:
                unit.close_gradients()
                unit.drop_untouched()
        for unit in self.units:
            if unit.state is not State.SHARDED and not unit.by_hand and unit.switches.reshard_after_backward:
                unit.free()
        if all(unit.switches.last_backward for unit in self.units):
            self.wait_for_reductions()
        self.outstanding.difference_update(backward.passes)
        self.backward = None

    # -- after failures ---------------------------------------------------------------------------------------------

    def recover(self) -> None:
        """A forward or backward has ended with an exception: finish what is on its way, and gather nothing any more."""
        backward, self.backward, self.current = self.backward, None, None
        if backward is not None:
            for unit in backward.begun:
                unit.close_gradients()
        self.wait_for_reductions()
        self._settle(self.units)

    def _settle(self, units: list[Unit]) -> None:
        for unit in units:
            while unit.active:
                unit.deactivate()
            if not unit.by_hand:
                unit.free()


def needs_parameters(unit: Unit) -> bool:
    """Whether the backward of a unit reads its parameters: that of embeddings doesn't."""
    tools = get_tools()
    return not all(tools.is_embedding(module) for member in unit.members for module, _ in member.holders)


def agree_on_order(root: Root, entered: list[int], left: list[int]) -> tuple[list[int], list[int]]:
    """The order of the rank that used most units, the first of them; one small all-gather."""
    mesh = root.units[0].data.mesh
    sample = next((segment.chunk for unit in root.units for segment in unit.segments), None)
    if mesh.size() == 1 or sample is None:
        return entered, left
    count = len(root.units)
    table = exchange(mesh, [len(entered), *_filled(entered, count), *_filled(left, count)], sample)
    best = max(table, key=lambda one: one[0])
    return best[1 : 1 + best[0]], best[1 + count : 1 + count + best[0]]


def _filled(values: list[int], length: int) -> list[int]:
    return values + [-1] * (length - len(values))


def _completed(observed: list[Unit], known: list[Unit]) -> list[Unit]:
    """The observed order, with units that no rank has used where they stood before."""
    result = list(observed)
    for index, unit in enumerate(known):
        if unit not in result:
            before = [one for one in known[:index] if one in result]
            result.insert(result.index(before[-1]) + 1 if before else 0, unit)
    return result


def _exit_order(module: Any, units: list[Unit]) -> list[Unit]:
    """Units in the order in which their forwards end if modules run in the order in which they are registered."""
    named = get_platform().modules.named_modules(module)
    unit_at = {path: unit for path, one in named for unit in units if unit.modules[0] is one}
    order: list[Unit] = []
    open_: list[str] = []
    for path, _ in named:
        if path in unit_at:
            while open_ and open_[-1] and not path.startswith(open_[-1] + "."):
                order.append(unit_at[open_.pop()])
            open_.append(path)
    return order + [unit_at[path] for path in reversed(open_)]
