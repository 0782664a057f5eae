"""Element types: computing in bf16 and reducing in fp32 equals a dense emulation of the same casts, bit for bit on two ranks.

The shards, their gradients and the optimizer's states stay in the parameters' own type.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from hp_core.testing import record_collectives, run_ranks
from hp_fsdp import MixedPrecisionPolicy, fully_shard

FOUR = pytest.mark.parametrize("ranks", [4], indirect=True)


def emulated(bed: Any, dense: Any, size: int, steps: tuple[int, ...], reduce_dtype: Any) -> dict[str, torch.Tensor]:
    """Gradients of parameters that each rank casts to bf16, accumulated and averaged over ranks in `reduce_dtype`."""
    totals: dict[str, torch.Tensor] = {}
    for rank in range(size):
        landed: dict[str, torch.Tensor] = {}
        for step in steps:
            cast = {name: p.detach().bfloat16().requires_grad_() for name, p in dense.named_parameters()}
            tokens, targets = bed.tokens_of(rank, step)
            logits = functional_call(dense, cast, (tokens,))
            F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()).backward()
            for name, parameter in cast.items():
                assert parameter.grad is not None
                gradient = parameter.grad.to(reduce_dtype)
                landed[name] = landed[name] + gradient if name in landed else gradient
        for name, gradient in landed.items():
            totals[name] = totals[name] + gradient if name in totals else gradient
    return {name: total / size for name, total in totals.items()}


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
@pytest.mark.parametrize("reduce_dtype", [torch.float32, None])
def test_bf16_computation(bed: Any, ranks: int, kind: str, reduce_dtype: Any) -> None:
    """Three AdamW steps of two micro-batches; the accumulation is in the type of the reduction."""

    def shard(model: Any, mesh: Any) -> None:
        for block in model.blocks:
            fully_shard(block, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype))
        fully_shard(model, mesh=mesh, mp_policy=MixedPrecisionPolicy(torch.bfloat16, reduce_dtype, torch.float32))

    def body(bed: Any) -> None:
        it = bed(kind, dtype=torch.float32, shard=shard)
        exact = it.size == 2
        it.tolerance = 0.0 if exact else 1e-6 if reduce_dtype else 3e-2
        for step in range(3):
            expected = emulated(bed, it.dense, it.size, (2 * step, 2 * step + 1), reduce_dtype or torch.bfloat16)
            for micro in range(2):
                it.model.set_requires_gradient_sync(micro == 1)
                with record_collectives() as log:
                    bed.loss_of(it.model, it.rank, 2 * step + micro).backward()
                types = {(record.kind, record.dtype.removeprefix("torch.")) for record in log}
                reduced = str(reduce_dtype or torch.bfloat16).removeprefix("torch.")
                assert types <= {("all_gather", "bfloat16"), ("reduce_scatter", reduced), ("all_reduce", reduced)} | {
                    ("all_gather", "int64")
                }
            for name, dense, sharded in it.pairs():
                assert sharded.grad.dtype == sharded.dtype == torch.float32
                dense.grad = expected[name].float()
                it.close(sharded.grad.full_tensor(), dense.grad, name)
            it.update()
            if exact:
                it.check()
            for _, dense, sharded in it.pairs():  # what differs by rounding must not grow over steps
                dense.data.copy_(sharded.detach().full_tensor())

    run_ranks(ranks, body, bed)


def test_gradients_reduced_wider_than_computed_and_kept(bed: Any, ranks: int) -> None:
    """bf16 parameters, reduced in fp32: what is kept is rounded once."""

    def body(bed: Any) -> None:
        it = bed(dtype=torch.bfloat16, mp_policy=MixedPrecisionPolicy(reduce_dtype=torch.float32))
        expected = emulated(bed, it.dense, it.size, (0,), torch.float32)

        tokens, targets = bed.tokens_of(it.rank, 0)
        F.cross_entropy(it.model(tokens).flatten(0, 1).float(), targets.flatten()).backward()
        for name, _, sharded in it.pairs():
            assert sharded.grad.dtype == torch.bfloat16
            it.tolerance = 0.0 if it.size == 2 else 1e-2
            it.close(sharded.grad.full_tensor(), expected[name].bfloat16(), name)

    run_ranks(ranks, body, bed)


def test_casts_of_inputs_and_outputs(bed: Any, ranks: int) -> None:
    """Floats are cast, and nothing else; containers keep their structure (case 42)."""

    class Looking(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(3, 3)
            self.seen: Any = None

        def forward(self, given: Any, *, extra: Any = None) -> Any:
            self.seen = {"x": given["x"].dtype, "ids": given["ids"].dtype, "flag": given["flag"], "none": given["none"]}
            self.seen |= {"weight": self.inner.weight.dtype, "kinds": [type(one).__name__ for one in extra]}
            return {"out": self.inner(given["x"]), "ids": given["ids"], "text": "kept"}

    def body(policy: Any) -> tuple[Any, Any]:
        from hp_core import init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
        model = fully_shard(Looking(), mesh=mesh, mp_policy=policy)
        given = {"x": torch.ones(2, 3), "ids": torch.arange(2), "flag": True, "none": None}
        result = model(given, extra=(1, 2.5, torch.ones(1), [None]))
        assert given["x"].dtype == torch.float32
        return model.seen, {key: getattr(value, "dtype", value) for key, value in result.items()}

    half = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    seen, result = run_ranks(ranks, body, half)[0]
    kinds = ["int", "float", "Tensor", "list"]
    assert seen == {
        "x": torch.bfloat16,
        "ids": torch.int64,
        "flag": True,
        "none": None,
        "weight": torch.bfloat16,
        "kinds": kinds,
    }
    assert result == {"out": torch.float32, "ids": torch.int64, "text": "kept"}
    with pytest.raises(Exception, match="dtype"):  # inputs are left alone, so that the product refuses them
        run_ranks(ranks, body, MixedPrecisionPolicy(param_dtype=torch.bfloat16, cast_forward_inputs=False))


def test_parameters_that_are_no_floats(bed: Any, ranks: int) -> None:
    """Integers are sharded and gathered as they are, under any policy; complex numbers too."""

    class Quantised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.arange(-50, 55, dtype=torch.int8).view(5, 21), requires_grad=False)
            self.mask = nn.Parameter(torch.arange(21) % 2 == 0, requires_grad=False)
            self.phase = nn.Parameter(torch.polar(torch.ones(3), torch.arange(3.0)), requires_grad=False)
            self.scale = nn.Parameter(torch.full((5, 1), 0.5))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            assert self.table.dtype == torch.int8
            assert self.phase.dtype == torch.complex64
            return x @ (self.table * self.scale * self.mask) * self.phase.abs().sum()

    def objective(model: Any, rank: int, step: int) -> torch.Tensor:
        return model(torch.full((2, 5), 1.0 + rank, dtype=model.scale.dtype)).float().square().mean()

    def body(bed: Any) -> None:
        policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        torch.manual_seed(0)
        from hp_core import init_device_mesh

        mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),), mesh_dim_names=("dp",))
        dense = Quantised()
        model = fully_shard(Quantised(), mesh=mesh, mp_policy=policy)
        objective(model, mesh.get_coordinate()[0], 0).backward()
        gradient = model.scale.grad.full_tensor()
        losses = [objective(dense, rank, 0) for rank in range(mesh.size())]
        (sum(losses) / mesh.size()).backward()  # type: ignore[union-attr]
        assert dense.scale.grad is not None
        assert (gradient - dense.scale.grad).abs().max() < 2e-2 * dense.scale.grad.abs().max()
        for name, value in model.state_dict().items():
            assert torch.equal(value.full_tensor(), dense.state_dict()[name]), name

    run_ranks(ranks, body, bed)
