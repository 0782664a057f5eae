"""What travels between stages: nested values, numbers, tensors without gradients, skip connections, shared parameters."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.errors import PlanError
from hp_core.platform.recorder import record_collectives
from hp_core.process_group import get_rank, get_world_size
from hp_core.testing import assert_same_error, run_ranks
from hp_pipeline.batches import BatchDimSpec
from hp_pipeline.named import Schedule1F1B
from hp_pipeline.orders.registry import build_order
from hp_pipeline.run import PipelineSchedule
from hp_pipeline.stage import PipelineStage

mse = nn.functional.mse_loss
WORDS, WIDTH = 11, 6
EVERY = [("gpipe", 1), ("1f1b", 1), ("zbh1", 1)]


class Step(nn.Module):
    """A stage made of parts and a function."""

    def __init__(self, function: Callable[..., Any], **parts: nn.Module) -> None:
        super().__init__()
        for name, part in parts.items():
            self.add_module(name, part)
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(self, *args, **kwargs)


class Embed(nn.Module):
    """Integers in; a dict of nested things out, of which some are used later and some never."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)
        self.other = nn.Linear(WIDTH, WIDTH)

    def forward(self, tokens: torch.Tensor, scale: float) -> dict[str, Any]:
        x = self.table(tokens)
        return {
            "x": x,
            "tokens": tokens,
            "nested": [self.other(x), (tokens > 3, None, "name")],
            "unused": self.other(x) * 2,
            "count": int(tokens.sum()),
            "scale": scale,
            "flag": bool(tokens.sum() % 2),
        }


class Middle(nn.Module):
    """A dict in, a tuple out; a mask that it ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WIDTH)

    def forward(self, bag: dict[str, Any], mask: torch.Tensor | None = None) -> tuple[Any, ...]:
        assert bag["nested"][1][1:] == (None, "name")
        assert not bag["tokens"].requires_grad
        assert bag["nested"][1][0].dtype is torch.bool
        assert type(bag["flag"]) is bool
        x = torch.tanh(self.layer(bag["x"])) * bag["scale"] + bag["count"] * 0.01 + bag["flag"]
        return x, bag["nested"][0], bag["nested"][1][0]


class Head(nn.Module):
    """A tuple in, as positional arguments; uses the mask."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(WIDTH, WORDS)

    def forward(
        self, x: torch.Tensor, ignored: torch.Tensor, large: torch.Tensor, *, mask: torch.Tensor
    ) -> torch.Tensor:
        return self.layer(x * mask[..., None] + large[..., None])  # type: ignore[no-any-return]


def made(kinds: list[type[nn.Module]]) -> list[nn.Module]:
    torch.manual_seed(3)
    return [kind().double() for kind in kinds]


def compare(own: dict[int, nn.Module], dense: list[nn.Module]) -> None:
    """Gradients equal the dense ones; where dense has none there is none."""
    for index, block in own.items():
        for (name, mine), other in zip(block.named_parameters(), dense[index].parameters(), strict=True):
            assert (mine.grad is None) == (other.grad is None), f"stage {index}, {name}: {mine.grad} / {other.grad}"
            if other.grad is not None:
                torch.testing.assert_close(
                    mine.grad, other.grad, rtol=1e-12, atol=1e-12, msg=lambda text, at=name: f"{at}: {text}"
                )


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def nested(name: str, chunks: int, kinds: list[type[nn.Module]], ranks: list[int]) -> None:
    rank = get_rank()
    blocks, dense = made(kinds), made(kinds)
    own = {stage: blocks[stage] for stage, owner in enumerate(ranks) if owner == rank}
    generator = torch.Generator().manual_seed(rank * 0 + 5)
    tokens, target = torch.randint(0, WORDS, (2, 8, 4), generator=generator)
    mask = torch.rand(8, 4, dtype=torch.float64, generator=generator)
    parts = 4
    for t, y, m in zip(tokens.chunk(parts), target.chunk(parts), mask.chunk(parts), strict=True):
        (cross_entropy(dense[2](*dense[1](dense[0](t, 0.5), mask=m), mask=m), y) / parts).backward()
    placed = build_order(name, get_world_size(), parts, chunks)
    pipeline = PipelineSchedule(
        [PipelineStage(block, stage, 3) for stage, block in own.items()], placed, loss_fn=cross_entropy, timeout=20
    )
    pipeline.run(tokens, 0.5, target=target, mask=mask)
    compare(own, dense)


@pytest.mark.parametrize(("name", "chunks"), EVERY)
def test_values_of_all_kinds_travel(name: str, chunks: int) -> None:
    """Integers, flags, strings, unused outputs, a keyword that a stage ignores (case 48), dicts and tuples."""
    run_ranks(3, nested, name, chunks, [Embed, Middle, Head], [0, 1, 2])


