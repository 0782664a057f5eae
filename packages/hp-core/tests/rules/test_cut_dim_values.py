"""Ops along a cut dim: values that only some ranks hold (NaN, infinities, ties, nothing), rounding, and what is sent.

Pieces are uneven, and some rank holds nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F

from hp_core import DTensor, Layout, Partial, RaggedShard, Shard, distribute_tensor, init_device_mesh
from hp_core.platform.recorder import CollectiveLog, record_collectives
from hp_core.testing import run_ranks

INF, NAN = float("inf"), float("nan")
Op = Callable[[torch.Tensor], object]


def a_layout() -> Layout:
    return Layout.from_device_mesh(init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)))


def layouts() -> list[Layout]:
    """Along dim 0 of 5 rows: 2, 2, 1 and none; or none, 2, 1 and 2."""
    layout = a_layout()
    return [layout("tp"), layout(RaggedShard((0, 2, 1, 2)))]


def as_tensors(result: object) -> list[torch.Tensor]:
    return [result] if isinstance(result, torch.Tensor) else list(result)  # type: ignore[call-overload]


def weighted(results: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> torch.Tensor | None:
    """A sum of the results with unequal weights; None if none has a gradient."""
    total = None
    for result, model in zip(results, like, strict=True):
        if model.is_floating_point():
            weight = torch.arange(1.0, 1 + model.numel(), dtype=model.dtype).reshape(model.shape)
            if isinstance(result, DTensor):
                weight = distribute_tensor(weight, result.layout.gradient, src_data_rank=None)
            part = (result * weight).sum()
            total = part if total is None else total + part
    return total


def differences(ops: dict[str, Op], columns: list[list[float]], tolerance: float) -> list[str]:
    """Run each op on the columns, cut along dim 0, and compare values and gradients with dense; on each rank."""
    values = torch.tensor(columns, dtype=torch.float64).T.contiguous()
    faults = []
    for name, op in ops.items():
        dense = values.clone().requires_grad_()
        expected = as_tensors(op(dense))
        loss = weighted(expected, expected)
        if loss is not None:
            loss.backward()
        for layout in layouts():
            x = distribute_tensor(values, layout, src_data_rank=None).requires_grad_()
            results = as_tensors(op(x))
            for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
                full = result.detach().full_tensor()
                if not torch.allclose(full, wanted.detach(), equal_nan=True, rtol=tolerance, atol=tolerance):
                    faults.append(f"{name} {layout.compact_str}: output {index} is {full} for {wanted}")
            if loss is None:
                continue
            weighted(results, expected).backward()
            gradient = x.grad.full_tensor()
            if not torch.allclose(gradient, dense.grad, equal_nan=True, rtol=tolerance, atol=tolerance):
                faults.append(f"{name} {layout.compact_str}: the gradient is {gradient} for {dense.grad}")
    return faults


def check(ops: dict[str, Op], columns: list[list[float]], tolerance: float = 1e-11) -> None:
    results = run_ranks(4, differences, ops, columns, tolerance)
    assert not any(results), "\n".join(dict.fromkeys(fault for faults in results for fault in faults))


EXTREMA: dict[str, Op] = {
    "amax": lambda x: x.amax(0),
    "amin": lambda x: x.amin(0, True),
    "aminmax": lambda x: x.aminmax(dim=0),
    "max": lambda x: x.max(),
    "min": lambda x: x.min(),
    "max dim": lambda x: x.max(0),
    "min dim": lambda x: x.min(0),
    "argmax": lambda x: (x.argmax(0), x.argmin(0), x.argmax(), x.argmin()),
    "cummax": lambda x: x.cummax(0),
    "cummin": lambda x: x.cummin(0),
    "inf norm": lambda x: torch.linalg.vector_norm(x, INF, 0),
}


def test_the_gradient_of_ties_is_shared_among_all_of_them_on_all_ranks() -> None:
    """One tie on one rank, two on another: each gets a third, not a half and two quarters."""
    check(EXTREMA, [[3, 3, 1, 2, 3], [0, 0, 0, 0, 0], [1, -2, -2, 5, 5], [-4, -3, -2, -2, -1]])


@pytest.mark.parametrize("row", range(5))
def test_a_nan_on_any_rank_is_the_extremum(row: int) -> None:
    column = [1.0, 2.0, 3.0, 4.0, 5.0]
    column[row] = NAN
    check(EXTREMA, [column, [5.0, 4.0, 3.0, 2.0, 1.0], [1, NAN, 3, NAN, 2]])


def test_extrema_of_infinities() -> None:
    check(EXTREMA, [[-INF] * 5, [INF] * 5, [-INF, 1, INF, INF, 0], [0, -INF, -1, -INF, 2]])


SOFTMAX: dict[str, Op] = {
    "softmax": lambda x: x.softmax(0),
    "log_softmax": lambda x: x.log_softmax(0),
    "softmin": lambda x: F.softmin(x, 0),
    "logsumexp": lambda x: x.logsumexp(0),
}


@pytest.mark.parametrize(
    "column", [[-INF] * 5, [-INF, 1, -INF, 2, -INF], [1, INF, 2, 3, 4], [1, 2, 3, 4, NAN], [1e4, 1, 2, 3, -1e4]]
)
def test_softmax_of_infinities(column: list[float]) -> None:
    check(SOFTMAX, [column, [1, 2, 3, 4, 5]])


def test_scans_and_products_of_special_values() -> None:
    scans: dict[str, Op] = {
        "cumsum": lambda x: x.cumsum(0),
        "cumprod": lambda x: x.cumprod(0),
        "prod": lambda x: x.prod(0),
    }
    check(scans, [[1, 0, 2, 0, 3], [2, 3, 0, 4, 5], [0, 1, 2, 3, 4], [-1, 2, -3, 4, -5]])
    check({"cumsum": scans["cumsum"]}, [[1, INF, 2, 3, 4], [1, 2, 3, NAN, 4], [INF, 1, 2, 3, -INF]])


def test_logcumsumexp_after_nothing() -> None:
    """Leading -inf; the gradient of the dense op is NaN there, so only the values are compared."""
    check(
        {"logcumsumexp": lambda x: x.detach().logcumsumexp(0) + 0 * x}, [[-INF, -INF, -INF, 1.0, 2.0], [1, 2, 3, 4, 5]]
    )


def test_top_values_among_nans_and_infinities() -> None:
    ops: dict[str, Op] = {
        "largest": lambda x: x.topk(3, 0)[0],
        "smallest": lambda x: x.topk(4, 0, largest=False)[0],
        "where": lambda x: x.gather(0, x.topk(2, 0)[1]) if not isinstance(x, DTensor) else x.topk(2, 0)[0],
    }
    check(ops, [[-INF, 1, -INF, NAN, 0], [1, 2, 3, 4, 5], [-INF, -INF, 2, 1, 0]])


def test_indices_of_the_top_point_at_their_values() -> None:
    def on_rank() -> list[bool]:
        values = torch.tensor([[2.0, 2.0, 1.0, 2.0, 2.0]]).T
        found = []
        for layout in layouts():
            best, indices = distribute_tensor(values, layout, src_data_rank=None).topk(3, 0)
            places = indices.full_tensor().flatten().tolist()
            found.append(len(set(places)) == 3 and torch.equal(values[places], best.full_tensor()))
        return found

    assert all(all(found) for found in run_ranks(4, on_rank))


# -- rounding ---------------------------------------------------------------------------------------------------------


def test_a_large_offset_costs_no_digits() -> None:
    def on_rank() -> list[tuple[float, float]]:
        generator = torch.Generator().manual_seed(0)
        values = torch.randn(64, 3, generator=generator) + 1e6
        exact = values.double()
        x = distribute_tensor(values, a_layout()("tp"), src_data_rank=None)
        errors = []
        for op in (lambda t: t.var(0), lambda t: t.std(), lambda t: F.layer_norm(t.T, (64,))):
            wanted = op(exact)
            ours = (op(x).full_tensor() - wanted).abs().max()
            errors.append((float(ours), float((op(values) - wanted).abs().max())))
        return errors

    for errors in run_ranks(4, on_rank):
        for ours, dense in errors:
            assert ours <= max(4 * dense, 1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_float32(dtype: torch.dtype) -> None:
    """As the dense ops do: so the results differ from theirs by one rounding at most."""

    def on_rank() -> list[str]:
        generator = torch.Generator().manual_seed(0)
        values = (torch.randn(5, 40, generator=generator) * 4).to(dtype)
        weight = torch.rand(40, generator=generator).to(dtype)
        layout = a_layout()
        faults = []
        ops: dict[str, Callable[..., torch.Tensor]] = {
            "softmax": lambda x, w: x.softmax(1),
            "log_softmax": lambda x, w: x.log_softmax(1),
            "logsumexp": lambda x, w: x.logsumexp(1),
            "var": lambda x, w: x.var(1),
            "layer_norm": lambda x, w: F.layer_norm(x, (40,), w, w),
            "rms_norm": lambda x, w: F.rms_norm(x, (40,), w),
            "group_norm": lambda x, w: F.group_norm(x, 2, w, w),
            "amax": lambda x, w: x.amax(1),
        }
        for name, op in ops.items():
            dense = [values.clone().requires_grad_(), weight.clone().requires_grad_()]
            wanted = op(*dense)
            wanted.backward(torch.ones_like(wanted))
            x = distribute_tensor(values, layout(None, "tp"), src_data_rank=None).requires_grad_()
            w = distribute_tensor(weight, layout(), src_data_rank=None).requires_grad_()
            result = op(x, w)
            result.sum(dtype=torch.float32).backward()
            pairs = [(result.full_tensor(), wanted), (x.grad.full_tensor(), dense[0].grad)]
            if dense[1].grad is not None:
                pairs.append((w.grad.full_tensor(), dense[1].grad))
            for index, (ours, theirs) in enumerate(pairs):
                if ours.dtype != dtype or not torch.allclose(ours.float(), theirs.float(), rtol=2e-2, atol=2e-2):
                    faults.append(f"{name} {index}: {(ours.float() - theirs.float()).abs().max()}")
        return faults

    for faults in run_ranks(4, on_rank):
        assert not faults


# -- what is sent -----------------------------------------------------------------------------------------------------

ROWS, LENGTH = 8, 1024
REDUCED = ROWS * 4  # bytes of a float32 statistic per row


def in_rings(nbytes: int, times: int = 1) -> int:
    """What one of 4 ranks sends in all-reduces of so many bytes."""
    return times * -(-2 * 3 * nbytes // 4)


def sent(op: Callable[..., torch.Tensor], backward: bool) -> tuple[dict[str, int], int, dict[str, int], int]:
    """Collectives and bytes forward and backward of an op on [rows, length], cut along the rows' length."""
    x = distribute_tensor(torch.randn(ROWS, LENGTH), a_layout()(None, "tp"), src_data_rank=None).requires_grad_(
        backward
    )
    op(x)  # what is planned once is not looked at
    with record_collectives() as forward:
        result = op(x)
        if isinstance(result, DTensor):
            result = result.reduce_partial()
    after = CollectiveLog()
    if backward:
        gradient = distribute_tensor(torch.ones(result.shape), result.layout, src_data_rank=None)
        with record_collectives() as after:
            result.backward(gradient)
    return dict(forward.counts), forward.nbytes, dict(after.counts), after.nbytes


