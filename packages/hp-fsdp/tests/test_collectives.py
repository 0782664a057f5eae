"""What a step communicates, copies, calls and holds in memory: counted, for a stack of blocks without anything outside of them."""

from __future__ import annotations

import sys
from collections import Counter
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten
from torch.utils.checkpoint import checkpoint

from hp_core.testing import record_collectives, run_ranks
from hp_fsdp import fully_shard

FOUR = pytest.mark.parametrize("ranks", [4], indirect=True)
BLOCKS = 5
WIDTH = 16


class Stack(nn.Module):
    """Blocks, and nothing else that has parameters."""

    def __init__(self, block: Any) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(block(WIDTH) for _ in range(BLOCKS))

    def forward(self, x: torch.Tensor, run: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x) if run is None else run(block, x)
        return x


def stack(bed: Any, kind: str = "fsdp", dtype: Any = torch.float32, **options: Any) -> Any:
    """A bed of a stack, whose first step, which also compares ranks, is over."""
    it = bed(kind, build=lambda: Stack(bed.Block), dtype=dtype, **options)
    step(it)
    it.optimizers[1].step()
    it.optimizers[1].zero_grad()
    return it


def step(it: Any, **options: Any) -> None:
    """A forward and a backward of the sharded model."""
    it.model(torch.ones(3, WIDTH, dtype=next(it.model.parameters()).dtype), **options).square().mean().backward()


def padded(it: Any) -> list[int]:
    """Bytes of the whole buffer of each unit below the model, padding included."""
    return [
        sum(s.plan.ranks * s.plan.chunk * s.dtype.itemsize for s in block._unit.segments) for block in it.model.blocks
    ]


