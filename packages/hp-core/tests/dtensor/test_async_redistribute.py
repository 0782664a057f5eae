"""`redistribute(async_op=True)`: returns while the communication runs, and waits when the result is first used.

To see when, the door of communication is replaced by one that does nothing before it is waited for, as slow as can be.
"""

from __future__ import annotations

import copy
import gc
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import product
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from hp_core import DTensor, Layout, Partial, RaggedShard, Replicate, Shard, distribute_tensor, get_platform
from hp_core.errors import RedistributeError
from hp_core.redistribute import redistribute_cache_clear
from hp_core.testing import assert_same_error, record_collectives, run_ranks

PAIR = Layout((2,), ("tp",))
SQUARE = Layout((2, 2), ("dp", "tp"))
COLLECTIVES = ("all_gather", "reduce_scatter", "all_reduce", "all_to_all")


class Late:
    """A communication that happens when it is waited for; its output is garbage before."""

    def __init__(self, run: Callable[[], None], waited: list[str], kind: str) -> None:
        self.run, self.waited, self.kind = run, waited, kind

    def wait(self) -> None:
        self.waited.append(self.kind)
        self.run()

    def is_completed(self) -> bool:
        return False


@contextmanager
def late_collectives() -> Iterator[tuple[list[str], list[str]]]:
    """Lists of what was launched and of what was waited for. Results are NaN in between."""
    door = get_platform().collectives
    launched: list[str] = []
    waited: list[str] = []

    def late(kind: str, call: Any) -> Any:
        def replaced(output: torch.Tensor, *args: Any) -> Any:
            if not (type(args[-1]) is bool and args[-1]):
                return call(output, *args)
            launched.append(kind)
            if kind == "all_reduce":
                value = output.clone()
                output.fill_(float("nan"))
                return Late(lambda: (output.copy_(value), call(output, *args[:-1])), waited, kind)  # type: ignore[arg-type, return-value]
            output.fill_(float("nan"))
            return Late(lambda: call(output, *args[:-1]), waited, kind)

        return replaced

    redistribute_cache_clear()  # programs keep hold of the door
    for kind in COLLECTIVES:
        setattr(door, kind, late(kind, getattr(door, kind)))
    try:
        yield launched, waited
    finally:
        redistribute_cache_clear()
        for kind in COLLECTIVES:
            delattr(door, kind)


def lay(value: torch.Tensor, layout: Layout, grad: bool = False) -> Any:
    return distribute_tensor(value, layout, src_data_rank=None).requires_grad_(grad)


FIRST_USES: dict[str, Callable[[Any], Any]] = {
    "an op": lambda y: y + 1,
    "a function": lambda y: torch.cat([y, y]),
    "in place": lambda y: y.add_(1),
    "to_local": lambda y: y.to_local(),
    "redistribute": lambda y: y.redistribute(placements=[Shard(1)]),
    "full_tensor": lambda y: y.full_tensor(),
    "grad": lambda y: y.grad,
    "repr": repr,
    "detach": lambda y: y.detach(),
    "sum": lambda y: y.sum().item(),
    "deepcopy": copy.deepcopy,
}


def waits_at(use: str) -> None:
    value = torch.arange(12.0).view(4, 3)
    with late_collectives() as (launched, waited):
        x = lay(value, PAIR("tp"))
        y = x.redistribute(PAIR(), async_op=True)
        assert launched == ["all_gather"]
        assert (tuple(y.shape), y.ndim, y.layout, y.numel(), len(y)) == ((4, 3), 2, PAIR(), 12, 4)
        assert isinstance(y, DTensor)
        assert waited == []  # shape and layout are known before
        FIRST_USES[use](y)
        assert waited == ["all_gather"]
        wanted = value + 1 if use == "in place" else value
        assert torch.equal(y.to_local(), wanted)
        assert waited == ["all_gather"]  # once


@pytest.mark.parametrize("use", FIRST_USES)
def test_the_wait_happens_at_first_use_and_not_earlier(use: str) -> None:
    run_ranks(2, waits_at, use)


def layouts(base: Layout) -> list[Layout]:
    options = [Replicate(), Shard(0), Shard(1), Partial()]
    return [base(*placements) for placements in product(options, repeat=base.mesh.ndim)]


