"""Turns of a backward and a forward, in every order in which two threads can take them, and with threads."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator

import pytest

from hp_core.errors import CommTimeoutError
from hp_pipeline.overlap.coordinator import Coordinator, Released
from hp_pipeline.overlap.turns import Place, Side, Turns

B, F = Side.BACKWARD, Side.FORWARD
MOST = 6
NEVER = (B, -1)


def expected(backward: int, forward: int) -> list[tuple[Side, int]]:
    """The one order of exchanges: in turn along the shorter side, then the rest."""
    shorter = min(backward, forward)
    paired = [(side, number) for number in range(shorter) for side in (B, F)]
    longer, count = (B, backward) if backward > forward else (F, forward)
    return paired + [(longer, number) for number in range(shorter, count)]


class Rank:
    """A rank's sides, each a program of 2 + 3 n actions: begin; for each exchange depart, come back, go on; finish."""

    def __init__(
        self, counts: tuple[int, int], fails: tuple[Side, int], at: tuple[int, int] = (0, 0), turns: Turns | None = None
    ) -> None:
        self.counts, self.fails, self.at = counts, fails, at
        self.turns = turns or Turns()

    @property
    def key(self) -> tuple[object, ...]:
        return self.at, self.turns

    def length(self, side: Side) -> int:
        return 2 + 3 * self.counts[side]

    def ended(self, side: Side) -> bool:
        return self.at[side] >= self.length(side)

    @property
    def failed(self) -> bool:
        side, action = self.fails
        return 0 <= action < self.at[side]

    def begun(self, side: Side) -> int:
        """How many exchanges it has begun."""
        return min((self.at[side] + 1) // 3, self.counts[side])

    def moved(self, side: Side, turns: Turns, to: int | None = None) -> Rank:
        place = self.at[side] + 1 if to is None else to
        at = (place, self.at[1]) if side is B else (self.at[0], place)
        return Rank(self.counts, self.fails, at, turns)

    def act(self, side: Side) -> Rank | None:
        """The side's next action, if it can be done now: what `Coordinator` does between two waits."""
        turns, action = self.turns, self.at[side]
        if self.ended(side):
            return None
        if (side, action) == self.fails or self.failed:
            return self.moved(side, turns.done(side), self.length(side) + 1)  # an error, or released by the other's
        kind = "finish" if action == self.length(side) - 1 else ("go on", "depart", "come back")[action % 3]
        if kind == "finish":
            return self.moved(side, turns.done(side))
        if kind == "come back":
            return self.moved(side, turns.waiting(side))
        if kind == "go on":
            return self.moved(side, turns.computing(side)) if turns.may_compute(side) else None
        return self.moved(side, turns.exchanging(side)) if turns.may_exchange(side) else None


def check(rank: Rank) -> None:
    """What must hold of a rank at every moment."""
    places = rank.turns.places
    assert places != (Place.COMPUTES, Place.COMPUTES)
    assert places != (Place.EXCHANGES, Place.EXCHANGES)
    if not rank.failed:
        begun = rank.begun(B), rank.begun(F)
        order = expected(*rank.counts)[: sum(begun)]
        assert (sum(side is B for side, _ in order), sum(side is F for side, _ in order)) == begun


def explore(counts: tuple[int, int], fails: tuple[Side, int] = NEVER) -> int:
    """Every order of both sides' actions; how many states there are."""
    seen, waiting = set(), [Rank(counts, fails)]
    while waiting:
        rank = waiting.pop()
        if rank.key in seen:
            continue
        seen.add(rank.key)
        check(rank)
        following = [found for side in Side if (found := rank.act(side)) is not None]
        assert following or (rank.ended(B) and rank.ended(F)), f"{counts}, {fails}: stuck at {rank.key}"
        waiting += following
    return len(seen)


def test_every_order_ends_and_exchanges_come_in_one_order() -> None:
    """Nothing is stuck, one side computes at a time, one exchanges at a time, and begun exchanges are a prefix of one list."""
    states = [explore((backward, forward)) for backward in range(MOST + 1) for forward in range(MOST + 1)]
    assert min(states) > 4


def test_a_failure_anywhere_ends_both_sides() -> None:
    for backward in range(MOST + 1):
        for forward in range(MOST + 1):
            counts = backward, forward
            for side in Side:
                for action in range(2 + 3 * counts[side]):
                    explore(counts, (side, action))


def meetings(ranks: tuple[Rank, Rank]) -> Iterator[tuple[Rank, Rank]]:
    """Next states of two ranks whose exchanges are rendezvous: one ends when the other rank has begun it as well."""
    for here, rank in enumerate(ranks):
        peer = ranks[1 - here]
        for side in Side:
            comes_back = rank.at[side] % 3 == 2 and not rank.ended(side)
            if comes_back and peer.begun(side) < rank.begun(side):
                continue
            found = rank.act(side)
            if found is not None:
                yield (found, peer) if here == 0 else (peer, found)


@pytest.mark.parametrize("backward", range(4))
@pytest.mark.parametrize("forward", range(4))
def test_two_ranks_meet_in_every_exchange(backward: int, forward: int) -> None:
    """Each rank has one exchange on its way at a time: if they began in another order on one, both ranks would wait for ever."""
    counts = backward, forward
    seen, waiting = set(), [(Rank(counts, NEVER), Rank(counts, NEVER))]
    while waiting:
        ranks = waiting.pop()
        key = ranks[0].key, ranks[1].key
        if key in seen:
            continue
        seen.add(key)
        for rank in ranks:
            check(rank)
        following = list(meetings(ranks))
        assert following or all(rank.ended(side) for rank in ranks for side in Side)
        waiting += following


class Threads:
    """A coordinator's two sides on two threads, each with a number of exchanges."""

    def __init__(
        self, counts: tuple[int, int], seed: int, timeout: float = 20.0, barrier: threading.Barrier | None = None
    ):
        self.counts, self.barrier = counts, barrier
        self.coordinator = Coordinator(("the backward", "the forward"), "rank 0", timeout)
        self.log: list[tuple[Side, int]] = []
        self.computing: list[Side] = []
        self.together = False
        self.random = random.Random(seed)
        self.errors: list[BaseException | None] = [None, None]
        self.fails: tuple[Side, int] = NEVER

    def side(self, side: Side) -> None:
        coordinator = self.coordinator
        try:
            coordinator.begin(side)
            for number in range(self.counts[side]):
                self.compute(side)
                coordinator.depart(side, "the exchange")
                self.log.append((side, number))
                if self.fails == (side, number):
                    raise ValueError(f"{side.name} {number}")
                if self.barrier is not None:
                    self.barrier.wait(20)
                self.sleep()
                coordinator.resume(side)
            self.compute(side)
        except BaseException as error:
            self.errors[side] = error
            coordinator.fail(side, error)
        else:
            coordinator.finish(side)

    def compute(self, side: Side) -> None:
        self.computing.append(side)
        self.sleep()
        self.together |= len(self.computing) > 1
        self.computing.remove(side)

    def sleep(self) -> None:
        time.sleep(self.random.choice((0, 0, 1e-4, 1e-3)))

    def start(self) -> list[threading.Thread]:
        threads = [threading.Thread(target=self.side, args=(side,)) for side in Side]
        for thread in threads:
            thread.start()
        return threads

    def run(self) -> Threads:
        for thread in self.start():
            thread.join(30)
        return self


@pytest.mark.parametrize("counts", [(0, 0), (0, 3), (3, 0), (2, 2), (5, 2), (1, 4)])
def test_threads_keep_the_order(counts: tuple[int, int]) -> None:
    for seed in range(5):
        ran = Threads(counts, seed).run()
        assert ran.log == expected(*counts)
        assert not ran.together


def test_threads_of_two_ranks_meet_in_every_exchange() -> None:
    for seed in range(5):
        barrier = threading.Barrier(2)  # each exchange of a rank meets the next one of the other
        ranks = [Threads((4, 2), 2 * seed + number, barrier=barrier) for number in range(2)]
        for thread in [thread for rank in ranks for thread in rank.start()]:
            thread.join(30)
        assert ranks[0].log == ranks[1].log == expected(4, 2)


@pytest.mark.parametrize("fails", [(B, 0), (B, 2), (F, 0), (F, 1)])
def test_a_failing_side_releases_the_other(fails: tuple[Side, int]) -> None:
    ran = Threads((3, 3), 0)
    ran.fails = fails
    ran.run()
    side, _ = fails
    assert isinstance(ran.errors[side], ValueError)
    assert isinstance(ran.errors[side.other], Released)
    assert f"since the {side.name.lower()} has failed (ValueError: {side.name} " in str(ran.errors[side.other])
    assert [failed for failed, _ in ran.coordinator.failures] == [side]


def test_a_timeout_says_who_waits_where_for_whom() -> None:
    coordinator = Coordinator(("B1.0", "F0.3"), "rank 3, step OVERLAP_B_F(B1.0,F0.3)", 0.05)
    coordinator.begin(B)
    coordinator.depart(B, "the backward of the combine of layer blocks.7")
    coordinator.begin(F)
    with pytest.raises(CommTimeoutError) as caught:  # the backward doesn't come back from its exchange
        coordinator.depart(F, "the dispatch of layer blocks.2")
    assert str(caught.value).startswith(
        "rank 3, step OVERLAP_B_F(B1.0,F0.3): F0.3 waited 0.05 s at the dispatch of layer blocks.2 (its exchange 1) for B1.0, "
        "which is in the backward of the combine of layer blocks.7 (its exchange 1)."
    )


def test_a_timeout_while_the_other_computes() -> None:
    coordinator = Coordinator(("B1.0", "F0.3"), "rank 3", 0.05)
    coordinator.begin(B)
    with pytest.raises(
        CommTimeoutError, match=r"F0\.3 waited .* at its beginning for B1\.0, which computes since its beg"
    ):
        coordinator.begin(F)


def test_an_exchange_whose_end_was_not_told_is_over_at_the_next_one() -> None:
    """As in a backward that needs no gradient of the exchange's input."""
    coordinator = Coordinator(("B", "F"), "rank 0", 20)
    coordinator.begin(B)
    coordinator.depart(B, "one")

    def forward() -> None:
        coordinator.begin(F)
        coordinator.depart(F, "other")
        coordinator.resume(F)
        coordinator.finish(F)

    thread = threading.Thread(target=forward)
    thread.start()
    coordinator.depart(B, "two")
    coordinator.resume(B)
    coordinator.finish(B)
    thread.join(20)
    assert coordinator.ended == [True, True]
