"""Tensor-parallel styles against the dense module: values, gradients, and exactly Megatron's communication."""

from __future__ import annotations

import pytest

from hp_core.testing import run_ranks


class Case:
    """Builds one small model and a plan for it, on every rank alike. Sent to the ranks by value."""

    def __init__(self, name: str, plan: str, mesh: tuple[int, ...], names: tuple[str, ...]) -> None:
        self.name, self.plan, self.mesh, self.names = name, plan, mesh, names

    def model(self):
        import torch
        from torch import nn

        torch.manual_seed(0)
        if self.name == "mlp":
            return nn.Sequential(nn.Linear(8, 12), nn.GELU(), nn.Linear(12, 8)).double()
        if self.name == "uneven mlp":
            return nn.Sequential(nn.Linear(8, 13), nn.GELU(), nn.Linear(13, 8, bias=False)).double()
        assert self.name == "embedding"
        return nn.Sequential(nn.Embedding(11, 8), nn.LayerNorm(8), nn.Linear(8, 11, bias=False)).double()

    def styles(self):
        from hp_core import ColwiseParallel, Replicate, RowwiseParallel, SequenceParallel, Shard

        local = len(self.mesh) == 1
        if self.plan == "col-row":
            return {
                "0": ColwiseParallel(use_local_output=local),
                "2": RowwiseParallel(use_local_output=local),
            }
        if self.plan == "vocabulary":
            return {
                "0": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1), use_local_output=False),
                "1": SequenceParallel(),
                "2": ColwiseParallel(input_layouts=Shard(1), output_layouts=Replicate(), use_local_output=local),
            }
        assert self.plan == "features"
        from hp_core import NoParallel

        return {
            "0": ColwiseParallel(output_layouts=Replicate(), use_local_output=False),
            "1": NoParallel(use_local_output=False),
            "2": RowwiseParallel(input_layouts=Replicate(), use_local_output=local),
        }


CASES = [
    Case("mlp", "col-row", (2,), ("tp",)),
    Case("mlp", "col-row", (4,), ("tp",)),
    Case("uneven mlp", "col-row", (4,), ("tp",)),
    Case("mlp", "col-row", (2, 2), ("dp", "tp")),
    Case("embedding", "vocabulary", (2,), ("tp",)),
    Case("embedding", "vocabulary", (2, 2), ("dp", "tp")),
    Case("embedding", "features", (2,), ("tp",)),
    Case("embedding", "features", (2, 2), ("dp", "tp")),
]


@pytest.mark.parametrize("case", CASES, ids=lambda c: f"{c.name} {c.plan} {c.mesh}".replace(" ", "-"))
def test_styles_equal_the_dense_module(case):
    def compare(case):
        import torch

        from hp_core import DTensor, Replicate, Shard, init_device_mesh, parallelize_module

        mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=case.names)
        dense, model = case.model(), case.model()
        torch.manual_seed(1)
        batch, seq = 4, 6
        x = (
            torch.randint(0, 11, (batch, seq))
            if case.name == "embedding"
            else torch.randn(batch, seq, 8, dtype=torch.float64)
        )
        target = torch.randn(batch, seq, 11 if case.name == "embedding" else 8, dtype=torch.float64)
        expected = ((dense(x) - target) ** 2).mean()
        expected.backward()
        parallelize_module(model, mesh, case.styles())
        if len(case.mesh) == 1:
            loss = ((model(x) - target) ** 2).mean()
        else:
            half = mesh.get_local_rank("dp")
            rows = slice(half * 2, half * 2 + 2)
            place = [Shard(0), Replicate()]
            loss = (
                (model(DTensor.from_local(x[rows], mesh, place)) - DTensor.from_local(target[rows], mesh, place)) ** 2
            ).mean()
        loss.backward()
        worst = abs(float(loss) - expected.item())
        for (name, p), q in zip(model.named_parameters(), dense.parameters(), strict=True):
            assert isinstance(p, DTensor), name
            worst = max(worst, (p.grad.full_tensor() - q.grad).abs().max().item())
        return worst

    world = 1
    for size in case.mesh:
        world *= size
    assert max(run_ranks(world, compare, case)) < 1e-12


def test_column_then_row_costs_one_all_reduce_each_way():
    def count(case):
        import torch

        from hp_core import init_device_mesh, parallelize_module, record_collectives

        mesh = init_device_mesh("cpu", case.mesh, mesh_dim_names=case.names)
        model = parallelize_module(case.model(), mesh, case.styles())
        x = torch.randn(4, 6, 8, dtype=torch.float64, requires_grad=True)
        with record_collectives() as forward:
            out = model(x)
        with record_collectives() as backward:
            out.sum().backward()
        return [(r.kind, r.nbytes) for r in forward], [(r.kind, r.nbytes) for r in backward]

    # ring all-reduce over two ranks: each sends 2 * (1/2) of 4 * 6 * 8 float64
    assert run_ranks(2, count, CASES[0]) == [([("all_reduce", 1536)], [("all_reduce", 1536)])] * 2


