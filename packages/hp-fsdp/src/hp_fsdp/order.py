"""In which order the units of a root begin and end their forwards: what all ranks gather and reduce by.

An order is a sequence of events, two for each unit, nested as their modules are. Read backwards it is the order of the
backward, in which a unit begins where its forward ended, and is over where its forward began.
"""

from __future__ import annotations

from heapq import heapify, heappop, heappush
from itertools import pairwise
from typing import Any

from hp_core.platform import get_platform
from hp_fsdp.signature import exchange
from hp_fsdp.unit import Unit

__all__ = ["Event", "agreed_order", "entries", "merged", "registered_order"]

Event = tuple[Unit, bool]
"""A unit, and whether its forward begins (or ends)."""


def entries(events: list[Event]) -> list[Unit]:
    """Units in the order in which their forwards begin."""
    return [unit for unit, begins in events if begins]


def registered_order(module: Any, units: list[Unit]) -> list[Event]:
    """The order if modules run as they are registered."""
    unit_of = {id(one): unit for unit in units for one in unit.modules}
    events: list[Event] = []
    open_: list[tuple[str, Unit]] = []
    for path, one in get_platform().modules.named_modules(module):
        unit = unit_of.get(id(one))
        if unit is not None:
            while open_ and open_[-1][0] and not path.startswith(open_[-1][0] + "."):
                events.append((open_.pop()[1], False))
            open_.append((path, unit))
            events.append((unit, True))
    events += [(unit, False) for _, unit in reversed(open_)]
    events += [(unit, begins) for unit in units if (unit, True) not in events for begins in (True, False)]
    last = {event: place for place, event in enumerate(events) if not event[1]}  # of several modules of a unit
    return list(dict.fromkeys(event for place, event in enumerate(events) if event[1] or last[event] == place))


def agreed_order(units: list[Unit], entered: dict[Unit, int], left: dict[Unit, int], known: list[Event]) -> list[Event]:
    """One order for all ranks, of a forward that has run on all of them; one small all-gather.

    Args:
        units: of the root, in an order equal on all ranks.
        entered: the moment at which each used unit's forward first began on this rank, counted from 1.
        left: the moment at which it last ended.
        known: the order so far.
    """
    row = [moments.get(unit, 0) for moments in (entered, left) for unit in units]
    sample = next((segment.chunk for unit in units for segment in unit.segments), None)
    mesh = units[0].data.mesh
    table = [row] if mesh.size() == 1 or sample is None else exchange(mesh, row, sample)
    numbers = {
        (unit, begins): place + (0 if begins else len(units))
        for place, unit in enumerate(units)
        for begins in (True, False)
    }
    seen = [[place for _, place in sorted((m, place) for place, m in enumerate(one) if m)] for one in table]
    seen += [[place, place + len(units)] for place in range(len(units))]
    order = merged(seen, [numbers[event] for event in known])
    return [(units[number % len(units)], number < len(units)) for number in order]


def merged(seen: list[list[int]], known: list[int]) -> list[int]:
    """The order of `known`, changed as far as it contradicts what was seen.

    Args:
        seen: parts of the order that each rank saw; where two contradict each other, the earlier one holds.
        known: all there is, in the order so far.
    """
    after: dict[int, set[int]] = {number: set() for number in known}
    for sequence in dict.fromkeys(map(tuple, seen)):  # most ranks saw the same
        for first, second in pairwise(sequence):
            if second not in after[first] and not _leads_to(after, second, first):
                after[first].add(second)
    waiting = dict.fromkeys(known, 0)
    for followers in after.values():
        for number in followers:
            waiting[number] += 1
    priority = {number: place for place, number in enumerate(known)}
    ready = [priority[number] for number, count in waiting.items() if not count]
    heapify(ready)
    order = []
    while ready:
        number = known[heappop(ready)]
        order.append(number)
        for follower in after[number]:
            waiting[follower] -= 1
            if not waiting[follower]:
                heappush(ready, priority[follower])
    return order


def _leads_to(after: dict[int, set[int]], first: int, second: int) -> bool:
    reached, open_ = {first}, [first]
    while open_:
        new = after[open_.pop()] - reached
        reached |= new
        open_ += new
    return second in reached
