"""`deterministic`: what it sets and gives back, what contradicts it, and when it comes too late."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from hp_core import PlatformError, deterministic
from hp_core.platform.determinism import VARIABLE
from hp_core.testing import assert_same_error, run_ranks

NAMES = ("HCCL_DETERMINISTIC", "LCCL_DETERMINISTIC", "CUBLAS_WORKSPACE_CONFIG")


@pytest.fixture(autouse=True)
def clean(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for name in (*NAMES, VARIABLE):
        monkeypatch.delenv(name, raising=False)
    yield
    deterministic(0)


def switches() -> tuple[Any, ...]:
    import torch.utils.deterministic as fills

    cudnn = torch.backends.cudnn
    return torch.get_deterministic_debug_mode(), fills.fill_uninitialized_memory, cudnn.deterministic, cudnn.benchmark


def variables() -> tuple[str | None, ...]:
    return tuple(os.environ.get(name) for name in NAMES)


@pytest.mark.parametrize(
    ("level", "expected", "hccl"),
    [
        (1, (1, False, True, False), "true"),
        (2, (2, True, True, False), "true"),
        (3, (2, True, True, False), "strict"),
    ],
)
def test_a_level_is_set_told_and_restored(
    level: int, expected: tuple[Any, ...], hccl: str, caplog: pytest.LogCaptureFixture
) -> None:
    before = switches()
    torch.backends.cudnn.benchmark = True
    with caplog.at_level(logging.INFO, "hp_core"), deterministic(level) as found:
        assert switches() == expected
        assert variables() == (hccl, "1", ":4096:8")
        assert found.level == level
        assert f"HCCL_DETERMINISTIC = {hccl}  (was not set)" in str(found)
        assert "torch.backends.cudnn.benchmark = False  (was True)" in caplog.text
    assert variables() == (None, None, None)
    assert switches() == (*before[:3], True)
    torch.backends.cudnn.benchmark = before[3]


def test_an_op_that_has_no_deterministic_algorithm_is_an_error_from_level_2() -> None:
    target, index = torch.zeros(3), torch.tensor([0, 0])
    with deterministic(2), pytest.raises(RuntimeError, match="does not have a deterministic implementation"):
        target.put_(index, torch.ones(2))
    with deterministic(1), pytest.warns(UserWarning, match="does not have a deterministic implementation"):
        target.put_(index, torch.ones(2))


def test_values_that_will_do_stay() -> None:
    os.environ.update(HCCL_DETERMINISTIC="strict", CUBLAS_WORKSPACE_CONFIG=":16:8")
    found = deterministic(1)
    assert variables() == ("strict", "1", ":16:8")
    assert [one.name for one in found.settings if one.changed and one.name in NAMES] == ["LCCL_DETERMINISTIC"]
    found.restore()
    assert variables() == ("strict", None, ":16:8")


def test_levels_may_follow_each_other_and_0_takes_all_back() -> None:
    deterministic(3)
    deterministic(1)
    assert variables()[0] == "strict"
    assert switches()[0] == 1
    with deterministic(2):
        assert switches()[0] == 2
    assert switches()[0] == 1
    deterministic(0)
    assert variables() == (None, None, None)
    assert switches()[0] == 0


@pytest.mark.parametrize(
    ("environment", "level", "said"),
    [
        ({"HCCL_DETERMINISTIC": "false"}, 1, "needs HCCL_DETERMINISTIC=true or strict, but the environment says"),
        ({"HCCL_DETERMINISTIC": "true"}, 3, "`export HCCL_DETERMINISTIC=strict`"),
        ({"CUBLAS_WORKSPACE_CONFIG": ":0:0"}, 2, "`unset CUBLAS_WORKSPACE_CONFIG`"),
        ({VARIABLE: "2"}, 1, f"contradicts {VARIABLE}=2"),
        ({VARIABLE: "1"}, 0, f"contradicts {VARIABLE}=1"),
        ({VARIABLE: "yes"}, 1, "'yes' is none of the levels 0, 1, 2, 3"),
        ({}, 4, "there is no such level"),
    ],
)
def test_contradictions_are_refused_and_nothing_is_changed(
    environment: dict[str, str], level: int, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    before = switches(), variables()
    with pytest.raises(PlatformError) as error:
        deterministic(level)
    assert said in str(error.value)
    assert (switches(), variables()) == before
    monkeypatch.delenv(VARIABLE, raising=False)


def test_after_the_world_exists_it_is_too_late_on_all_ranks_alike() -> None:
    def late() -> None:
        deterministic(1)

    message, *others = assert_same_error(2, late, PlatformError)
    assert (
        "the process world exists (init_process_group() was called), which has read HCCL_DETERMINISTIC as not"
        in message
    )
    assert "export HYPER_PARALLEL_DETERMINISTIC=1" in message
    assert others == [message]


def test_before_the_world_exists_it_is_in_time_and_may_be_said_again_after(tmp_path: Path) -> None:
    def train(meeting: str) -> list[float]:
        import hp_core

        with deterministic(2):
            hp_core.init_process_group("gloo", init_method=f"file://{meeting}")
            deterministic(2)
            mesh = hp_core.init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
            x = hp_core.distribute_tensor(torch.arange(6.0), mesh, [hp_core.Shard(0)])
            return x.cumsum(0).full_tensor().tolist()  # type: ignore[no-any-return]

    assert run_ranks(2, train, str(tmp_path / "meeting"), init=False) == [[0.0, 1.0, 3.0, 6.0, 10.0, 15.0]] * 2


def test_after_cuda_has_started_the_workspace_of_cublas_cannot_be_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    with pytest.raises(
        PlatformError, match="CUDA has been initialised, which has read CUBLAS_WORKSPACE_CONFIG as not set"
    ):
        deterministic(1)
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    deterministic(1)
    assert switches()[0] == 1


def test_the_environment_alone_asks_for_it() -> None:
    script = (
        "import hp_core, torch, os; hp_core.get_platform(); "
        "print(torch.get_deterministic_debug_mode(), os.environ['HCCL_DETERMINISTIC'])"
    )
    environment = {**os.environ, VARIABLE: "1"}
    done = subprocess.run([sys.executable, "-c", script], env=environment, capture_output=True, text=True, timeout=120)
    assert done.stdout.split() == ["1", "true"], done.stderr
