"""What `run_ranks` says of ranks that raise, hang or die, and that the next call is not touched by it.

Every failure names its rank and shows a traceback, a stack or an exit code, together with what the rank printed.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
import threading

import pytest
import torch
import torch.distributed

from hp_core.errors import LayoutError
from hp_core.testing import RankFailure, RankTimeout, assert_same_error, run_ranks
from hp_core.testing.stacks import readable_stacks


class Unpicklable(Exception):
    def __init__(self, shape: tuple[int, ...], axis: str) -> None:
        super().__init__(f"{shape} on {axis}")


def process_id() -> int:
    return os.getpid()


def rank() -> int:
    return int(os.environ["RANK"])


def total() -> float:
    tensor = torch.ones(1)
    torch.distributed.all_reduce(tensor)
    return float(tensor)


def refuse() -> None:
    raise LayoutError(f"rank {rank()}: dim 0 of size 3")


def test_an_exception_is_shown_with_its_rank_traceback_and_output() -> None:
    def fail_on_one() -> None:
        print("last words")
        print("to stderr", file=sys.stderr)
        if rank() == 1:
            raise LayoutError("axis 'tp' twice")

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, fail_on_one, init=False)
    text = str(caught.value)
    assert "fail_on_one: 1 of 2 ranks failed" in text
    assert "rank 1 was first: LayoutError: axis 'tp' twice" in text
    assert "rank 0 returned" in text
    assert "rank 1 raised hp_core.errors.LayoutError\nTraceback" in text
    assert f"{os.path.basename(__file__)}" in text
    assert "raise LayoutError(\"axis 'tp' twice\")" in text
    assert "[stdout]\nlast words" in text
    assert "[stderr]\nto stderr" in text
    assert isinstance(caught.value.__cause__, LayoutError)
    assert isinstance(caught.value, AssertionError)


def test_ranks_that_fail_with_the_same_words_are_shown_once() -> None:
    def fail() -> None:
        raise ValueError("all of them")

    with pytest.raises(RankFailure, match="ranks 0, 1, 2, 3 raised ValueError") as caught:
        run_ranks(4, fail, init=False)
    assert str(caught.value).count("Traceback") == 1
    assert sorted(caught.value.exceptions) == [0, 1, 2, 3]


def test_chained_exceptions_are_shown() -> None:
    def fail() -> None:
        try:
            raise KeyError("inner")
        except KeyError as error:
            raise ValueError("outer") from error

    with pytest.raises(RankFailure, match=r"(?s)KeyError: 'inner'.*direct cause.*ValueError: outer"):
        run_ranks(1, fail, init=False)


def test_an_exception_that_cannot_be_pickled_is_still_shown() -> None:
    def fail() -> None:
        raise Unpicklable((2, 3), "tp")

    with pytest.raises(RankFailure, match=r"Unpicklable: \(2, 3\) on tp") as caught:
        run_ranks(1, fail, init=False)
    assert caught.value.exceptions == {}
    assert caught.value.__cause__ is None


def test_a_result_that_cannot_be_pickled_is_a_failure_of_its_rank() -> None:
    with pytest.raises(RankFailure, match=r"(?s)rank 0 raised TypeError.*generator"):
        run_ranks(1, lambda: (x for x in range(3)), init=False)


def test_leaving_the_interpreter_is_an_exception_like_others() -> None:
    with pytest.raises(RankFailure, match="SystemExit: 3"):
        run_ranks(1, sys.exit, 3, init=False)


def test_an_exception_alike_on_all_ranks_keeps_the_processes_but_not_the_group() -> None:
    def half_done() -> None:
        torch.spoilt_group = torch.distributed.group.WORLD  # type: ignore[attr-defined]
        raise LayoutError("alike")

    def look() -> tuple[int, bool, float]:
        return os.getpid(), torch.spoilt_group is torch.distributed.group.WORLD, total()  # type: ignore[attr-defined]

    before = run_ranks(2, process_id)
    assert_same_error(2, half_done, LayoutError)
    assert run_ranks(2, look) == [(process, False, 2.0) for process in before]


def test_ranks_that_end_in_different_ways_are_replaced() -> None:
    def fail_on_one() -> None:
        if rank() == 1:
            raise ValueError

    before = run_ranks(2, process_id, init=False)
    with pytest.raises(RankFailure):
        run_ranks(2, fail_on_one, init=False)
    assert not set(before) & set(run_ranks(2, process_id, init=False))


def test_a_peer_left_in_a_collective_is_shown_with_its_stack_and_ended() -> None:
    def leave_the_others() -> None:
        if rank() == 1:
            raise ValueError("before the collective")
        total()

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, leave_the_others, timeout=60)
    text = str(caught.value)
    assert not isinstance(caught.value, RankTimeout)
    assert "rank 1 was first: ValueError: before the collective" in text
    assert "rank 0 still waiting after a peer had failed" in text
    assert "in all_reduce" in text
    assert "in leave_the_others" in text
    assert run_ranks(2, total) == [2.0, 2.0]


def test_a_hang_ends_with_the_stacks_of_all_threads_of_the_ranks_that_hang() -> None:
    def wait_in_a_thread(gate: threading.Event) -> None:
        gate.wait()

    def hang() -> None:
        print("about to hang")
        if rank() == 0:
            return
        gate = threading.Event()
        threading.Thread(target=wait_in_a_thread, args=(gate,), daemon=True).start()
        gate.wait()

    with pytest.raises(RankTimeout) as caught:
        run_ranks(3, hang, timeout=1.0, init=False)
    text = str(caught.value)
    assert "hang: 2 of 3 ranks failed after" in text
    assert "ranks 1, 2 hadn't ended when the time ran out" in text
    assert "rank 0 returned" in text
    assert "ranks 1, 2 not ended in time" in text
    assert "in hang" in text
    assert "in wait_in_a_thread" in text
    assert "[stdout]\nabout to hang" in text
    assert "worker.py" not in text
    assert len(set(run_ranks(3, process_id, init=False))) == 3


@pytest.mark.parametrize(
    ("how", "words"),
    [
        (lambda: os._exit(7), "died: exit code 7"),
        (lambda: os.kill(os.getpid(), signal.SIGKILL), "died: killed by signal SIGKILL"),
        (lambda: ctypes.string_at(0), "died: killed by signal SIGSEGV"),
    ],
    ids=["exit", "killed", "segfault"],
)
def test_a_death_is_shown_with_its_code_and_last_words(how: object, words: str) -> None:
    def die() -> None:
        print("last words", file=sys.stderr)
        if rank() == 1:
            how()  # type: ignore[operator]

    with pytest.raises(RankFailure) as caught:
        run_ranks(2, die, init=False)
    text = str(caught.value)
    assert f"rank 1 was first: {words.removeprefix('died: ')}" in text
    assert f"rank 1 {words}" in text
    assert "[stderr]\nlast words" in text
    assert ("Segmentation fault" in text) == ("SIGSEGV" in words)
    assert len(set(run_ranks(2, process_id, init=False))) == 2


def test_long_output_is_cut_at_its_start() -> None:
    def talk() -> None:
        print("first", "x" * 20_000, "last")
        raise ValueError

    with pytest.raises(RankFailure, match=r"(?s)\[\.\.\. 200\d\d characters\].*x last") as caught:
        run_ranks(1, talk, init=False)
    assert "first x" not in str(caught.value)


def test_output_of_an_earlier_call_is_not_shown() -> None:
    def fail() -> None:
        raise ValueError

    run_ranks(1, print, "an earlier call", init=False)
    with pytest.raises(RankFailure) as caught:
        run_ranks(1, fail, init=False)
    assert "an earlier call" not in str(caught.value)


def test_an_interrupt_of_the_caller_leaves_no_busy_rank() -> None:
    def hang() -> None:
        signal.pause()

    before = run_ranks(1, process_id, init=False)
    # A job in the background inherits that SIGINT is ignored; at a terminal it isn't.
    inherited = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        interrupt = threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT))
        interrupt.start()
        with pytest.raises(KeyboardInterrupt):
            run_ranks(1, hang, init=False)
    finally:
        signal.signal(signal.SIGINT, inherited)
    assert run_ranks(1, process_id, init=False) != before


def test_the_same_error_returns_the_messages_by_rank() -> None:
    messages = assert_same_error(2, refuse, LayoutError, r"rank \d: dim 0 of size 3", init=False)
    assert messages == ["rank 0: dim 0 of size 3", "rank 1: dim 0 of size 3"]


def test_the_same_error_may_be_any_of_several_types_and_need_not_be_picklable() -> None:
    def fail() -> None:
        raise Unpicklable((2,), "dp")

    assert assert_same_error(1, fail, (KeyError, Unpicklable), "dp", init=False) == ["(2,) on dp"]
    assert assert_same_error(1, refuse, ValueError, init=False) == ["rank 0: dim 0 of size 3"]


def test_the_same_error_refuses_what_is_not_the_same() -> None:
    def different() -> None:
        raise (LayoutError if rank() == 0 else ValueError)("no")

    with pytest.raises(AssertionError, match="all 2 ranks returned, but LayoutError was expected"):
        assert_same_error(2, rank, LayoutError, init=False)
    with pytest.raises(AssertionError, match="on rank 0 doesn't match 'size 4'"):
        assert_same_error(2, refuse, LayoutError, "size 4", init=False)
    with pytest.raises(RankFailure, match="KeyError was expected on all 2 ranks"):
        assert_same_error(2, refuse, KeyError, init=False)
    with pytest.raises(RankFailure, match="ValueError was expected on all 2 ranks"):
        assert_same_error(2, different, ValueError, init=False)


def test_a_dump_of_another_form_is_shown_as_it_is() -> None:
    assert readable_stacks("(the process wrote no stack)") == "(the process wrote no stack)"
