"""Randomness on MindSpore: the bits of the torch platform, for every layout."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Any

import pytest

from hp_core.testing import run_ranks

_DRAW = """
import hashlib, importlib, sys
from hp_core import DeviceMesh, manual_seed, rand, randn
from hp_core.platform import get_platform
tensors = get_platform().tensors
mesh = DeviceMesh((1,), ("one",))
manual_seed(1234567890123)
for draw in (rand, randn):
    for name in ("float32", "float64", "float16", "bfloat16"):
        local = draw(37, 11, dtype=tensors.dtype_of_name(name), device_mesh=mesh).to_local()
        wide = tensors.cast(local, tensors.dtype_of_name("float64"))
        array = wide if hasattr(wide, "tobytes") else wide.numpy()
        print(hashlib.sha256(array.tobytes()).hexdigest())
"""


def _digests(platform: str) -> list[str]:
    environment = dict(os.environ, HYPER_PARALLEL_PLATFORM=platform, PYTHONPATH=os.pathsep.join(sys.path))
    done = subprocess.run(
        [sys.executable, "-c", _DRAW], env=environment, capture_output=True, text=True, timeout=120, check=False
    )
    assert not done.returncode, done.stderr
    return [line for line in done.stdout.split() if len(line) == 64]


def test_both_platforms_draw_the_same_bits() -> None:
    ours, torchs = _digests("mindspore"), _digests("torch")
    assert len(ours) == 8
    assert len(set(ours)) == 8
    assert ours == torchs


def _draw_everywhere(shape: tuple[int, ...]) -> list[Any]:
    import numpy as np

    from hp_core import DeviceMesh, Partial, Replicate, Shard, init_device_mesh, manual_seed, randn
    from hp_core.process_group import get_rank

    alone = DeviceMesh((1,), ("one",), rank_list=[get_rank()])
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    manual_seed(5)
    wanted = randn(*shape, device_mesh=alone).to_local().asnumpy()
    same = []
    for placements in ([Replicate(), Replicate()], [Shard(0), Shard(1)], [Shard(1), Shard(1)], [Partial(), Shard(0)]):
        manual_seed(5)
        drawn = randn(*shape, device_mesh=mesh, placements=placements)
        same.append(bool(np.array_equal(drawn.full_tensor().asnumpy(), wanted)))
    return same


def test_values_depend_on_no_layout() -> None:
    assert run_ranks(4, _draw_everywhere, (5, 7)) == [[True] * 4] * 4


def _drop() -> Any:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, mint, ops

    from hp_core import DTensor, Replicate, Shard, init_device_mesh, manual_seed

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank("tp")
    found = []
    for function in (lambda x: mint.nn.functional.dropout(x, 0.25), lambda x: ops.dropout(x, 0.25)):
        values = []
        for placement in (Replicate(), Shard(0)):
            whole = np.ones((8, 16), np.float32)
            local = whole if isinstance(placement, Replicate) else np.split(whole, 2)[rank]
            manual_seed(3)
            x = DTensor.from_local(Tensor(local.copy()), mesh, [placement])
            values.append(function(x).full_tensor().asnumpy())
        found.append((np.array_equal(*values), float((values[0] == 0).mean()), float(values[0].max())))
    assert ms.float32
    return found


def test_dropout_drops_the_same_elements_in_every_layout() -> None:
    for result in run_ranks(2, _drop):
        for alike, share, scale in result:
            assert alike
            assert 0.1 < share < 0.4
            assert scale == pytest.approx(4 / 3)


def _dropout_after_a_seed() -> int:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, ops

    from hp_core import DTensor, Shard, dispatch_cache_info, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = DTensor.from_local(Tensor(np.ones((2, 4), np.float32)), mesh, [Shard(0)])
    ms.set_seed(7)  # MindSpore then gives every call of dropout a seed of its own
    ops.dropout(x, 0.5)
    before = dispatch_cache_info().misses
    for _ in range(3):
        ops.dropout(x, 0.5)
    return dispatch_cache_info().misses - before


def test_mindspores_own_seed_makes_no_call_a_new_kind() -> None:
    assert run_ranks(2, _dropout_after_a_seed) == [0, 0]
