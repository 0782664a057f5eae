"""What people look at: grid, picture, trace, and the recorder that gives reality the form of the prediction."""

from __future__ import annotations

import json
import re
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import pytest

from hp_core.errors import PlanError
from hp_pipeline.costs import Costs
from hp_pipeline.orders.simple import gpipe, one_f_one_b
from hp_pipeline.picture import COLORS, plot
from hp_pipeline.schedule import Schedule
from hp_pipeline.simulator import simulate
from hp_pipeline.steps import MetaStepType, parse_step
from hp_pipeline.text_grid import grid
from hp_pipeline.timeline import Event, Recorder, Timeline
from hp_pipeline.trace import to_trace, write_trace

# Each type of step at least once, though not a whole training step.
EVERYTHING = Schedule.from_text("""
schedule everything micro_batches=3 placement=0,1,1,0
0: UNSHARD0 F0.0 RESHARD0 SEND_F0.0 SWAP_OUT0.0 F0.1 SEND_F0.1 RECV_F3.0 F3.0 OVERLAP_B_F(B3.0,F0.2) SEND_B3.0 REDUCE_GRAD0
1: RECV_F1.0 F1.0 F2.0 SEND_F2.0 RECV_F1.1 F1.1 F2.1 RECV_B2.0 I2.0 W2.0 B1.0
""")
COSTS = Costs(latency=0.25, message_bytes=1, bandwidth=4, unshard=0.5, reduce=1.0, swap=0.75)


# The grid.


def test_the_grid_of_a_schedule_is_aligned_by_time() -> None:
    assert (
        grid(one_f_one_b(3, 4))
        == """\
rank 0 F0 F1 F2 .  .  .  .  B0    F3 B1    .  B2    .  B3
rank 1 .  F0 F1 .  .  B0    F2 B1    F3 B2    .  B3    .  .
rank 2 .  .  F0 B0    F1 B1    F2 B2    F3 B3    .  .  .  ."""
    )


def test_the_grid_names_stages_where_a_rank_has_several_and_shows_pairs() -> None:
    schedule = Schedule.from_text(
        "schedule own micro_batches=2 placement=0,0\n0: F0.0 F0.1 F1.0 F1.1 B1.0 OVERLAP_B_F(B1.1,F0.1) W0.0\n"
    )
    timeline = Timeline(1, tuple(Event(0, step, at, at + 1.0) for at, step in enumerate(schedule.steps[0])))
    drawn = "rank 0 F0.0      F0.1      F1.0      F1.1      B1.0      B1.1+F0.1 W0.0"
    assert grid(timeline) == drawn


def test_a_long_grid_continues_below_within_the_width() -> None:
    drawn = grid(gpipe(2, 12), width=40)
    assert max(map(len, drawn.splitlines())) <= 40
    blocks = drawn.split("\n\n")
    assert len(blocks) > 1
    starts = [float(re.match(r" +from (\d+)", block)[1]) for block in blocks]
    assert starts == [at * starts[1] for at in range(len(blocks))]
    labels = [set(re.findall(r"[FB]\d+", line)) for line in drawn.splitlines() if line.startswith("rank 1")]
    assert set().union(*labels) == {f"{kind}{batch}" for kind in "FB" for batch in range(12)}


def test_colours_change_nothing_but_colours() -> None:
    plain, colored = grid(EVERYTHING), grid(EVERYTHING, color=True)
    assert "\x1b[" in colored
    assert [line.rstrip() for line in re.sub(r"\x1b\[[\d;]*m", "", colored).splitlines()] == plain.splitlines()


def test_a_grid_shows_short_steps_of_a_recorded_timeline_and_one_without_any() -> None:
    events = (Event(0, parse_step("F0.0"), 0, 1e-9), Event(0, parse_step("B0.0"), 1.0, 2.0))
    assert "F0" in grid(Timeline(2, events), unit=0.5)
    assert grid(Timeline(2, ())) == "rank 0\nrank 1"


# The trace, checked against the rules of the Trace Event Format.