def contribution(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    """This rank's part; what is pending differs between ranks and sums up to the value."""
    own = value[tuple(slice(*interval) for interval in layout.bounds(tuple(value.shape)))].clone()
    coordinate = layout.mesh.get_coordinate()
    for axis, _ in layout.partials:
        own = 3 * own if coordinate[axis] == 0 else -2 * own
    return own.requires_grad_()


def like_synchronous(late: bool) -> int:
    """All pairs of layouts, forward and backward; NaN anywhere means that something was used before it was there."""
    overlapped = 0
    for shape in ((4, 4), (5, 3)):
        value = torch.arange(float(shape[0] * shape[1]), dtype=torch.float64).view(shape)
        direction = value.flip(0) + 1
        every = [*layouts(SQUARE), SQUARE(("tp", "dp")), SQUARE(Replicate(), RaggedShard((1, 0))), SQUARE("tp", "dp")]
        for src, dst in product(every, repeat=2):
            results = []
            for async_op in (False, True):
                local = contribution(value, src)
                x = DTensor.from_local(local, src, shape=shape)
                if late and async_op:
                    with late_collectives() as (launched, waited):
                        y = x.redistribute(dst, async_op=True)
                        overlapped += len(launched) > len(waited)
                        forward = y.to_local().detach()
                else:
                    y = x.redistribute(dst, async_op=async_op)
                    forward = y.to_local().detach()
                y.backward(lay(direction, dst.gradient))
                results.append((forward, local.grad))
            for told, (one, other) in zip(("value", "gradient"), zip(*results, strict=True), strict=True):
                assert torch.equal(one, other), (told, shape, src, dst)
    return overlapped


def test_values_and_gradients_are_those_of_the_synchronous_call() -> None:
    run_ranks(4, like_synchronous, False)


def test_nothing_is_used_before_it_is_there() -> None:
    """With communication as late as can be; most pairs have some to overlap."""
    assert min(run_ranks(4, like_synchronous, True)) > 200


def tied_gather() -> dict[str, int]:
    value, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(6, 6, dtype=torch.float64)
    torch.distributed.broadcast(value, 0)
    torch.distributed.broadcast(weight, 0)
    x, cut = lay(value, PAIR("tp"), grad=True), lay(weight, PAIR("tp"))
    gathered = x.redistribute(PAIR(), async_op=True)
    loss = F.linear(gathered, cut).square().sum()
    with record_collectives() as log:
        loss.backward()
    dense = value.clone().requires_grad_()
    F.linear(dense, weight).square().sum().backward()
    torch.testing.assert_close(x.grad.full_tensor(), dense.grad)
    return dict(log.counts)


def test_a_gradient_still_goes_straight_to_what_was_gathered() -> None:
    assert run_ranks(2, tied_gather) == [{"reduce_scatter": 1}] * 2


def grad_mode_of_the_launch() -> None:
    x = lay(torch.arange(4.0), PAIR("tp"), grad=True)
    y = x.redistribute(PAIR(), async_op=True)
    with torch.no_grad():
        assert y.to_local().tolist() == [0.0, 1.0, 2.0, 3.0]
    assert y.requires_grad
    y.sum().backward()
    assert x.grad.to_local().tolist() == [1.0, 1.0]
    with torch.no_grad():
        z = x.redistribute(PAIR(), async_op=True)
    assert not z.requires_grad


def test_gradients_are_recorded_as_they_were_at_the_launch() -> None:
    run_ranks(2, grad_mode_of_the_launch)


def several_at_once() -> None:
    values = [torch.full((4, 2), float(i)) for i in range(5)]
    on_the_way = [lay(value, PAIR("tp")).redistribute(PAIR(None, "tp"), async_op=True) for value in values]
    on_the_way += [DTensor.from_local(value, PAIR(Partial())).redistribute(PAIR(), async_op=True) for value in values]
    for index in (7, 2, 9, 0):  # in any order, and some never
        expected = values[index] if index < 5 else 2 * values[index - 5]
        assert torch.equal(on_the_way[index].full_tensor(), expected)


def test_several_may_be_on_their_way() -> None:
    run_ranks(2, several_at_once)


def dropped() -> None:
    x = lay(torch.arange(8.0), PAIR("tp"), grad=True)
    y = x.redistribute(PAIR(), async_op=True)
    gone = weakref.ref(y)
    del y
    gc.collect()
    assert gone() is None
    assert torch.equal(x.redistribute(PAIR()).to_local().detach(), torch.arange(8.0))
    assert x.grad is None


def test_a_result_may_be_dropped_unused() -> None:
    run_ranks(2, dropped)


def nothing_to_wait_for() -> None:
    x = lay(torch.arange(4.0), PAIR())
    with record_collectives() as log:
        y = x.redistribute(PAIR("tp"), async_op=True)
        assert x.redistribute(PAIR(), async_op=True) is x
    assert not log
    assert "_local" in y.__dict__


def test_a_local_move_is_done_at_once() -> None:
    run_ranks(2, nothing_to_wait_for)


def written_meanwhile() -> None:
    x = lay(torch.arange(4.0), PAIR("tp"))
    y = x.redistribute(PAIR(), async_op=True)
    x.add_(1)
    y.to_local()


def test_a_write_to_the_source_is_an_error_at_first_use() -> None:
    assert_same_error(2, written_meanwhile, RedistributeError, r"written to while.*Use the result before")


def unknown() -> None:
    lay(torch.arange(4.0), PAIR("tp")).no_such_attribute  # noqa: B018


def test_a_missing_attribute_is_still_missing() -> None:
    assert_same_error(2, unknown, AttributeError, "'DTensor' object has no attribute 'no_such_attribute'")