@pytest.mark.parametrize(
    ("op", "forward", "nbytes", "after", "nbytes_after"),
    [
        pytest.param(
            lambda x: x.softmax(1),
            {"all_reduce": 2},
            in_rings(REDUCED, 2),
            {"all_reduce": 1},
            in_rings(REDUCED),
            id="softmax",
        ),
        pytest.param(
            lambda x: x.log_softmax(1),
            {"all_reduce": 2},
            in_rings(REDUCED, 2),
            {"all_reduce": 1},
            in_rings(REDUCED),
            id="log_softmax",
        ),
        pytest.param(lambda x: x.logsumexp(1), {"all_reduce": 2}, in_rings(REDUCED, 2), {}, 0, id="logsumexp"),
        pytest.param(lambda x: x.var(1), {"all_reduce": 2}, in_rings(REDUCED) + in_rings(2 * REDUCED), {}, 0, id="var"),
        pytest.param(
            lambda x: F.layer_norm(x, (LENGTH,)),
            {"all_reduce": 2},
            in_rings(REDUCED) + in_rings(2 * REDUCED),
            {"all_reduce": 1},
            in_rings(2 * REDUCED),
            id="layer_norm",
        ),
        pytest.param(
            lambda x: F.rms_norm(x, (LENGTH,)),
            {"all_reduce": 1},
            in_rings(REDUCED),
            {"all_reduce": 1},
            in_rings(REDUCED),
            id="rms_norm",
        ),
        pytest.param(
            lambda x: torch.linalg.vector_norm(x, 2, 1), {"all_reduce": 1}, in_rings(REDUCED), {}, 0, id="vector_norm"
        ),
        pytest.param(
            lambda x: x.amax(1),
            {"all_reduce": 1},
            in_rings(REDUCED),
            {"all_reduce": 1},
            in_rings(2 * REDUCED),
            id="amax",
        ),
        pytest.param(lambda x: x.prod(1), {"all_gather": 1}, 3 * REDUCED, {}, 0, id="prod"),
        pytest.param(lambda x: x.max(1).values, {"all_gather": 1}, 3 * 3 * REDUCED, {}, 0, id="max"),
        pytest.param(lambda x: x.topk(5, 1).values, {"all_gather": 1}, 5 * 3 * 3 * REDUCED, {}, 0, id="topk"),
        pytest.param(
            lambda x: x.cumsum(1), {"all_gather": 1}, 3 * REDUCED, {"reduce_scatter": 1}, 3 * REDUCED, id="cumsum"
        ),
    ],
)
def test_what_is_sent_has_the_reduced_shape(
    op: Callable[..., torch.Tensor], forward: dict[str, int], nbytes: int, after: dict[str, int], nbytes_after: int
) -> None:
    for result in run_ranks(4, sent, op, True):
        assert result == (forward, nbytes, after, nbytes_after)


