"""What each rank sends and keeps when rows change hands, worked out for all ranks in one process and walked through."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh
from hp_core.placement import RaggedShard
from hp_core.platform import Group
from hp_core.platform.protocol import Run
from hp_core.rules.exchange import Source, Target, recut_of_members, sliced

Rows = list[int]


def positions(runs: tuple[Run, ...] | list[Run]) -> Rows:
    """The rows that runs stand for, one by one."""
    return [start + step * i for start, step, count in runs for i in range(count)]


@st.composite
def runs_within(draw: st.DrawFn, total: int) -> tuple[Run, ...]:
    """A few runs, forward or backward, within `total` rows."""
    found = []
    for _ in range(draw(st.integers(0, 3))):
        if total:
            start = draw(st.integers(0, total - 1))
            step = draw(st.sampled_from([1, 1, 2, 3, -1, -2]))
            room = (total - 1 - start) // step if step > 0 else start // -step
            found.append((start, step, draw(st.integers(1, room + 1))))
    return tuple(found)


@st.composite
def exchanges(draw: st.DrawFn) -> tuple[int, list[Source], list[Target]]:
    """Sources and targets on a 1-D or 2-D mesh, whose rows are cut by all of its axes."""
    shape = draw(st.sampled_from([(1,), (2,), (3,), (4,), (2, 2), (2, 3)]))
    mesh = DeviceMesh(shape, ("a", "b")[: len(shape)])
    axes = ("a", "b")[: len(shape)]
    order = tuple(reversed(axes)) if draw(st.booleans()) else axes
    even = Layout.from_device_mesh(mesh)(order)
    layouts = (
        [even, Layout.from_device_mesh(mesh)(RaggedShard((1, 0, 2, 1)[: shape[0]]))] if len(shape) == 1 else [even]
    )
    sources = []
    for _ in range(draw(st.integers(1, 3))):
        layout = draw(st.sampled_from(layouts))
        unit = sum(layout.ragged) if layout.ragged else 1
        sources.append(Source(layout, (draw(st.integers(0, 4)) * unit,), 0))
    total = sum(source.shape[0] for source in sources)
    targets = []
    for _ in range(draw(st.integers(1, 3))):
        runs = draw(runs_within(total))
        targets.append(Target(even, (len(positions(runs)),), 0, runs))
    return len(mesh.rank_list), sources, targets


@settings(max_examples=300)
@given(exchanges())
def test_rows_arrive_where_they_belong(case: tuple[int, list[Source], list[Target]]) -> None:
    ranks, sources, targets = case
    group = Group(tuple(range(ranks)))
    held: list[Rows] = []
    for rank in range(ranks):
        rows: Rows = []
        offset = 0
        for source in sources:
            start, stop = source.layout.bounds(source.shape, rank)[0]
            rows += range(offset + start, offset + stop)
            offset += source.shape[0]
        held.append(rows)
    plans = [recut_of_members(group, rank, sources, targets) for rank in range(ranks)]
    for rank, plan in enumerate(plans):
        expected: Rows = []
        for target in targets:
            start, stop = target.layout.bounds(target.shape, rank)[0]
            expected += positions(target.runs)[start:stop]
        result = [-1] * plan.length
        for sender, other in enumerate(plans):
            sent = [[held[sender][row] for row in positions([run])] for run in other.sends[rank]]
            places = plan.receives[sender]
            assert [len(rows) for rows in sent] == [count for _, count in places]
            for rows, (first, count) in zip(sent, places, strict=True):
                result[first : first + count] = rows
        assert result == expected
        assert plan.moves is any(any(p.sends[m]) for r, p in enumerate(plans) for m in range(ranks) if m != r)


@given(st.data())
def test_an_interval_of_runs(data: st.DataObject) -> None:
    runs = data.draw(runs_within(12))
    rows = positions(runs)
    low = data.draw(st.integers(0, len(rows)))
    high = data.draw(st.integers(low, len(rows)))
    assert positions(sliced(runs, (low, high))) == rows[low:high]