def test_gathers_and_reductions_of_a_step(bed: Any, ranks: int) -> None:
    """2L - 1 all-gathers and L reduce-scatters of L blocks, each of exactly the padded buffer."""

    def body(bed: Any) -> None:
        it = stack(bed)
        with record_collectives() as log:
            step(it)
        assert log.counts == {"all_gather": 2 * BLOCKS - 1, "reduce_scatter": BLOCKS}
        sent = {size * (it.size - 1) // it.size for size in padded(it)}
        assert {record.nbytes for record in log} == {size // it.size * (it.size - 1) for size in padded(it)} == sent
        exact = sum(parameter.numel() for parameter in it.dense.blocks[0].parameters())
        assert 4 * exact <= padded(it)[0] < 4 * exact + 4 * 16 * it.size

    run_ranks(ranks, body, bed)


COUNTS: dict[str, tuple[dict[str, Any], Counter[str]]] = {
    "kept after the forward": ({"reshard_after_forward": False}, Counter(all_gather=BLOCKS, reduce_scatter=BLOCKS)),
    "shared by two after the forward": (
        {"reshard_after_forward": 2},
        Counter(all_gather=2 * BLOCKS - 1, reduce_scatter=BLOCKS),
    ),
    "no overlap": ({"overlap": False}, Counter(all_gather=2 * BLOCKS - 1, reduce_scatter=BLOCKS)),
}


@pytest.mark.parametrize("name", COUNTS)
@FOUR
def test_gathers_and_reductions_under_options(bed: Any, ranks: int, name: str) -> None:
    def body(bed: Any, options: Any, expected: Any) -> None:
        it = stack(bed, **options)
        with record_collectives() as log:
            step(it)
        assert log.counts == expected
        groups = Counter(record.group_size for record in log)
        if options.get("reshard_after_forward") == 2:
            assert groups[2] == 4

    run_ranks(ranks, body, bed, *COUNTS[name])


def test_recomputation_gathers_nothing_twice(bed: Any, ranks: int) -> None:
    """Kept parameters are gathered once per step (case 39), resharded ones as often as without recomputation."""

    def body(bed: Any) -> None:
        for keep in (True, False):
            it = stack(bed, reshard_after_forward=not keep)
            for reentrant in (False, True):
                with record_collectives() as log:
                    x = torch.ones(3, WIDTH, requires_grad=True)
                    out = it.model(x, run=lambda block, x, way=reentrant: checkpoint(block, x, use_reentrant=way))
                    out.square().mean().backward()
                assert log.counts["reduce_scatter"] == BLOCKS
                assert log.counts["all_gather"] == (BLOCKS if keep else 2 * BLOCKS - 1), (
                    keep,
                    reentrant,
                    log.summary(),
                )

    run_ranks(ranks, body, bed)


def test_one_all_reduce_per_unit_and_window(bed: Any, ranks: int) -> None:
    """HSDP with three micro-batches: each is reduce-scattered, the last goes over the replicas."""

    def body(bed: Any) -> None:
        it = stack(bed, "hsdp")
        shards = it.mesh.shape[1]
        with record_collectives() as log:
            for micro in range(3):
                it.model.set_requires_all_reduce(micro == 2)
                step(it)
        assert log.counts["all_reduce"] == BLOCKS
        assert log.counts["reduce_scatter"] == (3 * BLOCKS if shards > 1 else 0)
        chunk = padded(it)[0] // shards
        assert {record.nbytes for record in log if record.kind == "all_reduce"} == {chunk}

    run_ranks(ranks, body, bed)


def test_nothing_is_reduced_without_sync(bed: Any, ranks: int) -> None:
    """Four micro-batches: reductions only in the last (case 33)."""

    def body(bed: Any) -> None:
        it = stack(bed)
        with record_collectives() as log, it.model.no_sync():
            for _ in range(3):
                step(it)
        assert log.counts == {"all_gather": 3 * (2 * BLOCKS - 1)}
        with record_collectives() as log:
            step(it)
        assert log.counts == {"all_gather": 2 * BLOCKS - 1, "reduce_scatter": BLOCKS}

    run_ranks(ranks, body, bed)


def test_a_unit_of_two_modules_is_gathered_once_per_forward(bed: Any, ranks: int) -> None:
    """Also by ranks that call only one of them."""

    def shard(model: Any, mesh: Any) -> None:
        for place in (0, 2):
            fully_shard([model.blocks[place], model.blocks[place + 1]], mesh=mesh)
        fully_shard(model, mesh=mesh)

    def body(bed: Any) -> None:
        it = bed(build=lambda: Stack(bed.Block), dtype=torch.float32, shard=shard)
        second = it.model.blocks[1]
        step(it)
        for both in (True, False):
            with record_collectives() as log:
                step(it, run=lambda block, x, both=both: x if block is second and it.rank and not both else block(x))
            # two units of two blocks, and the model's own; backward: the first of them, as the others were kept
            assert log.counts == {"all_gather": 3 + 1, "reduce_scatter": 3}
            assert not it.held_whole()

    run_ranks(ranks, body, bed)


def test_evaluation_gathers_each_unit_once(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        it = stack(bed)
        with record_collectives() as log, torch.no_grad():
            it.model(torch.ones(3, WIDTH))
        assert log.counts == {"all_gather": BLOCKS}
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


def test_building_communicates_nothing(bed: Any, ranks: int) -> None:
    def body(bed: Any) -> None:
        with record_collectives() as log:
            bed()
        assert not log

    run_ranks(ranks, body, bed)


class Copies(TorchDispatchMode):
    """Bytes that operations copy, and the storages that they copied to, by operation; arithmetic isn't counted."""

    NAMES = (
        "copy",
        "cat",
        "split_with_sizes_copy",
        "clone",
        "stack",
        "_to_copy",
        "_foreach_copy",
        "contiguous",
        "pad",
        "scatter",
    )

    def __init__(self) -> None:
        super().__init__()
        self.nbytes: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__.strip("_")
        if name in {one.strip("_") for one in self.NAMES}:
            tensors = [
                one for one in tree_flatten(args[0] if name == "foreach_copy" else out)[0] if torch.is_tensor(one)
            ]
            self.nbytes[name] += sum(one.numel() * one.element_size() for one in tensors)
        return out


@pytest.mark.parametrize("kind", ["fsdp", "hsdp"])
def test_no_copies_around_collectives(bed: Any, ranks: int, kind: str) -> None:
    """In fp32 all that is copied is what a collective itself puts in place: the own chunk, once per gather.

    Padding, packing, unpacking and casting copy nothing, neither forward nor backward.
    """

    def body(bed: Any) -> dict[str, int]:
        it = stack(bed, kind)
        shards = it.mesh.shape[-1]
        with Copies() as counted:
            step(it)
        own = padded(it)[0] // shards
        moves = 2 * BLOCKS - 1 + (BLOCKS if shards == 1 else 0)  # among one rank a reduction is a copy as well
        assert sum(counted.nbytes.values()) <= own * moves, counted.nbytes
        return dict(counted.nbytes)

    run_ranks(ranks, body, bed)


def calls_of(model: Any) -> int:
    """Python calls of a step of a model."""
    calls = 0

    def count(frame: Any, event: str, _: Any) -> None:
        nonlocal calls
        calls += event == "call"

    x = torch.ones(3, WIDTH)
    before = sys.getprofile()
    sys.setprofile(count)
    try:
        model(x).square().mean().backward()
    finally:
        sys.setprofile(before)
    return calls


@FOUR
def test_python_calls_of_a_steady_step(bed: Any, ranks: int) -> None:
    """Fewer than 300 per unit and step beyond those of the dense model, all packages counted."""

    def body(bed: Any) -> float:
        it = stack(bed)
        for _ in range(2):
            step(it)
            it.optimizers[1].zero_grad()
        return (calls_of(it.model) - calls_of(it.dense)) / BLOCKS

    calls = run_ranks(ranks, body, bed)
    assert max(calls) < 300, calls


def test_gathered_parameters_that_live_at_once(bed: Any, ranks: int) -> None:
    """In the forward the unit that computes and the next one; in the backward no more."""

    def body(bed: Any) -> None:
        it = stack(bed)
        peaks = {"forward": 0, "backward": 0}

        def look(phase: str) -> None:
            buffers = [segment.buffer for block in it.model.blocks for segment in block._unit.segments]
            held = sum(buffer.untyped_storage().size() > 0 for buffer in buffers)
            peaks[phase] = max(peaks[phase], held)

        for block in it.model.blocks:
            block.up.register_forward_hook(lambda *_: look("forward"))
            block.norm.register_forward_hook(
                lambda module, args, out: out.register_hook(lambda _: look("backward")) and None
            )
        step(it)
        assert peaks == {"forward": 2, "backward": 2}
        assert not it.held_whole()

    run_ranks(ranks, body, bed)


def test_gradient_buffers_that_live_at_once(bed: Any, ranks: int) -> None:
    """That of the unit whose backward runs, and the one before, which is on its way; none after the backward."""

    def body(bed: Any) -> None:
        it = stack(bed)
        segments = [segment for block in it.model.blocks for segment in block._unit.segments]
        peaks = []

        def look(*_: Any) -> None:
            peaks.append(sum(segment.gradients.untyped_storage().size() > 0 for segment in segments))

        for block in it.model.blocks:
            block.norm.register_forward_hook(lambda module, args, out: out.register_hook(look) and None)
        step(it)
        assert max(peaks) == 2
        look()
        assert peaks[-1] == 0

    run_ranks(ranks, body, bed)


def test_prefetching_is_one_unit_ahead(bed: Any, ranks: int) -> None:
    """A unit's gather is issued before the one in front of it computes, and not earlier; without overlap when it is used."""

    def body(bed: Any) -> None:
        for overlap in (True, False):
            it = stack(bed, overlap=overlap)
            with record_collectives() as log, torch.no_grad():
                issued: list[int] = []
                count = partial(lambda log, issued, *_: issued.append(len(log)), log, issued)
                for block in it.model.blocks:
                    block.norm.register_forward_pre_hook(count)
                it.model(torch.ones(3, WIDTH))
            ahead = int(overlap)
            assert issued == [min(place + 1 + ahead, BLOCKS) for place in range(BLOCKS)]

    run_ranks(ranks, body, bed)


def test_an_embedding_by_itself_is_not_gathered_for_its_backward(bed: Any, ranks: int) -> None:
    """Case 43; frozen parameters are gathered but not reduced (case 37)."""

    def shard(model: Any, mesh: Any) -> None:
        fully_shard(model.embed, mesh=mesh)
        bed.shard_blocks(model, mesh)

    def freeze(model: Any) -> None:
        model.blocks[1].requires_grad_(False)
        model.blocks[2].up.weight.requires_grad_(False)

    def body(bed: Any) -> None:
        it = bed(shard=shard, prepare=freeze)
        it.backward(0)
        with record_collectives() as log:
            bed.loss_of(it.model, it.rank, 1).backward()
        # forward: embedding, root, blocks, the last with a frozen part; backward: what wasn't kept, as the last and the root were
        assert log.counts == {"all_gather": (1 + 1 + 1 + 1 + 2) + (1 + 1), "reduce_scatter": 1 + 1 + 1 + 1}
        matrix = it.dense.blocks[2].up.weight.numel()
        reduced = sum(record.nbytes for record in log if record.kind == "reduce_scatter") / (it.size - 1) * it.size
        trained = sum(p.numel() for p in it.dense.parameters() if p.requires_grad)
        assert reduced < 8 * (trained + 4 * 16 * it.size) < 8 * (trained + matrix + 4 * 16 * it.size)

    run_ranks(ranks, body, bed)
