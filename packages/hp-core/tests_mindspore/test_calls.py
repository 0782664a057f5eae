"""What MindSpore hands over is understood, or refused with the op's name and what to do; nothing runs on local parts unseen."""

from __future__ import annotations

from typing import Any

import pytest

from hp_core.testing import run_ranks


def _refusals() -> dict[str, str]:
    import mindspore as ms
    from mindspore import Tensor, mint, ops

    from hp_core import DTensor, Shard, init_device_mesh
    from hp_core.errors import HyperParallelError
    from hp_core.platform.recorder import record_collectives

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    x = DTensor.from_local(Tensor([[1.0, 2.0]], ms.float32), mesh, [Shard(0)])
    calls = {
        "a list in an older primitive": lambda: ops.meshgrid(x[0], x[1]),
        "no rule": lambda: ops.gather_nd(x, ops.zeros_like(x).astype(ms.int64)),
        "an argument that the rule doesn't know": lambda: ops.CumSum(exclusive=True)(x, 0),
        "no local op": lambda: mint.prod(x, 0),
        "in place": lambda: x.add_(x),
        "item assignment": lambda: x.__setitem__(0, 1.0),
    }
    told = {}
    for name, call in calls.items():
        with record_collectives() as log:
            try:
                call()
                told[name] = "nothing"
            except HyperParallelError as error:
                told[name] = f"{type(error).__name__}: {error}" + (" (too late)" if log else "")
    return told


def test_what_has_no_rule_is_refused_by_name_with_what_to_do_before_any_communication() -> None:
    first, second = run_ranks(2, _refusals, timeout=60.0)
    assert first == second
    wanted = {
        "a list in an older primitive": ("Meshgrid", "register_sharding_rule"),
        "no rule": ("GatherNd has no sharding rule", "register_sharding_rule", "full_tensor()"),
        "an argument that the rule doesn't know": ("CumSum with exclusive=True", "leave it off"),
        "no local op": ("'product_over_ranks'", "redistribute its operands"),
        "in place": ("Inplace", "x = x + y"),
        "item assignment": ("x[...] = value", "where()"),
    }
    for name, parts in wanted.items():
        assert all(part in first[name] for part in parts), (name, first[name])
        assert "too late" not in first[name]


def _stacked() -> tuple[tuple[int, ...], list[Any], list[Any]]:
    import numpy as np
    from mindspore import Tensor, ops

    from hp_core import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    own = Tensor(np.full((1, 2), mesh.get_local_rank("tp"), np.float32))
    x = DTensor.from_local(own, mesh, [Shard(0)])
    stacked = ops.stack((x, x + 1))
    return stacked.shape, stacked.tolist(), ops.addn((x, x)).tolist()


def test_lists_of_dtensors_are_seen_in_older_primitives_too() -> None:
    for shape, stacked, total in run_ranks(2, _stacked, timeout=60.0):
        assert shape == (2, 2, 2)
        assert stacked == [[[0, 0], [1, 1]], [[1, 1], [2, 2]]]
        assert total == [[0, 0], [2, 2]]


def _embedding_errors(cut: int | None) -> list[float]:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, mint

    from hp_core import DTensor, Replicate, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    random = np.random.default_rng(0)
    ids, table = random.integers(0, 5, (3, 4)), random.normal(size=(5, 4)).astype(np.float32)
    weights = random.normal(size=(3, 4, 4)).astype(np.float32)
    ids[0, 0] = ids[2, 3] = 1
    wanted = np.zeros_like(table)
    np.add.at(wanted, ids, weights)
    wanted[1] = 0
    placement = Replicate() if cut is None else Shard(cut)
    bounds = (
        DTensor.from_local(Tensor(table), mesh, [Replicate()]).redistribute(mesh, [placement]).layout.bounds((5, 4))
    )
    own = tuple(slice(*bound) for bound in bounds)
    held: list[Any] = []

    def loss(local: Any) -> Any:
        weight = DTensor.from_local(local, mesh, [placement], shape=(5, 4))
        everywhere = [DTensor.from_local(Tensor(value), mesh, [Replicate()]) for value in (ids, weights)]
        rows = mint.nn.functional.embedding(everywhere[0], weight, padding_idx=-4)
        held[:] = [rows]
        return (rows * everywhere[1]).sum().full_tensor()

    gradient = ms.grad(loss)(Tensor.from_numpy(table[own].copy()))
    rows = held[0].detach().full_tensor().asnumpy()
    return [float(abs(rows - table[ids]).max()), float(abs(gradient.asnumpy() - wanted[own]).max())]


@pytest.mark.parametrize("cut", [None, 0, 1])
def test_an_embedding_gives_its_padding_row_no_gradient(cut: int | None) -> None:
    for errors in run_ranks(2, _embedding_errors, cut, timeout=60.0):
        assert max(errors) < 1e-6
