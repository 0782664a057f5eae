"""The driver of all units below one module: when each is gathered, resharded and reduced, in an order equal on all ranks.

Collectives are issued in a fixed order of units, whatever this rank runs: units that its forward or backward skips are
gathered and reduced in their turn all the same, so that ranks never wait for each other's different ways.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import count
from typing import Any
from weakref import WeakSet

from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor, Work
from hp_fsdp.order import Event, agreed_order, entries, registered_order
from hp_fsdp.platform import get_tools
from hp_fsdp.replicated import ReplicatedSegment
from hp_fsdp.segment import Segment
from hp_fsdp.signature import check_alike
from hp_fsdp.unit import State, Unit

__all__ = ["ForwardPass", "Root", "hsdp_sync_stream"]


_roots: WeakSet[Root] = WeakSet()
_clock = count(1)


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
        call: the call of the module, while it runs.
        issued: units whose gather was begun in this pass.
        entered: units whose forward has begun, in order of their first time, and that moment.
        left: units whose forward has ended, in order of their last time, and that moment.
        calls: how many forwards of a unit's modules have ended.
        began: the moment at which it did, on a clock of all forwards.
        ended: the moment at which it did, or 0.
        reached: units whose outputs depend on trained parameters, once somebody asked.
    """

    entry: Unit
    order: list[Unit]
    records: bool
    call: Any = None
    issued: set[Unit] = field(default_factory=set)
    entered: dict[Unit, int] = field(default_factory=dict)
    left: dict[Unit, int] = field(default_factory=dict)
    calls: dict[Unit, int] = field(default_factory=dict)
    began: int = field(default_factory=lambda: next(_clock))
    ended: int = 0
    reached: set[Unit] | None = None


