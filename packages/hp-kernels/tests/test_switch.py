"""With, without and against the native kernels: the switch, what `build_info` says, processes that fork, and hp_core's use."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

import hp_kernels
from hp_core.errors import PlatformError
from hp_core.kernels import philox_filler
from hp_core.platform.torch.tensors import TorchTensorTools
from hp_core.random import get_rng_state, manual_seed, random_like, random_mask, set_rng_state
from hp_kernels.loading import reload, require_native


@pytest.fixture
def core(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """hp_core asks for the kernels anew, here and afterwards."""
    philox_filler.cache_clear()
    yield monkeypatch
    philox_filler.cache_clear()


class Held:
    """As a flat layout: what a rank holds of the global tensor are several boxes."""

    shape = (6, 5, 7)

    def boxes(self, _: tuple[int, ...]) -> tuple[Any, ...]:
        return ((0, 1), (3, 5), (2, 7)), ((1, 4), (0, 5), (0, 7)), ((4, 5), (0, 1), (0, 3))


def draws() -> list[torch.Tensor]:
    """Random tensors of every element type, and a mask."""
    manual_seed(7)
    layout: Any = Held()
    found = [
        random_like(torch.empty(118, dtype=dtype), layout, Held.shape, kind)
        for dtype in (torch.float32, torch.float64, torch.float16, torch.bfloat16)
        for kind in ("uniform", "normal")
    ]
    # of one of the very numbers that decide: this element is kept
    p = uniform_of_the_mask(layout)[5].item()
    mask = random_mask(torch.empty(118, dtype=torch.bool), layout, Held.shape, p)
    assert mask[5]
    return [*found, mask]


def uniform_of_the_mask(layout: Any) -> torch.Tensor:
    """The numbers that the next mask is made of."""
    state = get_rng_state()
    numbers = random_like(torch.empty(118), layout, Held.shape, "uniform")
    set_rng_state(state)
    return numbers


def test_hp_core_draws_the_same_with_and_without(core: pytest.MonkeyPatch) -> None:
    assert philox_filler() is not None
    native = draws()
    state = get_rng_state()
    core.setenv("HP_KERNELS", "off")
    reload()
    philox_filler.cache_clear()
    assert philox_filler() is None
    for with_kernels, without in zip(native, draws(), strict=True):
        assert torch.equal(with_kernels, without)
    assert get_rng_state() == state


def test_hp_core_draws_the_same_where_nothing_is_installed(core: pytest.MonkeyPatch) -> None:
    native = draws()
    for name in [name for name in sys.modules if name.partition(".")[0] == "hp_kernels"]:
        core.delitem(sys.modules, name)
    core.setitem(sys.modules, "hp_kernels", None)
    philox_filler.cache_clear()
    with pytest.raises(PlatformError, match="pip install hp-kernels"):
        draws()
    core.setenv("HP_KERNELS", "auto")
    for with_kernels, without in zip(native, draws(), strict=True):
        assert torch.equal(with_kernels, without)


def test_tensors_that_no_kernel_may_touch(core: pytest.MonkeyPatch) -> None:
    """They are filled portably: hp_core asks the platform for their memory, and gets none."""
    tools = TorchTensorTools("cpu")
    assert tools.memory(torch.empty(4)) is not None
    assert tools.memory(torch.empty(4, 4).t()) is None
    assert tools.memory(torch.empty(4, device="meta")) is None
    assert tools.memory(torch.eye(3).to_sparse()) is None
    with FakeTensorMode():
        assert tools.memory(torch.empty(4)) is None
    address, held, name = tools.memory(torch.empty(10, dtype=torch.float64)[3:]) or (0, 0, "")
    assert (held, name, address % 8) == (56, "float64", 0)


def test_the_switch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hp_kernels.build_info()["native"] is True
    monkeypatch.setenv("HP_KERNELS", "off")
    reload()
    info = hp_kernels.build_info()
    assert info["native"] is False
    assert info["left_out"]["native"] == "HP_KERNELS=off"
    with pytest.raises(ImportError, match="HP_KERNELS=off"):
        require_native()
    monkeypatch.setenv("HP_KERNELS", "maybe")
    reload()
    with pytest.raises(ImportError, match="must be auto, on or off"):
        hp_kernels.native()


def test_what_was_built_is_said() -> None:
    info = hp_kernels.build_info()
    assert info["compiler"].startswith(("gcc", "clang"))
    assert "-ffp-contract=off" in info["flags"]
    assert info["threads"] >= 1
    assert info["processor"]


def run(code: str, **environment: str) -> str:
    """What a fresh interpreter prints."""
    path = os.pathsep.join(sys.path)
    completed = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": path, **environment},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert completed.returncode == 0, completed.stderr
    return completed.stdout.strip()


def test_importing_loads_no_framework() -> None:
    code = (
        "import sys, hp_kernels; a = sorted(sys.modules); hp_kernels.native(); "
        "print('hp_kernels._native' in a, any(name in sys.modules for name in ('torch', 'mindspore', 'numpy')))"
    )
    assert run(code) == "False False"


@pytest.mark.parametrize(
    ("environment", "count"),
    [
        ({"HP_KERNELS_THREADS": "3", "OMP_NUM_THREADS": "1"}, 3),
        ({"HP_KERNELS_THREADS": "many", "OMP_NUM_THREADS": "2"}, 2),
        ({"OMP_NUM_THREADS": "", "LOCAL_WORLD_SIZE": "100000"}, 1),
    ],
)
def test_number_of_threads(environment: dict[str, str], count: int) -> None:
    code = "import hp_kernels; print(hp_kernels.native().thread_count())"
    assert run(code, **{"HP_KERNELS_THREADS": "", **environment}) == str(count)


def numbers() -> torch.Tensor:
    filled = torch.empty(400_000)
    hp_kernels.fill_random(filled, "uniform", (400_000,), [(0, 400_000)], 1, 2)
    return filled


def test_a_forked_process_starts_threads_of_its_own() -> None:
    """As a data loader's workers do, while the parent's threads wait for work, or do some."""
    require_native().set_thread_count(4)
    expected = numbers()
    stop = threading.Event()

    def keep_busy() -> None:
        while not stop.is_set():
            numbers()

    busy = threading.Thread(target=keep_busy)
    busy.start()
    try:
        for _ in range(3):
            child = os.fork()
            if child == 0:
                found = numbers()
                threads = len(os.listdir("/proc/self/task"))
                os._exit(0 if threads > 1 and torch.equal(found, expected) else 1)
            assert os.waitpid(child, 0)[1] == 0
    finally:
        stop.set()
        busy.join()
    assert torch.equal(numbers(), expected)


def test_threads_that_call_at_once() -> None:
    """One has the workers, the others go on alone."""
    require_native().set_thread_count(3)
    expected = numbers()
    found: list[torch.Tensor] = []
    callers = [threading.Thread(target=lambda: found.append(numbers())) for _ in range(6)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert len(found) == 6
    assert all(torch.equal(one, expected) for one in found)
