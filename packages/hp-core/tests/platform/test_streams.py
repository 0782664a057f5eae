"""CPU streams behave like an accelerator's: in order, beside the caller, and only a wait makes a result safe to read.

A gate (an event that blocks the worker) decides what runs when; nothing here depends on time.
"""

from __future__ import annotations

import functools
import gc
import subprocess
import sys
import threading
import traceback
from collections.abc import Callable

import pytest
import torch

from hp_core.errors import PlatformError
from hp_core.platform.torch.streams import CpuEvent, CpuStream, HostStream, copy_async, current_stream


@pytest.fixture
def gate() -> threading.Event:
    return threading.Event()


def gated(gate: threading.Event) -> CpuStream:
    """A stream whose worker is known to stand at the gate."""
    stream, arrived = CpuStream(), threading.Event()

    def stand() -> None:
        arrived.set()
        assert gate.wait(30)

    stream.submit(stand)
    assert arrived.wait(30)
    return stream


def fail() -> None:
    raise KeyError("deep inside")


def test_work_runs_in_order_on_one_thread_that_is_not_the_callers() -> None:
    stream, seen, threads = CpuStream("swap"), [], set()

    def work(number: int) -> None:
        seen.append(number)
        threads.add(threading.current_thread().name)

    for number in range(100):
        stream.submit(functools.partial(work, number))
    stream.synchronize()
    assert seen == list(range(100))
    assert threads == {"swap"}


def test_the_caller_does_not_wait_and_an_event_tells_when_the_work_is_done(gate: threading.Event) -> None:
    stream = gated(gate)
    event = stream.record_event()
    assert not event.query()
    assert not stream.query()
    gate.set()
    event.synchronize()
    assert event.query()
    stream.synchronize()
    assert stream.query()


def test_a_forgotten_wait_reads_stale_data(gate: threading.Event) -> None:
    target, source = torch.zeros(4), torch.ones(4)
    stream = gated(gate)
    done = copy_async(target, source, stream)
    assert target.tolist() == [0, 0, 0, 0]
    gate.set()
    done.wait()
    assert target.tolist() == [1, 1, 1, 1]


def test_a_source_changed_too_early_is_copied_as_changed(gate: threading.Event) -> None:
    target, source = torch.zeros(1), torch.ones(1)
    stream = gated(gate)
    done = copy_async(target, source, stream)
    source.fill_(2)
    gate.set()
    done.synchronize()
    assert target.item() == 2


def test_a_stream_waits_for_anothers_event_without_blocking_the_caller(gate: threading.Event) -> None:
    producer, consumer, bystander = gated(gate), CpuStream(), CpuStream()
    value, copied = torch.zeros(1), torch.full((1,), -1.0)
    producer.submit(lambda: value.fill_(5))
    reached = CpuEvent()
    reached.record(consumer)
    consumer.wait_event(producer.record_event())
    done = copy_async(copied, value, consumer)
    reached.synchronize()
    bystander.submit(lambda: None)
    bystander.synchronize()
    assert not done.query()
    gate.set()
    done.synchronize()
    assert copied.item() == 5


def test_wait_stream_waits_for_what_is_queued_so_far(gate: threading.Event) -> None:
    producer, consumer = gated(gate), CpuStream()
    value, copied = torch.zeros(1), torch.zeros(1)
    producer.submit(lambda: value.fill_(5))
    consumer.wait_stream(producer)
    done = copy_async(copied, value, consumer)
    gate.set()
    done.synchronize()
    assert copied.item() == 5


def test_an_event_never_recorded_counts_as_passed() -> None:
    event, stream = CpuEvent(), CpuStream()
    assert event.query()
    event.synchronize()
    stream.wait_event(event)
    stream.synchronize()


def test_recording_again_moves_the_event_but_not_those_who_already_wait(gate: threading.Event) -> None:
    early, late = CpuStream(), gated(gate)
    waiter, event = CpuStream(), CpuEvent()
    event.record(early)
    waiter.wait_event(event)
    event.record(late)
    waiter.synchronize()  # would hang at the gate if it waited for the second record
    assert not event.query()
    gate.set()
    event.synchronize()


def test_the_calling_thread_is_the_current_stream_unless_another_is_entered() -> None:
    host, outer, inner = current_stream(), CpuStream(), CpuStream()
    assert isinstance(host, HostStream)
    with outer:
        assert current_stream() is outer
        with inner:
            assert current_stream() is inner
        assert current_stream() is outer
        elsewhere: list[object] = []
        thread = threading.Thread(target=lambda: elsewhere.append(current_stream()))
        thread.start()
        thread.join()
        assert isinstance(elsewhere[0], HostStream)
    assert current_stream() is host


def test_copies_and_events_use_the_current_stream(gate: threading.Event) -> None:
    stream = gated(gate)
    target = torch.zeros(1)
    with stream:
        event = CpuEvent()
        event.record()
        done = copy_async(target, torch.ones(1))
    assert not event.query()
    assert not done.query()
    gate.set()
    done.synchronize()
    assert target.item() == 1


def test_the_host_stream_runs_at_once_and_blocks_at_a_wait(gate: threading.Event) -> None:
    host, stream = current_stream(), gated(gate)
    seen: list[int] = []
    host.submit(lambda: seen.append(1))
    assert seen == [1]
    assert host.record_event().query()
    assert host.query()
    host.synchronize()
    stream.submit(lambda: seen.append(2))
    event = stream.record_event()
    gate.set()
    host.wait_event(event)
    assert seen == [1, 2]
    stream.submit(lambda: seen.append(3))
    host.wait_stream(stream)
    assert seen == [1, 2, 3]