@dataclass(eq=False)
class Backward:
    """One run of the engine through units of a root.

    Attributes:
        awaited: forwards that may turn out to be part of it.
        passes: forwards that are.
        steps: the events of their orders, in reverse: a unit's backward begins where its forward ended.
        at: number of steps that were taken.
        places: the step at which each unit begins.
        gathers: units that are gathered, in order.
        issued: units whose gather was begun.
        begun: units at whose outputs gradients have arrived.
        holding: of these, those that may still have something to compute.
        entered: when units were entered in the forward whose backward runs now.
        moment: up to when it has run: what was entered later is over.
        done: units whose gradients are complete.
        late: trained units whose backward should be over, but whose gradients can't be reduced yet.
        reduced: units whose reduction was begun.
        accumulates: whether it is known that gradients of parameters, not of inputs only, are wanted.
    """

    awaited: list[ForwardPass]
    passes: set[ForwardPass] = field(default_factory=set)
    steps: list[Event] = field(default_factory=list)
    at: int = 0
    places: dict[Unit, int] = field(default_factory=dict)
    gathers: list[Unit] = field(default_factory=list)
    issued: set[Unit] = field(default_factory=set)
    begun: set[Unit] = field(default_factory=set)
    holding: dict[Unit, None] = field(default_factory=dict)
    entered: dict[Unit, int] = field(default_factory=dict)
    moment: int = 0
    done: set[Unit] = field(default_factory=set)
    late: dict[Unit, None] = field(default_factory=dict)
    reduced: set[Unit] = field(default_factory=set)
    accumulates: bool = False


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
        self.events = registered_order(module, units)
        self.entry_order = entries(self.events)
        self.observed = False  # whether the order is that of a forward which has run
        self.checked = False  # whether all ranks were found to have the same units
        self.current: ForwardPass | None = None
        self.latest: ForwardPass | None = None
        self.outstanding: WeakSet[ForwardPass] = WeakSet()  # whose graph is alive, and whose backward hasn't run
        self.backward: Backward | None = None
        self.flying: list[InFlight] = []
        self.creates_graph = False  # whether gradients of the latest backward have a graph of their own
        self.held_for_graph = (
            False  # until that graph's backward, which reads parameters without telling which, all stay whole
        )
        for unit in units:
            if unit.root is not None:
                self.outstanding.update(unit.root.outstanding)
            unit.root = self
        _roots.add(self)

    # -- forward ----------------------------------------------------------------------------------------------------

    def enter(self, unit: Unit) -> None:
        """A module of a unit is about to compute."""
        tools = get_tools()
        if self.backward is not None and tools.in_backward():  # recomputation, after which its backward follows
            self._gather_for_recomputation(unit)
            unit.activate()
            return
        current = self.current
        if current is not None and not tools.is_running(current.call):
            self.recover()  # it was interrupted by what no hook is told of
            current = None
        if current is None:
            current = self.current = self.latest = self._begin_forward(unit)
        first = unit not in current.entered
        if first:
            current.entered[unit] = next(_clock)
            self._gather_for_forward(unit, current)
        else:
            unit.finish_gather()
        unit.activate()

    def leave(self, unit: Unit, outputs: Any) -> None:
        """A module of a unit has computed."""
        tools = get_tools()
        unit.deactivate()
        if self.backward is not None and tools.in_backward():
            if self.latest is not None and tools.records():
                self._await_backward(unit, self.latest, outputs)
            return
        current = self.current
        if current is None:
            return
        current.left.pop(unit, None)
        current.left[unit] = next(_clock)
        current.calls[unit] = calls = current.calls.get(unit, 0) + 1
        needs_backward = current.records and self._await_backward(unit, current, outputs)
        if calls % len(unit.modules) == 0:
            self._reshard_after_forward(unit, current, needs_backward)
        if unit is current.entry and not unit.active:
            self._end_forward(current)

    def _reshard_after_forward(self, unit: Unit, current: ForwardPass, needs_backward: bool = False) -> None:
        """Free what isn't kept for the backward: alike on all ranks, whether they have used the unit or not."""
        if unit.active or unit.by_hand or self.held_for_graph or unit.state is State.SHARDED:
            return
        if not (needs_backward or (current.records and unit in self._reached(current))):
            unit.free()
        elif unit.switches.reshard_after_forward and not (
            unit is current.entry or unit is current.order[-1] or unit.shared
        ):
            unit.free(unit.switches.keep_among)

    def _reached(self, forward: ForwardPass) -> set[Unit]:
        """Units of a forward whose outputs depend on parameters that are trained, if they run in their order."""
        if forward.reached is None:
            trained = [unit.trainable for unit in forward.order]
            forward.reached = set(forward.order[trained.index(True) :]) if True in trained else set()
        return forward.reached

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
        order = self.entry_order if unit.modules[0] is self.module else self._below(unit)
        for one in order:
            if one.state is not State.SHARDED and not one.active:
                self._reshard_behind(one)
            one.refresh()
            one.forget_kept()
        if not self.checked:
            check_alike(self.units)
            self.checked = True
        forward = ForwardPass(unit, order, get_tools().records(), get_tools().running_call())
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
                if one not in current.entered:
                    self._reshard_after_forward(one, current)
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
            calls = current.calls.get(one, 0)
            if not calls or calls % len(one.modules):  # unused, failed, or not all of its modules were
                self._reshard_after_forward(one, current)
        self.current = current.call = None
        current.ended = next(_clock)
        if not self.observed and len(current.order) == len(self.units):
            self._observe(current)

    def _observe(self, current: ForwardPass) -> None:
        """Take the order in which the first forward ran as the order of all, agreed on by all ranks."""
        self.observed = True
        self.events = agreed_order(self.units, current.entered, current.left, self.events)
        self.entry_order = entries(self.events)

    # -- backward ---------------------------------------------------------------------------------------------------

    def begin_backward(self, unit: Unit, forward: ForwardPass, in_turn: bool = True) -> None:
        """A gradient has arrived at an output of a unit."""
        tools = get_tools()
        if self.backward is None:
            self.wait_for_reductions()  # of a backward before, whose buffers gradients are about to arrive in
            self.backward = Backward(list(self.outstanding))
            self.creates_graph = tools.records()
            self.held_for_graph = self.held_for_graph or self.creates_graph
            tools.at_end_of_backward(self._end_backward)
        backward = self.backward
        if forward not in backward.passes:
            self._join(backward, forward)
        if in_turn:
            backward.entered, backward.moment = forward.entered, forward.left.get(unit, 0)
            self._release_behind(backward)
            backward.accumulates = backward.accumulates or unit.will_accumulate()
            self._advance(backward, unit)
            if unit in backward.gathers or needs_parameters(unit) or tools.records():
                unit.finish_gather()
        if unit not in backward.begun:
            backward.begun.add(unit)
            unit.open_gradients()
        backward.holding[unit] = None

    def begin_late(self, unit: Unit) -> None:
        """A gradient has arrived at a parameter that was used outside of its unit's modules, gathered by hand."""
        forward = self.latest
        if forward is None or unit not in forward.order:
            forward = ForwardPass(unit, [unit], True)
        self.begin_backward(unit, forward, in_turn=False)

    def _join(self, backward: Backward, forward: ForwardPass) -> None:
        """The units of a forward take part: alike on all ranks, whichever of them it used here.

        Forwards are joined from the last to the first, as the engine runs: what was joined before is over, unless one ran within
        the other (units that had roots of their own at that time).
        """
        if all(other.began > forward.ended for other in backward.passes):
            self._all_over(backward)
        backward.passes.add(forward)
        if forward in backward.awaited:
            backward.awaited.remove(forward)
        part = set(forward.order)
        backward.issued -= part
        backward.late = {unit: None for unit in backward.late if unit not in part}  # their turn comes again
        for event in reversed(self.events):
            if event[0] in part:
                if not event[1]:
                    backward.places[event[0]] = len(backward.steps)
                backward.steps.append(event)
        reached = self._reached(forward)
        backward.gathers = [
            u for u, begins in reversed(self.events) if not begins and u in reached and needs_parameters(u)
        ]

    def _all_over(self, backward: Backward) -> None:
        """The forwards that were joined have nothing left to compute."""
        backward.entered, backward.moment = {}, 0
        for unit in backward.holding:
            self._reshard_behind(unit)
        backward.holding.clear()
        self._advance(backward)

    def _release_behind(self, backward: Backward) -> None:
        """Free the units whose backward is over when this one's begins.

        The engine runs operations in the reverse order of the forward. So everything has run of a unit that was entered after this
        one had been left: also what leads to its inputs only, by frozen or detached parameters, and that no gradient of its own
        tells of.
        """
        for unit in list(backward.holding):
            if backward.entered.get(unit, 0) > backward.moment:
                del backward.holding[unit]
                self._reshard_behind(unit)

    def _reshard_behind(self, unit: Unit) -> None:
        if not self.held_for_graph and unit.switches.reshard_after_backward and not unit.active and not unit.by_hand:
            unit.free()

    def _advance(self, backward: Backward, unit: Unit | None = None) -> None:
        """Take the steps up to the one at which a unit begins, or all: gather, gather ahead, reduce.

        Ranks take all steps in the same order, also those of units that they haven't used. So whatever a rank waits for comes
        before all that it hasn't begun yet, and no rank can be waiting for that before it has begun the former.
        """
        self._reduce_late(backward)
        stop = len(backward.steps) if unit is None else backward.places.get(unit, -1) + 1
        while backward.at < stop:
            one, entered = backward.steps[backward.at]
            backward.at += 1
            if not entered:
                self._gather_ahead(one, backward, one is unit)
                continue
            if one not in backward.begun:
                self._reshard_behind(one)
            if one.trainable and one not in backward.reduced:
                backward.late[one] = None
                self._reduce_late(backward)

    def _gather_ahead(self, unit: Unit, backward: Backward, waits: bool) -> None:
        if unit not in backward.gathers:
            return
        self._issue_again(unit, backward)
        if waits:
            unit.finish_gather()
        if unit.overlap:
            chosen = unit.switches.backward_prefetch
            if chosen is None:
                place = backward.gathers.index(unit)
                chosen = backward.gathers[place + 1 : place + 2]
            for one in chosen:
                self._issue_again(one, backward)

    def _gather_for_recomputation(self, unit: Unit) -> None:
        """Gather in the order of the backward, though it is a forward that runs: some ranks may not use all units."""
        backward = self.backward
        if backward is not None and unit in backward.gathers:
            for one in backward.gathers[: backward.gathers.index(unit) + 1 + unit.overlap]:
                self._issue_again(one, backward)
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
        backward.accumulates = True
        unit.close_gradients()
        if backward.at < len(backward.steps) and backward.steps[backward.at] == (unit, True):
            backward.at += 1
            backward.late[unit] = None
        self._reduce_late(backward)

    def _reduce_late(self, backward: Backward) -> None:
        """Reduce, in order, what can be: gradients of parameters are wanted, and those of the unit are complete."""
        if not backward.late or not backward.accumulates:
            return
        for unit in list(backward.late):
            if any(unit in forward.order for forward in backward.awaited):
                continue
            if unit not in backward.done:
                if unit in backward.holding or 0 < backward.entered.get(unit, 0) <= backward.moment:
                    continue  # its turn has come, but on this rank it isn't over
                unit.close_gradients()
            del backward.late[unit]
            backward.reduced.add(unit)
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
        if unit.was_zeroed:  # since the reduction was begun, or in the backward that failed before it had ended
            self.flying.remove(flight)
            unit.drop_gradients()
            return
        if not flight.across_replicas:
            for segment, _, _ in flight.parts:
                segment.drop_gradients()
            if unit.data.replica_group is not None:
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
        before, unit.partial = unit.partial, {}
        for segment, total, _ in flight.parts:  # what was frozen in between is left out
            if segment in before:
                tools.add(total, before[segment])
        if not unit.switches.all_reduce:
            unit.partial = {segment: total for segment, total, _ in flight.parts}
            self.flying.remove(flight)
            return
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
        tools = get_tools()
        if self.backward is not None and not tools.in_backward():
            self.recover()
        if self.current is not None and not tools.is_running(self.current.call):
            self.recover()
        self.wait_for_reductions()

    def _end_backward(self) -> None:
        backward = self.backward
        if backward is None:
            return
        for unit in backward.begun:
            unit.close_gradients()
            backward.accumulates = backward.accumulates or unit.arrived > 0
        backward.awaited.clear()
        self._all_over(backward)
        if not backward.accumulates:  # gradients of inputs were asked for
            for unit in backward.begun:
                unit.drop_untouched()
        self.held_for_graph = self.creates_graph
        for unit in self.units:
            if unit.state is not State.SHARDED:
                self._reshard_behind(unit)
        if all(unit.switches.last_backward for unit in self.units):
            self.wait_for_reductions()
        if not self.creates_graph:
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
        self.held_for_graph = False
        for unit in units:
            while unit.active:
                unit.deactivate()
            if not unit.by_hand:
                unit.free()


def needs_parameters(unit: Unit) -> bool:
    """Whether the backward of a unit reads its parameters: that of embeddings doesn't."""
    tools = get_tools()
    return not all(tools.is_embedding(module) for member in unit.members for module, _ in member.holders)