def test_queries_keys_and_values_share_one_gather_and_one_reduce_scatter():
    """Sequence parallelism as in Megatron: what is gathered once is sent back once, straight to its shards."""

    def count():
        import torch
        from torch import nn

        from hp_core import (
            ColwiseParallel,
            PrepareModuleInput,
            RowwiseParallel,
            Shard,
            distribute_tensor,
            init_device_mesh,
            parallelize_module,
            record_collectives,
        )
        from hp_core.placement import Replicate

        class Block(nn.Module):
            def __init__(self):
                super().__init__()
                self.q, self.k, self.v, self.o = (nn.Linear(8, 8, bias=False) for _ in range(4))

            def forward(self, x):
                return self.o(self.q(x) * self.k(x) + self.v(x))

        torch.manual_seed(0)
        dense, model = Block().double(), None
        torch.manual_seed(0)
        model = Block().double()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {name: ColwiseParallel(use_local_output=False) for name in "qkv"}
        plan["o"] = RowwiseParallel(output_layouts=Shard(1), use_local_output=False)
        plan[""] = PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())
        parallelize_module(model, mesh, plan)
        value = torch.randn(2, 6, 8, dtype=torch.float64)
        x = distribute_tensor(value, mesh, [Shard(1)], src_data_rank=0).requires_grad_()
        with record_collectives() as forward:
            out = model(x)
        with record_collectives() as backward:
            out.square().sum().backward()
        reference = x.detach().full_tensor().requires_grad_()
        dense(reference).square().sum().backward()
        error = (x.grad.full_tensor() - reference.grad).abs().max().item()
        for p, q in zip(model.parameters(), dense.parameters(), strict=True):
            error = max(error, (p.grad.full_tensor() - q.grad).abs().max().item())
        return [(r.kind, r.nbytes) for r in forward], [(r.kind, r.nbytes) for r in backward], error

    half = 2 * 3 * 8 * 8  # bytes of one rank's part of [2, 6, 8] float64
    for forward, backward, error in run_ranks(2, count):
        assert forward == [("all_gather", half), ("reduce_scatter", half)]
        assert backward == [("all_gather", half), ("reduce_scatter", half)]
        assert error < 1e-12


def test_loss_parallel_never_gathers_logits():
    def losses():
        import torch
        import torch.nn.functional as F
        from torch import nn

        from hp_core import (
            ColwiseParallel,
            DTensor,
            LayoutError,
            Replicate,
            init_device_mesh,
            loss_parallel,
            parallelize_module,
            record_collectives,
        )

        torch.manual_seed(0)
        dense = nn.Linear(8, 101).double()
        torch.manual_seed(0)
        head = nn.Linear(8, 101).double()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        parallelize_module(head, mesh, ColwiseParallel(use_local_output=False))
        x, target = torch.randn(6, 8, dtype=torch.float64), torch.tensor([0, 100, 50, 51, -100, 7])
        expected = F.cross_entropy(dense(x), target)
        expected.backward()
        labels = DTensor.from_local(target, mesh, [Replicate()])
        with loss_parallel(), record_collectives() as log:
            loss = F.cross_entropy(head(x), labels)
            loss.backward()
        try:
            with loss_parallel():
                F.cross_entropy(head(x).redistribute(placements=[Replicate()]), labels)
            refused = ""
        except LayoutError as error:
            refused = str(error)
        F.cross_entropy(head(x).redistribute(placements=[Replicate()]), labels)
        error = max(
            abs(loss.item() - expected.item()), (head.weight.grad.full_tensor() - dense.weight.grad).abs().max().item()
        )
        return error, log.nbytes, refused

    for error, nbytes, refused in run_ranks(2, losses):
        assert error < 1e-12
        assert nbytes <= 3 * 6 * 8  # three numbers per sample, never 101
        assert "must be cut along the classes" in refused


def test_tied_embedding_and_head_stay_tied():
    def tied():
        import torch
        from torch import nn

        from hp_core import ColwiseParallel, Replicate, RowwiseParallel, init_device_mesh, parallelize_module

        class Tied(nn.Module):
            def __init__(self):
                super().__init__()
                self.embed = nn.Embedding(10, 4)
                self.head = nn.Linear(4, 10, bias=False)
                self.head.weight = self.embed.weight

            def forward(self, x):
                return self.head(self.embed(x))

        torch.manual_seed(0)
        dense = Tied().double()
        torch.manual_seed(0)
        model = Tied().double()
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        plan = {
            "embed": RowwiseParallel(input_layouts=Replicate(), use_local_output=False),
            "head": ColwiseParallel(output_layouts=Replicate(), use_local_output=True),
        }
        parallelize_module(model, mesh, plan)
        x = torch.tensor([[1, 9, 3]])
        model(x).square().sum().backward()
        dense(x).square().sum().backward()
        same = model.head.weight is model.embed.weight
        return same, (model.embed.weight.grad.full_tensor() - dense.embed.weight.grad).abs().max().item()

    for same, error in run_ranks(2, tied):
        assert same
        assert error < 1e-12