def check_trace(trace: dict) -> None:
    assert set(trace) == {"traceEvents", "displayTimeUnit"}
    assert trace["displayTimeUnit"] in ("ms", "ns")
    required = {
        "X": {"name", "cat", "pid", "tid", "ts", "dur", "args"},
        "M": {"name", "pid", "tid", "args"},
        "C": {"name", "pid", "tid", "ts", "args"},
        "s": {"name", "cat", "id", "pid", "tid", "ts"},
        "f": {"name", "cat", "id", "pid", "tid", "ts", "bp"},
    }
    threads, named, flows = defaultdict(list), set(), defaultdict(dict)
    for event in trace["traceEvents"]:
        assert set(event) - {"ph"} == required[event["ph"]]
        assert isinstance(event["pid"], int)
        assert isinstance(event["tid"], int)
        assert event.get("ts", 0) >= 0
        if event["ph"] == "X":
            assert event["dur"] >= 0
            threads[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
        elif event["ph"] == "M":
            key = "sort_index" if event["name"].endswith("sort_index") else "name"
            assert set(event["args"]) == {key}
            if event["name"] == "thread_name":
                named.add((event["pid"], event["tid"]))
        elif event["ph"] == "C":
            assert all(isinstance(value, (int, float)) for value in event["args"].values())
        else:
            flows[event["id"]][event["ph"]] = event
    assert set(threads) == named
    for spans in threads.values():  # one thread's slices don't overlap
        ordered = sorted(spans)
        assert all(before[1] <= after[0] + 1e-6 for before, after in pairwise(ordered))
    for ends in flows.values():  # an arrow begins and ends in slices, and never goes back in time
        assert set(ends) == {"s", "f"}
        assert ends["s"]["ts"] <= ends["f"]["ts"]
        for end in ends.values():
            assert any(start - 1e-6 <= end["ts"] <= stop + 1e-6 for start, stop in threads[end["pid"], end["tid"]])


def test_a_trace_keeps_the_rules_of_its_format_and_all_steps(tmp_path: Path) -> None:
    result = simulate(EVERYTHING, COSTS, posted_receives=False)
    write_trace(tmp_path / "trace.json", result, unit=0.001)
    trace = json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))
    check_trace(trace)
    slices = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    assert sorted(event["name"] for event in slices) == sorted(
        str(step) for steps in EVERYTHING.steps for step in steps
    )
    last = max(slices, key=lambda event: event["ts"] + event["dur"])
    assert last["ts"] + last["dur"] == pytest.approx(result.step_time * 1000)  # microseconds
    assert any(event["ph"] == "s" for event in trace["traceEvents"])
    assert {event["pid"] for event in trace["traceEvents"] if event["ph"] == "C"} == {0, 1}


def test_a_trace_shows_reality_beside_the_prediction() -> None:
    result = simulate(one_f_one_b(2, 3))
    at_the_same_time = Event(0, parse_step("F0.0"), 0.5, 7.0)
    real = Timeline(2, (*result.timeline.scaled(1.1).events, at_the_same_time))
    trace = to_trace(result, real)
    check_trace(trace)
    names = {event["pid"]: event["args"]["name"] for event in trace["traceEvents"] if event["name"] == "process_name"}
    assert names == {0: "rank 0 (predicted)", 1: "rank 1 (predicted)", 2: "rank 0 (real)", 3: "rank 1 (real)"}
    check_trace(to_trace(real))


# The picture.


def texts(figure: object) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def boxes(figure: object, kind: MetaStepType) -> int:
    """Boxes in the colour of a type, of each rank's first chunk."""
    from matplotlib.colors import to_rgba

    count = 0
    for collection in figure.axes[0].collections:
        if tuple(collection.get_facecolor()[0]) == to_rgba(COLORS[kind]):
            count += len(collection.get_paths())
    return count


