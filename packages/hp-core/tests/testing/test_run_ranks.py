"""What `run_ranks` promises of a call that goes well.

Results come back in the order of ranks, processes and the process group are kept between calls, and a call leaves
nothing behind in the next one.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
import torch.distributed

from hp_core.testing import close_ranks, run_ranks

FACTOR = 3


@dataclass(frozen=True)
class Point:
    x: int


def rank_and_size() -> tuple[int, int]:
    return torch.distributed.get_rank(), torch.distributed.get_world_size()


def process_id() -> int:
    return os.getpid()


def summed(value: float) -> torch.Tensor:
    tensor = torch.full((2,), value)
    torch.distributed.all_reduce(tensor)
    return tensor


def test_each_rank_gets_its_rank_and_the_world_size() -> None:
    for world_size in (1, 2, 4, 2):
        assert run_ranks(world_size, rank_and_size) == [(rank, world_size) for rank in range(world_size)]


def test_tensors_come_back_from_a_collective() -> None:
    results = run_ranks(4, summed, 2.0)
    assert [result.tolist() for result in results] == [[8.0, 8.0]] * 4


def test_positional_and_keyword_arguments_arrive() -> None:
    def join(*args: int, **kwargs: int) -> tuple[tuple[int, ...], dict[str, int]]:
        return args, kwargs

    assert run_ranks(2, join, 1, 2, three=3) == [((1, 2), {"three": 3})] * 2


def test_closures_lambdas_and_partials_arrive_with_what_they_refer_to() -> None:
    offset = 5
    assert run_ranks(1, lambda x: FACTOR * x + offset, 2) == [11]
    assert run_ranks(1, functools.partial(lambda x, y: (x, y), 1), 2) == [(1, 2)]


def test_a_class_of_a_test_module_is_the_same_class_when_it_comes_back() -> None:
    assert run_ranks(1, lambda point: Point(point.x + 1), Point(1)) == [Point(2)]


def test_a_function_of_a_package_meets_the_state_of_its_package() -> None:
    from hp_core.process_group import get_rank

    assert run_ranks(2, get_rank) == [0, 1]


def test_processes_are_kept_between_calls_and_world_sizes() -> None:
    four = run_ranks(4, process_id)
    assert os.getpid() not in four
    assert len(set(four)) == 4
    assert run_ranks(2, process_id) == four[:2]
    assert run_ranks(4, process_id) == four


def test_the_group_is_kept_between_calls_of_one_world_size() -> None:
    def same_as_before() -> bool:
        before, torch.group_of_an_earlier_call = (  # type: ignore[attr-defined]
            getattr(torch, "group_of_an_earlier_call", None),
            torch.distributed.group.WORLD,
        )
        return before is torch.distributed.group.WORLD

    run_ranks(4, process_id)
    assert run_ranks(2, same_as_before) == [False, False]
    assert run_ranks(2, same_as_before) == [True, True]
    run_ranks(4, process_id)
    assert run_ranks(2, same_as_before) == [False, False]


def test_a_group_that_the_function_destroys_is_made_anew() -> None:
    def destroy() -> None:
        from hp_core.process_group import destroy_process_group

        destroy_process_group()

    run_ranks(2, destroy)
    assert [result.tolist() for result in run_ranks(2, summed, 1.0)] == [[2.0, 2.0]] * 2


def test_without_init_there_is_no_group_but_a_launcher_environment() -> None:
    def look() -> tuple[bool, str, str]:
        return torch.distributed.is_initialized(), os.environ["RANK"], os.environ["WORLD_SIZE"]

    run_ranks(2, rank_and_size)
    assert run_ranks(2, look, init=False) == [(False, "0", "2"), (False, "1", "2")]


def test_a_group_that_the_function_makes_is_gone_in_the_next_call(tmp_path: Path) -> None:
    def meet(file: str) -> int:
        from hp_core.process_group import init_process_group

        rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        init_process_group("gloo", init_method=file, world_size=world_size, rank=rank)
        return int(summed(1.0)[0])

    assert run_ranks(2, meet, (tmp_path / "meeting").as_uri(), init=False) == [2, 2]
    assert run_ranks(2, torch.distributed.is_initialized, init=False) == [False, False]


def test_environment_folder_and_import_path_are_restored(tmp_path: Path) -> None:
    def change(folder: str) -> None:
        os.environ["SET_BY_AN_EARLIER_CALL"] = "1"
        os.chdir(folder)
        sys.path.insert(0, folder)

    def look() -> tuple[str | None, str, list[str]]:
        return os.environ.get("SET_BY_AN_EARLIER_CALL"), os.getcwd(), sys.path

    run_ranks(1, change, str(tmp_path))
    assert run_ranks(1, look) == [(None, os.getcwd(), sys.path)]


def test_a_rank_computes_on_one_thread() -> None:
    assert run_ranks(2, torch.get_num_threads) == [1, 1]


def test_a_world_without_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="world_size=0"):
        run_ranks(0, process_id)


def test_what_cannot_be_sent_is_refused_before_any_rank_runs() -> None:
    generator = (x for x in range(3))
    with pytest.raises(TypeError, match=r"can't be sent to the ranks: .*generator.*inside the function"):
        run_ranks(1, lambda: next(generator))


def test_closing_ends_the_processes_and_the_next_call_starts_new_ones() -> None:
    before = run_ranks(1, process_id, init=False)
    close_ranks()
    assert not Path(f"/proc/{before[0]}").exists()
    assert run_ranks(1, process_id, init=False) != before


SCRIPT = """
import os, signal, sys
from hp_core.testing import run_ranks

def process_id():
    return os.getpid()

if __name__ == "__main__":
    print(*run_ranks(2, process_id, init=False), flush=True)
    if sys.argv[1] == "killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if sys.argv[1] == "killed while a rank hangs":
        import threading
        threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGKILL)).start()
        run_ranks(2, signal.pause, init=False)
"""


@pytest.mark.parametrize("end", ["normal", "killed", "killed while a rank hangs"])
def test_ranks_of_a_plain_script_end_with_it(tmp_path: Path, end: str) -> None:
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path))
    # A file, not a pipe: reading a pipe would wait for the ranks to close it, and prove the end by hanging.
    with (tmp_path / "out").open("w") as out:
        done = subprocess.run([sys.executable, str(script), end], stdout=out, env=environment, timeout=60, check=False)
    assert (done.returncode == 0) == (end == "normal")
    ranks = [int(word) for word in (tmp_path / "out").read_text().split()]
    assert len(ranks) == 2
    for _ in range(100):
        if not any(_runs(rank) for rank in ranks):
            break
        time.sleep(0.05)
    assert not any(_runs(rank) for rank in ranks)


def _runs(process: int) -> bool:
    try:
        # An orphan whose new parent never collects it stays a zombie, which runs no more.
        return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
