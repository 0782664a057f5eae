"""The kernels on MindSpore's CPU tensors: natively, by the NumPy twins, and as the op that its CustomOpBuilder compiles here."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import mindspore as ms
import numpy as np
import pytest

from hp_core.kernels import philox_filler
from hp_core.platform import get_platform
from hp_core.random import manual_seed, random_like
from hp_kernels import KernelArgumentError, build_info, cast_into, fill_random, pack, pack_into, unpack, unpack_into
from hp_kernels.build import BuildError
from hp_kernels.loading import reload
from hp_kernels.platform.mindspore import building

DTYPES = [ms.float32, ms.float64, ms.float16, ms.bfloat16]


@pytest.fixture(params=["native", "portable"], autouse=True)
def which_kernels(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    monkeypatch.setenv("HP_KERNELS", "on" if request.param == "native" else "off")
    monkeypatch.setenv("HP_KERNELS_MINDSPORE", "off")
    reload()
    philox_filler.cache_clear()
    building._loaded.clear()
    yield request.param
    monkeypatch.undo()
    reload()
    philox_filler.cache_clear()
    building._loaded.clear()


def tensors() -> list[ms.Tensor]:
    draw = np.random.default_rng(3)
    return [
        ms.Tensor(draw.standard_normal((3, 4)).astype(np.float32)),
        ms.Tensor(draw.standard_normal(5)),
        ms.Tensor(np.array([1e-8, 70000.0, np.inf, -np.inf, 1 + 2**-9], np.float32)),
    ]


@pytest.mark.parametrize("dtype", DTYPES)
def test_pack_equals_mindspores_own_casts(dtype: object) -> None:
    parts = tensors()
    flat = pack(parts, dtype)
    expected = [part.astype(ms.float32).astype(dtype) if dtype in DTYPES[2:] else part.astype(dtype) for part in parts]
    assert flat.dtype == dtype
    found = flat.astype(ms.float64).asnumpy()
    assert np.array_equal(found, np.concatenate([one.astype(ms.float64).asnumpy().ravel() for one in expected]))
    for part, back in zip(parts, unpack(flat, parts), strict=True):
        assert (back.dtype, back.shape) == (part.dtype, part.shape)


def test_gradients() -> None:
    first, second = tensors()[:2]

    def squares(one: ms.Tensor, other: ms.Tensor) -> ms.Tensor:
        flat = pack([one, other], ms.float32)
        again, _ = unpack(flat, [one, other])
        return (flat * flat).sum() + again.sum()

    of_first, of_second = ms.grad(squares, (0, 1))(first, second)
    assert of_first.dtype == ms.float32
    assert of_second.dtype == ms.float64
    assert np.allclose(of_first.asnumpy(), 2 * first.asnumpy() + 1)
    assert np.allclose(of_second.asnumpy(), 2 * second.asnumpy().astype(np.float32))


def test_places_and_casts() -> None:
    flat = ms.Tensor(np.full(30, 9.0, np.float32))
    first, second = tensors()[:2]
    pack_into(flat, [first, second], [10, 2])
    assert np.array_equal(flat.asnumpy()[10:22], first.asnumpy().ravel())
    assert np.array_equal(flat.asnumpy()[2:7], second.asnumpy().astype(np.float32))
    assert (np.delete(flat.asnumpy(), [*range(2, 7), *range(10, 22)]) == 9).all()
    back = ms.Tensor(np.zeros((3, 4), np.float16))
    unpack_into([back], flat, [10])
    assert np.array_equal(back.asnumpy(), first.asnumpy().astype(np.float16))
    cast_into([back], [first])
    assert np.array_equal(back.asnumpy(), first.asnumpy().astype(np.float16))


def test_mistakes() -> None:
    flat = ms.Tensor(np.zeros(8, np.float32))
    three, integers = ms.Tensor(np.zeros(3, np.float32)), ms.Tensor(np.zeros(3, np.int32))
    for mistake in (
        lambda: pack([], ms.float32),
        lambda: pack([integers], ms.float32),
        lambda: unpack(flat, [three]),
        lambda: pack_into(flat, [three], [6]),
        lambda: pack_into(flat, [three, three], [0, 2]),
        lambda: pack_into(flat, [flat], [0]),
        lambda: unpack_into([three, three], flat, [0, 3]),
        lambda: cast_into([flat], [three]),
        lambda: fill_random(flat, "poisson", (8,), [(0, 8)], 1, 2),
    ):
        with pytest.raises(KernelArgumentError):
            mistake()


class Held:
    """Stands for a layout: what a rank holds of the global tensor are two boxes."""

    def boxes(self, _: object) -> object:
        return ((0, 1), (3, 5)), ((2, 6), (0, 5))


@pytest.mark.parametrize("dtype", DTYPES)
def test_hp_core_draws_the_same_with_and_without(dtype: object, monkeypatch: pytest.MonkeyPatch) -> None:
    def draw(kind: str) -> np.ndarray:
        empty = get_platform().tensors.full((22,), None, dtype, "cpu")
        manual_seed(11)
        return random_like(empty, Held(), (6, 5), kind).astype(ms.float64).asnumpy()

    found = [draw("uniform"), draw("normal")]
    monkeypatch.setenv("HP_KERNELS", "off")
    reload()
    philox_filler.cache_clear()
    for kernels, portable in zip(found, [draw("uniform"), draw("normal")], strict=True):
        assert np.array_equal(kernels, portable)


# What the island does, in a process of its own.
ISLAND = """
import numpy as np, mindspore as ms
from hp_kernels import pack, build_info
from hp_kernels.platform.mindspore.building import island
assert island() is not None
one = ms.Tensor(np.arange(12, dtype=np.float32).reshape(3, 4) / 7)
other = ms.Tensor(np.arange(5) / 3.0)
for dtype, numpy in ((ms.float32, np.float32), (ms.float64, np.float64), (ms.float16, np.float16)):
    flat = pack([one.T, other, one[1:]], dtype)
    expected = np.concatenate([a.ravel() for a in (one.asnumpy().T, other.asnumpy(), one.asnumpy()[1:])])
    assert flat.dtype == dtype
    wanted = [a.astype(np.float32) if numpy == np.float16 else a for a in (one.asnumpy().T, other.asnumpy(), one.asnumpy()[1:])]
    assert np.array_equal(flat.asnumpy(), np.concatenate([a.ravel().astype(numpy) for a in wanted]))
