"""The buffer planner: what every plan must keep, how far from the optimum it is at most, and what it refuses."""

from __future__ import annotations

import math
from itertools import pairwise, permutations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.errors import PlanError
from hp_fsdp import packing
from hp_fsdp.packing import least_chunk
from hp_fsdp.plan import BufferPlan, Item, granule_of, plan_buffer

checked = settings(deadline=None, derandomize=True, max_examples=300)


@st.composite
def units(draw: st.DrawFn, most: int = 12) -> list[Item]:
    shapes = st.tuples(st.integers(0, 9), st.integers(1, 9))
    granularities = st.one_of(st.sampled_from(["element", "row", "whole"]), st.integers(1, 4))
    drawn = draw(st.lists(st.tuples(shapes, granularities), max_size=most))
    return [
        Item(f"w{i}", shape[0] * shape[1], granule_of(granularity, shape))
        for i, (shape, granularity) in enumerate(drawn)
    ]


def plan(items: list[Item], ranks: int, align: int = 1) -> BufferPlan:
    return plan_buffer(items, ranks, align, max_padding=math.inf)


def keeps_granules(items: list[Item], offsets: tuple[int, ...], chunk: int) -> bool:
    """Whether every border inside an item is a multiple of its granule from its start."""
    return all(
        (border - offset) % item.granule == 0
        for item, offset in zip(items, offsets, strict=True)
        for border in range((offset // chunk + 1) * chunk, offset + item.numel, chunk)
    )


@checked
@given(units(), st.integers(1, 9), st.integers(1, 8))
def test_every_plan_keeps_what_was_asked(items: list[Item], ranks: int, align: int) -> None:
    got = plan(items, ranks, align)
    assert got.chunk > 0
    assert got.chunk % align == 0
    assert got.numels == tuple(item.numel for item in items)
    assert got.padding == ranks * got.chunk - sum(got.numels)
    places = sorted(
        (offset, offset + item.numel) for offset, item in zip(got.offsets, items, strict=True) if item.numel
    )
    assert all(before[1] <= after[0] for before, after in pairwise(places)), "items overlap"
    assert all(start >= 0 and stop <= ranks * got.chunk for start, stop in places)
    assert keeps_granules(items, got.offsets, got.chunk)


@checked
@given(units(), st.integers(1, 9), st.integers(1, 8))
def test_intervals_partition_each_item(items: list[Item], ranks: int, align: int) -> None:
    got = plan(items, ranks, align)
    for index, item in enumerate(items):
        intervals = [got.interval(index, rank) for rank in range(ranks)]
        assert [element for start, stop in intervals for element in range(start, stop)] == list(range(item.numel))
        for rank, (start, stop) in enumerate(intervals):
            if stop > start:
                first = got.offsets[index] + start
                assert rank * got.chunk <= first
                assert first + stop - start <= (rank + 1) * got.chunk


@checked
@given(units(), st.integers(1, 9))
def test_equal_arguments_give_equal_plans(items: list[Item], ranks: int) -> None:
    assert plan(items, ranks) == plan(list(items), ranks)


@checked
@given(st.lists(st.integers(0, 50), min_size=1, max_size=12), st.integers(1, 9), st.integers(1, 8))
def test_items_cut_anywhere_keep_their_order_and_pad_only_the_end(numels: list[int], ranks: int, align: int) -> None:
    got = plan([Item(f"w{i}", numel) for i, numel in enumerate(numels)], ranks, align)
    assert got.chunk == -(-max(sum(numels), 1) // (ranks * align)) * align
    starts = [sum(numels[:i]) for i in range(len(numels))]
    assert all(offset == start for offset, start, numel in zip(got.offsets, starts, numels, strict=True) if numel)


def optimal_chunk(items: list[Item], ranks: int, align: int) -> int:
    """The smallest chunk there is: for every order of the items, each at its first legal place."""
    chunk = -(-least_chunk([i.numel for i in items], [min(i.granule, i.numel) for i in items], ranks) // align) * align
    while True:
        for order in permutations(items):
            end = 0
            for item in order:
                while end <= ranks * chunk - item.numel and not keeps_granules([item], (end,), chunk):
                    end += 1
                end += item.numel
                if end > ranks * chunk:
                    break
            else:
                return chunk
        chunk += align


@settings(checked, max_examples=150)
@given(units(most=5), st.integers(1, 5), st.sampled_from([1, 2, 4]))
def test_chunks_are_at_most_half_more_than_the_optimum(items: list[Item], ranks: int, align: int) -> None:
    items = [item for item in items if item.numel]
    got = plan(items, ranks, align).chunk
    best = optimal_chunk(items, ranks, align)
    assert best <= got <= 1.5 * best


# -- shapes of real models --------------------------------------------------------------------------------------------

LLAMA = {
    "q": (4096, 4096),
    "k": (1024, 4096),
    "v": (1024, 4096),
    "o": (4096, 4096),
    "gate": (14336, 4096),
    "up": (14336, 4096),
    "down": (4096, 14336),
    "norm1": (4096,),
    "norm2": (4096,),
}


def unit(shapes: dict[str, tuple[int, ...]], granularity: str | int) -> list[Item]:
    return [
        Item(name, math.prod(shape), granule_of(granularity if len(shape) > 1 else "element", shape))
        for name, shape in shapes.items()
    ]


@pytest.mark.parametrize("ranks", [2, 8, 64, 1024])
@pytest.mark.parametrize(("granularity", "most"), [("element", 0.0001), ("row", 0.08)])
def test_a_block_of_a_language_model_pads_little(granularity: str, most: float, ranks: int) -> None:
    items = unit(LLAMA, granularity)
    got = plan_buffer(items, ranks, 16)
    assert got.padding <= most * sum(got.numels)


def test_whole_matrices_are_spread_over_the_ranks() -> None:
    """Longest first, each to the rank with least: seven matrices on eight ranks are on seven of them."""
    items = unit(LLAMA, "whole")
    got = plan_buffer(items, 8, 16)
    assert got.chunk == 14336 * 4096
    assert len({got.offsets[i] // got.chunk for i in range(7)}) == 7
    assert plan_buffer(items, 4, 16).chunk == 14336 * 4096


def test_five_hundred_items_on_a_thousand_ranks_take_few_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """A trial is at most a few passes over the items."""
    trials = []
    pack = packing._Packing.pack
    monkeypatch.setattr(packing._Packing, "pack", lambda self, chunk: trials.append(chunk) or pack(self, chunk))
    for rows in ((64, 100, 333, 1024), range(1, 1024)):
        items = [Item(f"w{i}", (i % 97 + 1) * rows[i % len(rows)], rows[i % len(rows)]) for i in range(500)]
        plan_buffer(items, 1024, 16, max_padding=math.inf)
        assert 1 < len(trials) <= 150
        trials.clear()


# -- refusals and words -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("granularity", "shape", "granule"),
    [
        ("element", (4, 3), 1),
        ("row", (4, 3), 3),
        ("row", (4, 3, 2), 6),
        ("row", (4,), 1),
        ("row", (), 1),
        ("row", (0, 3), 1),
        (2, (4, 3), 6),
        (9, (4, 3), 12),
        ("whole", (4, 3), 12),
        ("whole", (), 1),
        ("whole", (0, 3), 1),
    ],
)
def test_granules(granularity: str | int, shape: tuple[int, ...], granule: int) -> None:
    assert granule_of(granularity, shape) == granule


@pytest.mark.parametrize("granularity", ["rows", 0, -2, True, 1.5, None])
def test_other_granularities_are_refused(granularity: object) -> None:
    with pytest.raises(PlanError, match=r"'w' \(shape \(4, 3\)\): give 'element', 'row'"):
        granule_of(granularity, (4, 3), "w")  # type: ignore[arg-type]


def test_too_much_padding_is_refused_with_its_cost_and_a_remedy() -> None:
    items = unit(LLAMA, "whole")
    with pytest.raises(PlanError) as error:
        plan_buffer(items, 64, 16)
    text = str(error.value)
    padding = 64 * 14336 * 4096 - sum(item.numel for item in items)
    for part in ("64 ranks", f"{padding:,}", "1623%", "'gate'", "'element'", "max_padding=16.24"):
        assert part in text, text
    assert plan_buffer(items, 64, 16, max_padding=16.24).padding == padding


def test_the_cheaper_choice_named_by_the_refusal_is_accepted() -> None:
    items = unit(LLAMA, "whole")
    with pytest.raises(PlanError, match=r"'gate' and 4 others with large pieces \(padding 23.1%\)"):
        plan_buffer(items, 64, 16)
    freed = [item if item.numel < 4096 * 4096 else Item(item.name, item.numel) for item in items]
    got = plan_buffer(freed, 64, 16)
    assert round(100 * got.padding / sum(got.numels), 1) == 23.1


def test_small_units_and_whole_matrices_on_a_few_ranks_are_never_refused() -> None:
    assert plan_buffer([Item("w", 64, 64)], 1024).padding == 64 * 1023
    assert plan_buffer([Item("w", 1 << 22, 1 << 22)], 4).padding == 3 << 22
    with pytest.raises(PlanError):
        plan_buffer([Item("w", 1 << 22, 1 << 22)], 8)
    with pytest.raises(PlanError):
        plan_buffer([Item("w", 64, 64)], 1024, max_padding=10)


@pytest.mark.parametrize(("ranks", "align", "most"), [(0, 1, None), (2, 0, None), (2, 1, -1.0), (2, 1, math.nan)])
def test_senseless_numbers_are_refused(ranks: int, align: int, most: float | None) -> None:
    with pytest.raises(PlanError, match="must be >="):
        plan_buffer([Item("w", 4)], ranks, align, max_padding=most)


@pytest.mark.parametrize("item", [Item("w", -1), Item("w", 4, 0)])
def test_senseless_items_are_refused(item: Item) -> None:
    with pytest.raises(PlanError, match="'w'"):
        plan_buffer([item], 2)


def test_a_plan_describes_itself() -> None:
    text = plan_buffer([Item("weight", 12, 12), Item("bias", 4)], 2, 2).describe(itemsize=4)
    assert text.splitlines() == [
        "2 chunks of 12 elements (48 bytes), padding 8 elements (32 bytes, 50.0% of the items)",
        "  weight  [0, 12)  rank 0",
        "  bias    [12, 16)  rank 1",
    ]


def test_a_unit_without_elements_has_a_plan() -> None:
    got = plan_buffer([Item("w", 0)], 4, 8)
    assert (got.chunk, got.interval(0, 3)) == (8, (0, 0))
    assert "no rank" in got.describe()
    assert plan_buffer([], 4).chunk == 1
