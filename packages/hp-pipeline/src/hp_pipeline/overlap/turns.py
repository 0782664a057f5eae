"""Whose turn it is when a backward and a forward share a rank: a value, and the few ways in which it may change.

One side computes, the other one exchanges or waits. So nothing but an exchange ever runs beside a computation, and the order
of everything else is one and the same on all ranks: it follows from how many exchanges each side has, not from any clock.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum

__all__ = ["Place", "Side", "Turns"]


class Side(IntEnum):
    """The two that take turns. The value is its position in pairs."""

    BACKWARD = 0
    FORWARD = 1

    @property
    def other(self) -> Side:
        """Its peer."""
        return Side(1 - self)


class Place(Enum):
    """Where a side is."""

    WAITS = "waits"
    """Before its beginning, or after an exchange: it goes on when it is its turn."""
    COMPUTES = "computes"
    EXCHANGES = "exchanges"
    DONE = "done"


@dataclass(frozen=True, slots=True)
class Turns:
    """Where both sides are, and whose turn it is.

    A side that begins an exchange gives the turn away, once the other has come back from its own: then the other computes
    while this one exchanges. So exchanges alternate (the backward's first, the forward's first, the backward's second, ...)
    until a side is done; the other one keeps the turn from then on and runs free.

    Attributes:
        turn: whose it is. That side computes, or is about to.
        places: of both sides.
    """

    turn: Side = Side.BACKWARD  # its first exchange comes early, so that the forward's first computation hides it
    places: tuple[Place, Place] = (Place.WAITS, Place.WAITS)

    def place(self, side: Side) -> Place:
        """Where a side is."""
        return self.places[side]

    def may_compute(self, side: Side) -> bool:
        """Whether a side that waits may go on."""
        return self.turn is side

    def computing(self, side: Side) -> Turns:
        """It goes on."""
        return self._moved(side, Place.COMPUTES, self.turn)

    def may_exchange(self, side: Side) -> bool:
        """Whether a side that computes may begin an exchange: not before the other has come back from its own."""
        return self.turn is side and self.place(side.other) in (Place.WAITS, Place.DONE)

    def exchanging(self, side: Side) -> Turns:
        """It begins an exchange, and gives the turn away if there is someone to take it."""
        alone = self.place(side.other) is Place.DONE
        return self._moved(side, Place.EXCHANGES, side if alone else side.other)

    def waiting(self, side: Side) -> Turns:
        """Its exchange is over."""
        return self._moved(side, Place.WAITS, self.turn)

    def done(self, side: Side) -> Turns:
        """It is done: the turn is the other's for good."""
        return self._moved(side, Place.DONE, side.other)

    def _moved(self, side: Side, place: Place, turn: Side) -> Turns:
        places = (place, self.places[1]) if side is Side.BACKWARD else (self.places[0], place)
        return Turns(turn, places)