gradient = ms.grad(lambda x: (pack([x, other], ms.float32) * 3).sum())(one)
assert np.array_equal(gradient.asnumpy(), np.full((3, 4), 3, np.float32))
assert "mindspore" not in build_info()["left_out"]
print("the island works")
"""


@pytest.mark.timeout(900)  # it compiles
def test_the_island_is_built_and_runs_here(tmp_path: Path, which_kernels: str) -> None:
    if which_kernels == "portable":
        assert "HP_KERNELS=off" in build_info()["left_out"]["native"]
        return
    environment = {**os.environ, "HP_KERNELS_HOME": str(tmp_path), "HP_KERNELS_MINDSPORE": "on"}
    environment["PYTHONPATH"] = os.pathsep.join(sys.path)
    build = [sys.executable, "-m", "hp_kernels.build", "mindspore"]
    completed = subprocess.run(build, env=environment, capture_output=True, text=True, check=False)
    assert completed.returncode == 0, completed.stderr
    completed = subprocess.run(
        [sys.executable, "-c", ISLAND], env=environment, capture_output=True, text=True, check=False
    )
    assert "the island works" in completed.stdout, completed.stderr


def test_what_keeps_an_island_from_being_built(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("ASCEND_HOME_PATH", "ASCEND_OPP_PATH"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(building.shutil, "which", lambda name: f"/usr/bin/{name}")
    with pytest.raises(BuildError, match=r"ASCEND_HOME_PATH is not set.*source"):
        building.build_island("Ascend")
    monkeypatch.setattr(building.ms, "__version__", "2.7.1")
    with pytest.raises(BuildError, match=r"2\.8 or newer.*pip install"):
        building.build_island()
