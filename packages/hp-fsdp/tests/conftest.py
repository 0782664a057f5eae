"""`Bed`: a dense model and the same model sharded, trained side by side on the same data.

Tests pass the class to the ranks. What a rank trains on depends on its data rank and the step only, so that each rank can
compute the dense model's gradient of the mean over all ranks by itself: the oracle.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hp_core import ColwiseParallel, DTensor, RowwiseParallel, init_device_mesh, parallelize_module
from hp_core.process_group import get_rank, get_world_size
from hp_fsdp import fully_shard

WORDS, WIDTH = 11, 6

Objective = Callable[[Any, int, int], torch.Tensor]
"""The loss of a model on the data of a rank at a step."""


class Block(nn.Module):
    """A residual block."""

    def __init__(self, width: int = WIDTH) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(torch.tanh(self.up(self.norm(x))))


class Net(nn.Module):
    """An embedding, blocks, and a head. Sizes are odd, so that no chunk border falls where a parameter ends."""

    def __init__(self, blocks: int = 3, tied: bool = False, width: int = WIDTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, WORDS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, tokens: torch.Tensor, skip: tuple[int, ...] = (), run: Any = None) -> torch.Tensor:
        x = self.embed(tokens)
        for index, block in enumerate(self.blocks):
            if index not in skip:
                x = block(x) if run is None else run(block, x)
        return self.head(self.norm(x))  # type: ignore[no-any-return]


def tokens_of(rank: int, step: int, rows: int = 2) -> tuple[torch.Tensor, torch.Tensor]:
    """Tokens and targets of a data rank at a step."""
    generator = torch.Generator().manual_seed(1000 * step + rank)
    both = torch.randint(0, WORDS, (2, rows, 5), generator=generator)
    return both[0], both[1]


def loss_of(model: Any, rank: int, step: int, **options: Any) -> torch.Tensor:
    """The objective of a `Net`."""
    tokens, targets = tokens_of(rank, step)
    return F.cross_entropy(model(tokens, **options).flatten(0, 1), targets.flatten())


def shard_blocks(model: Any, mesh: Any, **options: Any) -> None:
    """One unit for each block, one for the rest."""
    for block in model.blocks:
        fully_shard(block, mesh=mesh, **options)
    fully_shard(model, mesh=mesh, **options)


def full(value: Any) -> Any:
    """A tensor, whole."""
    return value.full_tensor() if hasattr(value, "full_tensor") else value


class Bed:
    """A dense model and a sharded one.

    Args:
        kind: of the mesh: "fsdp" (all ranks), "hsdp" (2 x the rest), or "tp" (the rest x 2, with tensor-parallel blocks).
        build: makes the model.
        shard: shards it.
        prepare: is called with both models before.
        tolerance: of gradients and parameters.
        options: of `fully_shard`.
    """

    Net, Block = Net, Block
    loss_of, tokens_of = staticmethod(loss_of), staticmethod(tokens_of)
    shard_blocks, full = staticmethod(shard_blocks), staticmethod(full)

    def __init__(
        self,
        kind: str = "fsdp",
        build: Callable[[], Any] = Net,
        shard: Callable[..., Any] = shard_blocks,
        prepare: Callable[[Any], Any] | None = None,
        tolerance: float = 1e-12,
        dtype: torch.dtype = torch.float64,
        **options: Any,
    ) -> None:
        torch.manual_seed(0)
        self.tolerance = tolerance
        self.dense = build().to(dtype)
        self.model = copy.deepcopy(self.dense)
        if prepare is not None:
            prepare(self.dense)
            prepare(self.model)
        self.mesh = self.mesh_of(kind, self.model)
        coordinate = self.mesh.get_coordinate()
        self.size = self.mesh.size()
        self.rank = coordinate[0] if len(coordinate) == 1 else coordinate[0] * self.mesh.shape[1] + coordinate[1]
        shard(self.model, self.mesh, **options)
        self.optimize()

    @staticmethod
    def mesh_of(kind: str, model: Any = None) -> Any:
        """The data axes; with "tp", the model's blocks are laid out on the other axis."""
        ranks = get_world_size()
        if kind == "fsdp":
            return init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
        if kind == "hsdp":
            return init_device_mesh("cpu", (2, ranks // 2), mesh_dim_names=("replicas", "shards"))
        world = init_device_mesh("cpu", (ranks // 2, 2), mesh_dim_names=("dp", "tp"))
        for block in model.blocks if model is not None else ():
            parallelize_module(block, world["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        return world["dp"]

    def optimize(self, make: Callable[[Any], torch.optim.Optimizer] | None = None) -> None:
        """New optimizers for both."""
        make = make or (lambda parameters: torch.optim.AdamW(parameters, lr=1e-2, foreach=True))
        self.optimizers = make(self.dense.parameters()), make(self.model.parameters())

    def backward(self, step: int = 0, objective: Objective = loss_of, share: float = 1.0) -> None:
        """Gradients of both are added up: of the mean over ranks, times `share`."""
        self.dense_backward(step, objective, share)
        (objective(self.model, self.rank, step) * share).backward()

    def dense_backward(self, step: int = 0, objective: Objective = loss_of, share: float = 1.0) -> None:
        """Those of the dense model only."""
        losses = [objective(self.dense, rank, step) for rank in range(self.size)]
        (sum(losses) * (share / self.size)).backward()  # type: ignore[union-attr]

    def update(self) -> None:
        """Both optimizers step; gradients are gone."""
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad()

    def train(self, steps: int = 10, objective: Objective = loss_of, first: int = 0) -> None:
        """Train both, comparing gradients at the first and the last step, and in the end all else."""
        for step in range(first, first + steps):
            self.backward(step, objective)
            if step in (first, first + steps - 1):
                self.check_gradients()
            self.update()
        self.check()

    def check_gradients(self, zero_for_none: bool = False) -> None:
        """All gradients equal dense ones; with `zero_for_none` zeros may stand for a dense one that is None."""
        for name, expected, got in self.pairs():
            if expected.grad is None and (got.grad is None or zero_for_none):
                assert got.grad is None or not full(got.grad).any(), f"{name}: a gradient where dense has none"
                continue
            assert (expected.grad is None) == (got.grad is None), f"{name}: {expected.grad} / {got.grad}"
            self.close_share(got.grad, expected.grad, f"gradient of {name}")

    def check(self) -> None:
        """Parameters and optimizer states equal dense ones."""
        for name, expected, got in self.pairs():
            self.close_share(got.detach(), expected.detach(), name, 1e3)
            states = (optimizer.state.get(one) for optimizer, one in zip(self.optimizers, (expected, got), strict=True))
            dense, sharded = ({} if state is None else state for state in states)
            assert dense.keys() == sharded.keys(), name
            for key, value in dense.items():
                if torch.is_tensor(value) and value.dim():
                    assert sharded[key].to_local().shape == got.to_local().shape, (name, key)
                self.close_share(sharded[key], value, f"{key} of {name}", 1e3)

    def pairs(self) -> list[tuple[str, Any, Any]]:
        """Name, dense parameter, sharded parameter."""
        dense, sharded = dict(self.dense.named_parameters()), dict(self.model.named_parameters())
        assert list(dense) == list(sharded)
        return [(name, dense[name], sharded[name]) for name in dense]

    def close(self, got: torch.Tensor, expected: torch.Tensor, what: str, slack: float = 1.0) -> None:
        """Compare two tensors."""
        tolerance = self.tolerance * slack
        torch.testing.assert_close(
            got, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"rank {get_rank()}: {what}: {text}"
        )

    def close_share(self, got: Any, expected: torch.Tensor, what: str, slack: float = 1.0) -> None:
        """Compare what this rank holds of a tensor with its part of the dense one: all ranks together compare all of it."""
        if isinstance(got, DTensor):
            assert got.shape == expected.shape, what
            parts = [
                expected[tuple(slice(*ends) for ends in box)].reshape(-1) for box in got.layout.boxes(expected.shape)
            ]
            got, expected = got.to_local().reshape(-1), torch.cat([expected.new_empty(0), *parts])
        self.close(got, expected, what, slack)

    def held_whole(self) -> list[str]:
        """Units that are not sharded, and parameters of the model that are no shards."""
        from hp_fsdp.hsdp_module import units_below

        units = [repr(unit) for unit in units_below(self.model) if unit.state.value != "sharded" or unit.active]
        segments = [segment for unit in units_below(self.model) for segment in unit.segments]
        units += [repr(s.buffer.shape) for s in segments if s.buffer is not None and s.buffer.untyped_storage().size()]
        return units + [
            name
            for unit in units_below(self.model)
            for member in unit.cut
            for module, name in member.holders
            if module._parameters[name] is not member.sharded
        ]


@pytest.fixture(scope="session", params=[2, 4])
def ranks(request: pytest.FixtureRequest) -> int:
    """How many; tests of one number run one after the other, so that its process group is made once."""
    return int(request.param)


@pytest.fixture(scope="session")
def bed() -> type[Bed]:
    """The class, to be passed to the ranks."""
    return Bed