def test_a_picture_has_a_box_for_each_computation_and_numbers_where_they_fit(tmp_path: Path) -> None:
    result = simulate(one_f_one_b(3, 4))
    figure = plot(result, path=tmp_path / "small.png")
    assert (tmp_path / "small.png").read_bytes().startswith(b"\x89PNG")
    assert boxes(figure, MetaStepType.F) == boxes(figure, MetaStepType.B) == 12
    assert sorted(texts(figure)) == sorted(str(batch) for batch in range(4) for _ in range(6))
    assert len(figure.axes) == 2
    assert [line.get_ydata().max() for line in figure.axes[1].lines] == list(result.peak_memory)
    assert "step time 18, bubble 33.3%" in figure.axes[0].get_title(loc="left")
    assert texts(plot(simulate(one_f_one_b(8, 200)))) == []


def test_a_picture_shows_collectives_copies_and_pairs(tmp_path: Path) -> None:
    figure = plot(simulate(EVERYTHING, COSTS, posted_receives=False), path=tmp_path / "all.svg")
    assert "<svg" in (tmp_path / "all.svg").read_text(encoding="utf-8")[:2000]
    for kind in (MetaStepType.UNSHARD, MetaStepType.REDUCE_GRAD, MetaStepType.SWAP_OUT):
        assert boxes(figure, kind) == 1
    legend = [text.get_text() for text in figure.legends[0].get_texts()]
    assert legend[:2] == ["forward", "backward"]
    assert "waiting for a message" in legend


def test_a_picture_draws_prediction_and_reality_together() -> None:
    result = simulate(one_f_one_b(2, 3))
    figure = plot(result, result.timeline.scaled(1.5), unit="ms")
    assert figure.axes[-1].get_xlabel() == "time, ms"
    assert boxes(figure, MetaStepType.F) == 12
    labels = [label.get_text() for label in figure.axes[0].get_yticklabels()]
    assert labels == ["rank 0 predicted", "real", "rank 1 predicted", "real"]
    assert "really 18" in figure.axes[0].get_title(loc="left")
    assert len(plot(result.timeline).axes) == 1


# The recorder.


def test_what_is_recorded_has_the_form_of_what_is_predicted() -> None:
    now = [0.0]
    recorders = [Recorder(rank, 2, clock=lambda: now[0]) for rank in range(2)]
    predicted = simulate(one_f_one_b(2, 2)).timeline
    moments = sorted(
        [(event.start, 1, event) for event in predicted.events] + [(event.end, 0, event) for event in predicted.events],
        key=lambda moment: moment[:2],
    )
    for when, begins, event in moments:
        now[0] = when
        recorder = recorders[event.rank]
        (recorder.begin if begins else recorder.end)(event.step)
    sent = [recorder.timeline().to_json() for recorder in recorders]
    merged = Timeline.merged(map(Timeline.from_json, sent))
    assert [(e.rank, e.step) for e in merged.events] == [(e.rank, e.step) for e in predicted.events]
    assert [e.start for e in merged.events] == pytest.approx([e.start for e in predicted.events], abs=1e-3)
    assert merged.busy == pytest.approx(predicted.busy, abs=1e-3)


def test_a_recorder_forgets_and_refuses_an_end_without_a_beginning() -> None:
    now = [0.0]
    recorder = Recorder(1, 2, clock=lambda: now[0])
    for now[0], call in ((0.0, recorder.begin), (2.0, recorder.begin), (3.0, recorder.end)):
        call(parse_step("F1.0"))
    (event,) = recorder.timeline().events
    assert (event.rank, str(event.step)) == (1, "F1.0")
    assert event.duration == pytest.approx(1.0, abs=1e-3)  # it began anew, after waiting
    recorder.clear()
    assert recorder.timeline() == Timeline(2, ())
    with pytest.raises(PlanError, match=r"recorder of rank 1: F1\.0 ends, but it hasn't begun"):
        recorder.end(parse_step("F1.0"))


def test_overlapping_computations_count_once_and_timelines_read_back() -> None:
    timeline = Timeline(1, (Event(0, parse_step("B0.0"), 0.0, 2.0), Event(0, parse_step("F0.1"), 0.1, 1.5)))
    assert timeline.busy == (2.0,)
    assert Timeline.from_json(timeline.to_json()) == timeline
    for text in ("", "{}", '{"ranks": 1, "events": [[0, "X", 0, 1]]}'):
        with pytest.raises(PlanError, match="timeline can't be read"):
            Timeline.from_json(text)