def test_work_has_the_gradient_mode_of_who_queued_it() -> None:
    stream, seen = CpuStream(), []
    with torch.no_grad():
        stream.submit(lambda: seen.append(torch.is_grad_enabled()))
    stream.submit(lambda: seen.append(torch.is_grad_enabled()))
    stream.synchronize()
    assert seen == [False, True]


def test_a_copy_converts_and_records_no_gradient() -> None:
    target, source = torch.zeros(2, dtype=torch.float64, requires_grad=True), torch.ones(2, requires_grad=True)
    copy_async(target, source, CpuStream()).synchronize()
    assert target.tolist() == [1, 1]
    assert target.is_leaf


def test_a_copy_of_another_shape_is_refused_before_it_is_queued() -> None:
    stream = CpuStream()
    with pytest.raises(PlatformError, match=r"shape \(1,\) doesn't fit a target of shape \(4,\)"):
        copy_async(torch.zeros(4), torch.ones(1), stream)
    stream.synchronize()


def test_an_exception_is_raised_at_synchronize_with_its_own_traceback_and_only_once() -> None:
    stream = CpuStream()
    stream.submit(fail)
    with pytest.raises(KeyError, match="deep inside") as caught:
        stream.synchronize()
    assert "fail" in [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    stream.synchronize()


def test_work_behind_an_exception_is_skipped_until_it_has_been_raised(gate: threading.Event) -> None:
    stream, seen = gated(gate), []
    stream.submit(fail)
    stream.submit(lambda: seen.append("skipped"))
    gate.set()
    with pytest.raises(KeyError):
        stream.synchronize()
    stream.submit(lambda: seen.append("done"))
    stream.synchronize()
    assert seen == ["done"]


def test_the_next_submit_raises_an_exception_that_has_happened() -> None:
    stream, seen = CpuStream(), []
    stream.submit(fail)
    event = stream.record_event()
    while not event.query():
        pass
    with pytest.raises(KeyError):
        stream.submit(lambda: seen.append("not queued"))
    stream.synchronize()
    assert seen == []


def test_events_raise_an_exception_before_them_each_time_and_none_behind_them() -> None:
    stream = CpuStream()
    before = stream.record_event()
    stream.submit(fail)
    behind = stream.record_event()
    before.synchronize()
    for wait in (behind.synchronize, behind.wait):
        with pytest.raises(KeyError):
            wait()
    assert behind.query()
    with pytest.raises(KeyError):
        stream.synchronize()


def test_an_exception_reaches_the_streams_that_depend_on_it() -> None:
    producer, consumer, seen = CpuStream(), CpuStream(), []
    producer.submit(fail)
    consumer.wait_event(producer.record_event())
    consumer.submit(lambda: seen.append("would use what doesn't exist"))
    with pytest.raises(KeyError):
        consumer.synchronize()
    assert seen == []


@pytest.mark.parametrize("look", [lambda stream: None, lambda stream: stream.record_event().query()])
def test_an_exception_nobody_has_seen_is_reported_when_the_stream_ends(
    monkeypatch: pytest.MonkeyPatch, look: Callable[[CpuStream], object]
) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    stream = CpuStream("forgotten")
    stream.submit(fail)
    look(stream)
    thread = thread_of("forgotten")
    del stream
    gc.collect()
    thread.join(30)
    assert [str(one.exc_value) for one in reported] == ["'deep inside'"]


def test_an_exception_that_has_been_seen_is_not_reported_again(monkeypatch: pytest.MonkeyPatch) -> None:
    reported: list[threading.ExceptHookArgs] = []
    monkeypatch.setattr(threading, "excepthook", reported.append)
    stream = CpuStream("seen")
    stream.submit(fail)
    with pytest.raises(KeyError):
        stream.record_event().synchronize()
    thread = thread_of("seen")
    del stream
    gc.collect()
    thread.join(30)
    assert reported == []


def test_the_thread_ends_with_the_stream_and_after_its_work(gate: threading.Event) -> None:
    stream, seen = gated(gate), []
    stream.submit(lambda: seen.append("done"))
    thread = thread_of(stream.name)
    del stream
    gc.collect()
    gate.set()
    thread.join(30)
    assert not thread.is_alive()
    assert seen == ["done"]


def test_a_stream_without_work_has_no_thread() -> None:
    stream = CpuStream("idle")
    assert stream.query()
    assert "idle" not in [thread.name for thread in threading.enumerate()]
    assert repr(stream) == "CpuStream('idle')"


def test_work_queued_at_exit_is_done_and_its_exception_is_shown() -> None:
    script = (
        "from hp_core.platform.torch.streams import CpuStream\n"
        "one, other = CpuStream(), CpuStream()\n"
        "one.submit(lambda: print('done at exit', flush=True))\n"
        "other.submit(lambda: 1 / 0)\n"
    )
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=True)
    assert ran.stdout == "done at exit\n"
    assert "ZeroDivisionError" in ran.stderr


def thread_of(name: str) -> threading.Thread:
    (thread,) = (thread for thread in threading.enumerate() if thread.name == name)
    return thread


def test_the_platform_gives_streams_that_run_beside_the_caller() -> None:
    from hp_core.platform import get_platform

    stream, gate, done = get_platform().new_stream(), threading.Event(), []
    stream.submit(lambda: (gate.wait(10), done.append(1)))
    event = stream.record_event()
    assert not event.query()
    gate.set()
    event.synchronize()
    assert done == [1]