def test_values_are_handed_over_on_one_rank_as_well() -> None:
    run_ranks(1, nested, "interleaved1f1b", 3, [Embed, Middle, Head], [0, 0, 0])


def dims() -> None:
    """The batch is the second dim of one input; another isn't cut."""
    rank = get_rank()
    torch.manual_seed(0)
    weights = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    dense = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    for one, other in zip(weights, dense, strict=True):
        other.load_state_dict(one.state_dict())
    blocks = [
        Step(lambda self, x, table, **_: self.layer(x.transpose(0, 1)) + table, layer=weights[0]),
        Step(lambda self, x, *, bias: self.layer(x) + bias, layer=weights[1]),
    ]
    x, table = torch.randn(3, 8, WIDTH).double(), torch.randn(5, WIDTH).double().sum(0)
    bias, target = torch.randn(3, WIDTH).double(), torch.randn(8, 3, WIDTH).double()
    for part in range(4):
        rows = slice(2 * part, 2 * part + 2)
        hidden = dense[0](x[:, rows].transpose(0, 1)) + table
        (mse(dense[1](hidden) + bias, target[rows]) / 4).backward()
    pipeline = Schedule1F1B(
        PipelineStage(blocks[rank], rank, 2),
        4,
        mse,
        args_batch_dim=BatchDimSpec.from_tuple((1, None)),
        kwargs_batch_dim=BatchDimSpec.from_dict({"bias": None}),
    )
    pipeline.run(x, table, target=target, bias=bias)
    compare({0: weights[rank]}, [dense[rank]])


def test_any_dim_can_be_the_batch_and_values_can_stay_whole() -> None:
    run_ranks(2, dims)


def skipping(name: str, chunks: int) -> None:
    """Stage 2 takes the output of stage 0 as well: case 50."""
    rank, ranks, parts = get_rank(), get_world_size(), 4
    placed = build_order(name, ranks, parts, chunks)

    def build() -> list[nn.Module]:
        torch.manual_seed(2)
        layers = [nn.Linear(WIDTH, WIDTH) for _ in range(placed.stages)]
        found: list[nn.Module] = [Step(lambda self, x: torch.tanh(self.layer(x)), layer=layer) for layer in layers]
        found[2] = WithSkip(layers[2])
        return [one.double() for one in found]

    blocks, dense = build(), build()
    own = {stage: blocks[stage] for stage in placed.stages_of(rank)}
    torch.manual_seed(4)
    x, target = torch.randn(2, 8, WIDTH).double()
    for rows, wanted in zip(x.chunk(parts), target.chunk(parts), strict=True):
        early = dense[0](rows)
        hidden = dense[2](dense[1](early), early=early)
        for block in dense[3:]:
            hidden = block(hidden)
        (mse(hidden, wanted) / parts).backward()
    stages = [PipelineStage(block, stage, placed.stages) for stage, block in own.items()]
    pipeline = PipelineSchedule(stages, name, parts, mse, skips=[(0, 2, "early")], timeout=20)
    pipeline.run(x, target=target)
    compare(own, dense)


class WithSkip(nn.Module):
    """Takes an earlier stage's output beside its input."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: torch.Tensor, *, early: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * early  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("ranks", "name", "chunks"),
    [
        (3, "gpipe", 1),
        (3, "1f1b", 1),
        (3, "zbh1", 1),
        (4, "1f1b", 1),
        (2, "zbv", 2),
        (2, "interleaved1f1b", 2),
        (2, "dualpipev", 2),
    ],
)
def test_skip_connections(ranks: int, name: str, chunks: int) -> None:
    run_ranks(ranks, skipping, name, chunks)


class Front(nn.Module):
    """An embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(WORDS, WIDTH)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.table(tokens))


