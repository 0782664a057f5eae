"""A mixture of experts: each token goes to the few experts that its router picks, on whichever rank they are.

Dropless: an expert takes all tokens that are sent to it, so the all-to-alls over `ep` carry uneven pieces. Without a mesh the
same block computes all experts on one process, which is what the parallel one must equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hp_core import DeviceMesh, DTensor, Partial, Replicate, Shard, distribute_tensor
from hp_core.platform import get_platform

if TYPE_CHECKING:
    from hp_core.platform.protocol import Group
    from hp_pipeline import CommComputeOverlap


@dataclass(frozen=True)
class ExpertSizes:
    """The shape of a mixture of experts.

    Attributes:
        d_model: Width of tokens.
        d_hidden: Inner width of each expert.
        experts: How many there are.
        top_k: To how many of them a token goes.
        renormalize: Whether the weights of a token's experts add up to 1.
    """

    d_model: int
    d_hidden: int
    experts: int
    top_k: int = 2
    renormalize: bool = True


@dataclass(frozen=True)
class Splits:
    """How many rows this rank sends to each rank of a group, and receives from each."""

    sent: tuple[int, ...]
    received: tuple[int, ...]

    @property
    def back(self) -> Splits:
        """Those of the way back."""
        return Splits(self.received, self.sent)


class Router(nn.Module):
    """Picks experts for tokens: the largest of softmax scores, which become the experts' weights (Shazeer et al. 2017)."""

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.top_k, self.renormalize = sizes.top_k, sizes.renormalize
        self.weight = nn.Parameter(torch.empty(sizes.experts, sizes.d_model, dtype=dtype))
        nn.init.normal_(self.weight, std=sizes.d_model**-0.5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Weights and numbers `[tokens, top_k]` of the experts of tokens `[tokens, d_model]`; weights are differentiable."""
        weight = self.weight
        if isinstance(weight, DTensor):  # of which each rank's gradient is a part, and the library adds them up
            weight = weight.to_local(grad_placements=[Partial()])
        scores = F.linear(x, weight)
        probabilities = scores.to(torch.promote_types(x.dtype, torch.float32)).softmax(-1)
        chosen, experts = probabilities.topk(self.top_k, dim=-1)
        if self.renormalize:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        return chosen.to(x.dtype), experts


class Experts(nn.Module):
    """SwiGLU experts, one after the other, on rows that are sorted by expert."""

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        shape = sizes.experts, sizes.d_hidden, sizes.d_model
        self.gate, self.up = (nn.Parameter(torch.empty(shape, dtype=dtype)) for _ in range(2))
        self.down = nn.Parameter(torch.empty(sizes.experts, sizes.d_model, sizes.d_hidden, dtype=dtype))
        for matrices in (self.gate, self.up, self.down):
            nn.init.normal_(matrices, std=matrices.shape[-1] ** -0.5)

    def forward(self, rows: Tensor, counts: list[int]) -> Tensor:
        """`[rows, d_model]` to the same; the first `counts[0]` rows are the first local expert's, and so on.

        Experts without rows are computed, too: their gradients are zeros, not missing.
        """
        gate, up, down = (
            (matrices.to_local() if isinstance(matrices, DTensor) else matrices).unbind(0)
            for matrices in (self.gate, self.up, self.down)
        )
        parts = [
            F.linear(F.silu(F.linear(part, gate[number])) * F.linear(part, up[number]), down[number])
            for number, part in enumerate(rows.split(counts))
        ]
        return torch.cat(parts)


class MixtureOfExperts(nn.Module):
    """A feed-forward layer made of experts.

    `parallelize_experts` cuts the experts over a mesh; tokens stay where they are.
    """

    def __init__(self, sizes: ExpertSizes, dtype: torch.dtype | None = None) -> None:
        super().__init__()
        self.sizes = sizes
        self.router, self.experts = Router(sizes, dtype), Experts(sizes, dtype)
        self.group: Group | None = None
        self.dispatch: Any = exchange
        self.combine: Any = exchange

    def forward(self, x: Tensor) -> Tensor:
        """Works on each position alone: `[..., d_model]` to the same."""
        rows = x.reshape(-1, x.shape[-1])
        weights, experts = self.router(rows)
        # Copies of tokens, sorted by expert; experts of one rank follow one another.
        order = experts.flatten().argsort(stable=True)
        sent = torch.bincount(experts.flatten(), minlength=self.sizes.experts)
        received = self._exchange_counts(sent)  # [ranks, local experts]
        splits = Splits(_row_sums(sent.view_as(received)), _row_sums(received))
        arrived = self.dispatch(rows[order // self.sizes.top_k], splits, self.group)
        # They come sorted by rank, then by expert; experts want theirs together.
        local = torch.arange(received.shape[1], device=x.device).repeat(received.shape[0])
        by_expert = local.repeat_interleave(received.flatten()).argsort(stable=True)
        computed = self.experts(arrived[by_expert], received.sum(0).tolist())
        returned = self.combine(computed[_inverse(by_expert)], splits.back, self.group)
        copies = returned[_inverse(order)].view(*experts.shape, -1)  # [tokens, top_k, d_model]
        output: Tensor = (copies * weights.unsqueeze(-1)).sum(1)
        return output.view_as(x)

    def _exchange_counts(self, sent: Tensor) -> Tensor:
        """From how many rows go to each expert: how many come from each rank for each expert that is here."""
        if self.group is None:
            return sent.view(1, -1)
        received = torch.empty_like(sent)
        get_platform().collectives.all_to_all(received, sent, (), (), self.group)
        return received.view(self.group.size, -1)


def parallelize_experts(module: nn.Module, mesh: DeviceMesh, overlap: CommComputeOverlap | None = None) -> None:
    """Cuts the experts of all mixtures in a module over a mesh of one axis, `ep`, in place.

    Every rank must hold the same weights before. Each rank then has tokens of its own, and gradients are those of the sum of
    all ranks' losses: each expert's on its rank, the router's on all.

    Args:
        module: The model.
        mesh: The ranks that share the experts.
        overlap: What hides exchanges behind computation in a pipeline.

    Raises:
        ValueError: The experts of a mixture can't be dealt out evenly.
    """
    for name, part in module.named_modules():
        if not isinstance(part, MixtureOfExperts):
            continue
        if part.sizes.experts % mesh.size():
            raise ValueError(f"{name}: {part.sizes.experts} experts can't be shared by ep={mesh.size()} equally")
        part.group = mesh.get_group()
        part.router.weight = nn.Parameter(distribute_tensor(part.router.weight.detach(), mesh, [Replicate()]))
        for matrices in ("gate", "up", "down"):
            whole = getattr(part.experts, matrices).detach()
            setattr(part.experts, matrices, nn.Parameter(distribute_tensor(whole, mesh, [Shard(0)])))
        if overlap is not None:
            part.dispatch = overlap.wrap_dispatch(begin_exchange, settle=settle_exchange, layer=name)
            part.combine = overlap.wrap_combine(begin_exchange, settle=settle_exchange, layer=name)


def _row_sums(counts: Tensor) -> tuple[int, ...]:
    return tuple(counts.sum(1).tolist())


def _inverse(order: Tensor) -> Tensor:
    """The permutation that undoes another."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(order.numel(), device=order.device)
    return inverse


class Transfer:
    """An all-to-all of rows that has begun; it keeps what is being sent and received."""

    def __init__(self, rows: Tensor, splits: Splits, group: Group | None) -> None:
        self.splits, self.group = splits, group
        self.source = rows.contiguous()
        self.output, self.work = self.source, None
        if group is not None:
            width = rows.shape[1:].numel()
            self.output = rows.new_empty((sum(splits.received), *rows.shape[1:]))
            sizes = ([width * count for count in counts] for counts in (splits.received, splits.sent))
            begin = get_platform().collectives.all_to_all
            self.work = begin(self.output.view(-1), self.source.view(-1), *sizes, group, async_op=True)

    def wait(self) -> Tensor:
        """What has arrived."""
        if self.work is not None:
            self.work.wait()
        return self.output


@dataclass
class Way:
    """What the two ends of an exchange know of each other: the transfer of rows, then that of their gradients."""

    there: Transfer | None = None
    back: Transfer | None = None


class _Begin(torch.autograd.Function):
    """Begins an exchange; its backward waits for the one that `_Settle`'s has begun."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, splits: Splits, group: Group | None, way: Way) -> Tensor:
        ctx.way = way
        way.there = Transfer(rows.detach(), splits, group)
        return way.there.output.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        transfer, ctx.way.back = ctx.way.back, None
        return transfer.wait(), None, None, None


class _Settle(torch.autograd.Function):
    """Waits for an exchange; its backward begins that of the gradients, the other way."""

    @staticmethod
    def forward(ctx: Any, buffer: Tensor, way: Way) -> Tensor:
        transfer, way.there = way.there, None
        assert transfer is not None
        ctx.way, ctx.splits, ctx.group = way, transfer.splits.back, transfer.group
        return transfer.wait().detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        ctx.way.back = Transfer(gradient, ctx.splits, ctx.group)
        return gradient, None  # which only leads on to the beginning's backward


def begin_exchange(rows: Tensor, splits: Splits, group: Group | None) -> tuple[Tensor, Way]:
    """Begins to send rows to the ranks of a group, in their order: `[sum(splits.sent), ...]`, differentiably.

    Returns:
        What `settle_exchange` takes.
    """
    way = Way()
    return _Begin.apply(rows, splits, group, way), way  # type: ignore[no-untyped-call]


def settle_exchange(begun: tuple[Tensor, Way]) -> Tensor:
    """Waits for the rows that the others send: `[sum(splits.received), ...]`."""
    return _Settle.apply(*begun)  # type: ignore[no-any-return, no-untyped-call]


def exchange(rows: Tensor, splits: Splits, group: Group | None) -> Tensor:
    """Both."""
    return settle_exchange(begin_exchange(rows, splits, group))