def test_extrema_and_flags_stay_pending_where_no_gradient_is_asked_for() -> None:
    def on_rank() -> tuple[list[tuple[str | None, ...]], int]:
        x = distribute_tensor(torch.randn(5, 3), a_layout()("tp"), src_data_rank=None)
        leaf = x.detach().requires_grad_()
        with record_collectives() as log:
            results = [x.amax(0), x.min(), (x > 0).any(0), (x > 0).all(), torch.linalg.vector_norm(x, INF)]
            with torch.no_grad():
                results.append(leaf.amax(0))
        return [result.layout.partial for result in results], len(log)

    for pending, messages in run_ranks(4, on_rank):
        assert pending == [(reduce_op,) for reduce_op in ("max", "min", "max", "min", "max", "max")]
        assert messages == 0


def test_a_dim_that_is_whole_takes_one_local_call() -> None:
    """The hot path: nothing is sent, and nothing is put together from other ops."""

    def on_rank() -> tuple[int, list[str]]:
        from hp_core.dtensor import dispatch

        dispatch.dispatch_cache_clear()
        x = distribute_tensor(torch.randn(8, 6), a_layout()("tp"), src_data_rank=None).requires_grad_()
        w = distribute_tensor(torch.randn(6), a_layout()(), src_data_rank=None)
        with record_collectives() as log:
            x.softmax(1), F.layer_norm(x, (6,), w), F.rms_norm(x, (6,), w), x.amax(1), x.var(1), x.cumsum(1)
            x.max(1), x.prod(1), torch.linalg.vector_norm(x, 2, 1), x.logsumexp(1), x.topk(2), F.normalize(x)
        return len(log), [type(plan).__name__ for plan in dispatch._plans.values()]

    for messages, plans in run_ranks(4, on_rank):
        assert messages == 0
        assert plans == ["OpPlan"] * 12


def test_a_pending_sum_is_finished_once_before_what_isnt_linear() -> None:
    """And stays pending through what is."""

    def on_rank() -> tuple[bool, int, list[tuple[str | None, ...]]]:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        whole = torch.arange(12.0).reshape(2, 6)
        layout = Layout.from_device_mesh(mesh)(Partial(), Shard(1))
        share = whole if mesh.get_local_rank("dp") else -0.5 * whole
        own = share[:, slice(3) if mesh.get_local_rank("tp") == 0 else slice(3, 6)].contiguous()
        x = DTensor.from_local(own, layout, shape=(2, 6))
        with record_collectives() as log:
            result = x.softmax(1)
        linear = [x.sum(1), x.mean(1), x.cumsum(0)]
        equal = torch.allclose(result.full_tensor(), (0.5 * whole).softmax(1))
        return equal, len(log), [one.layout.partial for one in linear]

    for equal, messages, linear in run_ranks(4, on_rank):
        assert equal
        assert messages == 3
        assert linear == [("sum", "sum"), ("sum", "sum"), ("sum", None)]