class Back(nn.Module):
    """A head."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, WORDS, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(x)  # type: ignore[no-any-return]


def tied(name: str, chunks: int) -> tuple[torch.Tensor | None, list[str]]:
    """Three steps of SGD; case 54."""
    rank, ranks, parts = get_rank(), get_world_size(), 4
    placed = build_order(name, ranks, parts, chunks)
    last = placed.stages - 1

    def build() -> list[nn.Module]:
        torch.manual_seed(6)
        return [one.double() for one in (Front(), *(nn.Linear(WIDTH, WIDTH) for _ in range(last - 1)), Back())]

    blocks, dense = build(), build()
    dense[last].head.weight = dense[0].table.weight  # type: ignore[union-attr, assignment]
    own = {stage: blocks[stage] for stage in placed.stages_of(rank)}
    shared = {"words": [(0, "table.weight"), (last, "head.weight")]}
    stages = [PipelineStage(block, stage, last + 1, shared_parameters=shared) for stage, block in own.items()]
    pipeline = PipelineSchedule(stages, name, parts, cross_entropy, timeout=20)
    parameters = [parameter for block in own.values() for parameter in block.parameters()]
    optimizers = [
        torch.optim.SGD(parameters, lr=0.1),
        torch.optim.SGD(nn.ModuleList(dense).parameters(), lr=0.1),
    ]
    generator = torch.Generator().manual_seed(7)
    kinds: list[str] = []
    for _ in range(3):
        for _ in range(2):  # gradients add up over runs
            tokens, target = torch.randint(0, WORDS, (2, 8, 4), generator=generator)
            for rows, wanted in zip(tokens.chunk(parts), target.chunk(parts), strict=True):
                (cross_entropy(nn.Sequential(*dense)(rows), wanted) / parts).backward()
            with record_collectives() as log:
                pipeline.run(tokens, target=target)
            kinds = [record.kind for record in log]
        compare(own, dense)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    copies = [own[0].table.weight] if 0 in own else []  # type: ignore[union-attr]
    copies += [own[last].head.weight] if last in own else []  # type: ignore[union-attr]
    for copy in copies:
        torch.testing.assert_close(copy, dense[0].table.weight, rtol=1e-12, atol=1e-12)  # type: ignore[union-attr, arg-type]
    assert len(copies) < 2 or torch.equal(copies[0], copies[1])
    return (copies[0].detach() if copies else None), kinds


@pytest.mark.parametrize(("ranks", "name", "chunks"), [(2, "1f1b", 1), (3, "zbh1", 1), (2, "interleaved1f1b", 2)])
def test_shared_parameters_stay_bit_equal(ranks: int, name: str, chunks: int) -> None:
    copies = [copy for copy, _ in run_ranks(ranks, tied, name, chunks) if copy is not None]
    assert len(copies) == 2
    assert torch.equal(*copies)


def test_shared_parameters_on_one_rank_need_no_communication_of_their_own() -> None:
    """The V puts the first and the last stage on one rank."""
    for _, kinds in run_ranks(2, tied, "zbv", 2):
        assert set(kinds) == {"send", "recv"}


def changing(dynamic: bool, lengths: list[int]) -> None:
    rank = get_rank()
    torch.manual_seed(0)
    blocks = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    dense = [nn.Linear(WIDTH, WIDTH).double() for _ in range(2)]
    for one, other in zip(blocks, dense, strict=True):
        other.load_state_dict(one.state_dict())
    pipeline = Schedule1F1B(PipelineStage(blocks[rank], rank, 2, dynamic_shape=dynamic), 2, mse, timeout=20)
    for length in lengths:
        x, target = torch.randn(2, 4, length, WIDTH, generator=torch.Generator().manual_seed(length)).double()
        for rows, wanted in zip(x.chunk(2), target.chunk(2), strict=True):
            (mse(dense[1](dense[0](rows)), wanted) / 2).backward()
        pipeline.run(x, target=target)
        compare({0: blocks[rank]}, [dense[rank]])


def test_shapes_may_change_if_that_is_said() -> None:
    run_ranks(2, changing, True, [3, 5, 5, 2])


def test_other_changes_of_shape_are_refused_on_both_ends() -> None:
    shapes = r"stage 0 gives to stage 1 has changed .*\(2, 3, 6\).* -> .*\(2, 5, 6\)"
    assert_same_error(2, changing, PlanError, shapes, False, [3, 5])


def changing_inside() -> str:
    """A stage whose output changes in the middle of a run, with messages already posted for the old shape."""
    rank = get_rank()
    torch.manual_seed(0)
    calls = []

    def grow(self: Any, x: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        y = self.layer(x)
        return torch.cat([y, y]) if len(calls) == 3 else y

    blocks = [
        Step(grow, layer=nn.Linear(WIDTH, WIDTH)),
        nn.Linear(WIDTH, WIDTH),
    ]
    pipeline = Schedule1F1B(
        PipelineStage(blocks[rank].double(), rank, 2), 4, lambda output: output.square().mean(), timeout=20
    )
    x = torch.randn(8, WIDTH).double()
    try:
        pipeline.run(x)
    except PlanError as error:
        pipeline.run(x)  # everything was taken off the way
        return str(error)
    return ""


def test_a_change_in_the_middle_leaves_nothing_behind() -> None:
    first, second = run_ranks(2, changing_inside)
    assert first == second
    assert "at micro-batch 2" in first
    assert "(2, 6)" in first
    assert "(4, 6)" in first
