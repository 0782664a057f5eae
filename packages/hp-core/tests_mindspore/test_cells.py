"""Tensor-parallel styles on `nn.Cell`: a small transformer trained beside its dense twin, by MindSpore's own optimizers."""

from __future__ import annotations

from typing import Any

import pytest

from hp_core.testing import run_ranks


def _block(width: int, heads: int, hidden: int, library: str) -> Any:
    import mindspore as ms
    from mindspore import mint, nn, ops

    linear = nn.Dense if library == "nn" else mint.nn.Linear

    class Attention(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.q, self.k, self.v, self.out = (linear(width, width) for _ in range(4))

        def construct(self, x: Any) -> Any:
            batch, sequence, _ = x.shape

            def by_head(t: Any) -> Any:
                return t.reshape(batch, sequence, -1, width // heads).transpose(1, 2)

            q, k, v = by_head(self.q(x)), by_head(self.k(x)), by_head(self.v(x))
            scores = ops.matmul(q, k.transpose(2, 3)) / (width // heads) ** 0.5
            mixed = ops.matmul(ops.softmax(scores, axis=-1), v)
            return self.out(mixed.transpose(1, 2).reshape(batch, sequence, width))

    class Block(nn.Cell):
        def __init__(self) -> None:
            super().__init__()
            self.norm = nn.LayerNorm((width,))
            self.attention = Attention()
            self.up, self.down = linear(width, hidden), linear(hidden, width)

        def construct(self, x: Any) -> Any:
            x = x + self.attention(self.norm(x))
            return x + self.down(ops.gelu(self.up(x)))

    assert ms
    return Block()


def _train(library: str, mesh_shape: tuple[int, ...]) -> Any:
    import mindspore as ms
    import numpy as np
    from mindspore import Tensor, nn

    from hp_core import (
        ColwiseParallel,
        DTensor,
        NoParallel,
        Replicate,
        RowwiseParallel,
        Shard,
        init_device_mesh,
        parallelize_module,
    )

    names = ("dp", "tp")[-len(mesh_shape) :]
    mesh = init_device_mesh("cpu", mesh_shape, mesh_dim_names=names)
    ms.set_seed(1)
    dense, sharded = _block(8, 4, 16, library), _block(8, 4, 16, library)
    for own, other in zip(dense.get_parameters(), sharded.get_parameters(), strict=True):
        other.set_data(Tensor(own.asnumpy().copy()))
    keep = {"use_local_output": False}
    plan: dict[str, Any] = {f"attention.{name}": ColwiseParallel(**keep) for name in "qkv"}
    plan |= {"attention.out": RowwiseParallel(**keep), "up": ColwiseParallel(**keep), "down": RowwiseParallel(**keep)}
    plan["norm"] = NoParallel(**keep)
    parallelize_module(sharded, mesh, plan)
    random = np.random.default_rng(2)
    placements = [Shard(0)] * (len(mesh_shape) - 1) + [Replicate()]

    losses: dict[str, list[float]] = {"dense": [], "sharded": []}
    models = {"dense": dense, "sharded": sharded}
    optimizers = {
        name: nn.AdamWeightDecay(model.trainable_params(), learning_rate=0.01) for name, model in models.items()
    }
    for _ in range(3):
        batch = random.normal(size=(4, 6, 8)).astype(np.float32)
        for name, model in models.items():
            x: Any = Tensor(batch)
            if name == "sharded":
                local = np.split(batch, mesh_shape[0])[mesh.get_local_rank("dp")] if len(mesh_shape) > 1 else batch
                x = DTensor.from_local(Tensor(local.copy()), mesh, placements)

            def loss_of(x: Any, model: Any = model) -> Any:
                loss = (model(x) ** 2).mean()
                return loss.full_tensor() if hasattr(loss, "_spec") else loss

            loss, gradients = ms.value_and_grad(loss_of, None, weights=optimizers[name].parameters)(x)
            optimizers[name](gradients)
            losses[name].append(float(loss.asnumpy()))
    shapes = [tuple(p.shape) for p in sharded.trainable_params()]
    return losses, shapes, type(sharded.up.weight).__name__, sharded.up.weight.shape


@pytest.mark.parametrize("library", ["nn", "mint"])
@pytest.mark.parametrize("mesh_shape", [(2,), (2, 2)])
def test_a_parallel_block_trains_like_its_dense_twin(library: str, mesh_shape: tuple[int, ...]) -> None:
    ranks = 1
    for size in mesh_shape:
        ranks *= size
    for losses, shapes, kind, shape in run_ranks(ranks, _train, library, mesh_shape, timeout=120.0):
        assert losses["sharded"] == pytest.approx(losses["dense"], rel=2e-4)
        assert losses["dense"][-1] < losses["dense"][0]
        assert (8, 8) in shapes or (4, 8) in shapes
        assert kind == "DTensor"
        assert shape == (16, 8)
