"""The built-in orders by name, and the one function that builds any of them with its arguments checked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from hp_core.errors import PlanError
from hp_pipeline.bulk import in_bulk
from hp_pipeline.orders.looped import interleaved_1f1b, interleaved_zero_bubble, looped_bfs, zb_h1
from hp_pipeline.orders.simple import gpipe, one_f_one_b
from hp_pipeline.orders.v_shaped import dualpipe_v, zb_v
from hp_pipeline.schedule import Schedule

__all__ = ["ORDERS", "Order", "build_order"]


@dataclass(frozen=True)
class Order:
    """A way to order the computations of a pipeline.

    Attributes:
        build: from numbers of ranks, micro-batches and chunks (stages per rank) to the schedule.
        chunks: the number of chunks if it isn't said.
        fixed: only that number of chunks is possible.
    """

    build: Callable[[int, int, int], Schedule]
    chunks: int
    fixed: bool

    def __call__(self, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
        """The schedule; see `build_order` for what is refused."""
        return self.build(ranks, micro_batches, self.chunks if chunks is None else chunks)


def _fixed(build: Callable[[int, int], Schedule], chunks: int) -> Order:
    return Order(lambda ranks, micro_batches, _: build(ranks, micro_batches), chunks, True)


ORDERS: dict[str, Order] = {
    "gpipe": _fixed(gpipe, 1),
    "1f1b": _fixed(one_f_one_b, 1),
    "zbh1": _fixed(zb_h1, 1),
    "loopedbfs": Order(looped_bfs, 2, False),
    "interleaved1f1b": Order(interleaved_1f1b, 2, False),
    "interleavedzb": Order(interleaved_zero_bubble, 2, False),
    "zbv": _fixed(zb_v, 2),
    "dualpipev": _fixed(dualpipe_v, 2),
}
"""Name -> order. Add one's own: `ORDERS["mine"] = Order(function, chunks=1, fixed=True)`."""


@in_bulk
def build_order(name: str, ranks: int, micro_batches: int, chunks: int | None = None) -> Schedule:
    """The compute steps of a pipeline: F, B, I, W and OVERLAP_B_F, without communication.

    Args:
        name: one of `ORDERS`; case, `-` and `_` don't matter ("ZB-V" is "zbv").
        ranks: how many ranks the pipeline has.
        micro_batches: any number >= 1.
        chunks: stages per rank; None for what the order has by itself (1, or 2 where it needs several).

    Raises:
        PlanError: no such order, a number below 1, or a number of chunks that the order can't have.
    """
    order = ORDERS.get(name) or ORDERS.get(name.lower().replace("-", "").replace("_", ""))
    if order is None:
        raise PlanError(f"there is no schedule {name!r}; there are {', '.join(ORDERS)}.")
    for what, number in (("ranks", ranks), ("micro-batches", micro_batches), ("chunks", chunks)):
        if number is not None and number < 1:
            raise PlanError(f"schedule {name}: {number} {what}; at least 1 is needed.")
    if order.fixed and chunks not in (None, order.chunks):
        raise PlanError(
            f"schedule {name} has {order.chunks} stage(s) per rank, not {chunks}; leave chunks away or take another order."
        )
    return order(ranks, micro_batches, chunks)
