"""`shard_module` and `custom_shard` on MindSpore: a plan of layouts for a cell, and functions of local tensors."""

from __future__ import annotations

from typing import Any

import pytest

from hp_core import Shard
from hp_core.testing import run_ranks


def _sharded_cell() -> Any:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn

    from hp_core import DTensor, Replicate, init_device_mesh, shard_module

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    ms.set_seed(3)
    dense, sharded = nn.Dense(6, 4), nn.Dense(6, 4)
    for own, other in zip(dense.get_parameters(), sharded.get_parameters(), strict=True):
        other.set_data(Tensor(own.asnumpy().copy()))
    shard_module(sharded, mesh, {"weight": [Shard(0)], "bias": [Shard(0)]})
    values = np.random.default_rng(1).normal(size=(3, 6)).astype(np.float32)

    def loss(cell: Any, x: Any) -> Any:
        total = (cell(x) ** 2).sum()
        return total.full_tensor() if isinstance(total, DTensor) else total

    x = DTensor.from_local(Tensor(values), mesh, [Replicate()])
    found = ms.value_and_grad(lambda: loss(sharded, x), None, weights=sharded.trainable_params())()
    wanted = ms.value_and_grad(lambda: loss(dense, Tensor(values)), None, weights=dense.trainable_params())()
    rank = mesh.get_local_rank("tp")
    errors = [
        float(np.abs(g.asnumpy() - np.split(w.asnumpy(), 2)[rank]).max())
        for g, w in zip(found[1], wanted[1], strict=True)
    ]
    return float(found[0].asnumpy()), float(wanted[0].asnumpy()), errors, sharded.weight.placements


def test_a_cell_sharded_by_a_plan_equals_dense() -> None:
    for value, wanted, errors, placements in run_ranks(2, _sharded_cell):
        assert value == pytest.approx(wanted, rel=1e-5)
        assert max(errors) < 1e-4
        assert placements == (Shard(0),)


def _custom() -> Any:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor

    from hp_core import DTensor, Replicate, custom_shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank("tp")
    whole = np.arange(15, dtype=np.float32).reshape(5, 3)
    scale = np.array([1.0, 2.0, 3.0], np.float32)
    part = whole[:3] if rank == 0 else whole[3:]

    @custom_shard(mesh=mesh, out_placements=[Shard(0)], in_placements=([Shard(0)], [Replicate()]))
    def scaled(x: Any, weight: Any) -> Any:
        return x * weight

    def loss(x: Any, weight: Any) -> Any:
        y = scaled(
            DTensor.from_local(x, mesh, [Shard(0)], shape=(5, 3)), DTensor.from_local(weight, mesh, [Replicate()])
        )
        assert tuple(y.shape) == (5, 3)
        return (y * y).sum().full_tensor()

    gradients = ms.grad(loss, (0, 1))(Tensor(part.copy()), Tensor(scale))
    own, of_weight = 2 * part * scale**2, (2 * whole**2 * scale).sum(0)
    return [bool(np.allclose(g.asnumpy(), w, rtol=1e-5)) for g, w in zip(gradients, (own, of_weight), strict=True)]


def test_a_function_of_local_parts_has_the_dense_gradients() -> None:
    assert run_ranks(2, _custom) == [[True, True]] * 2
