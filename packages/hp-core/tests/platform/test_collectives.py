"""The one door: right values for every element type a backend may lack, exact records, asynchronous handles."""

from __future__ import annotations

import pytest

from hp_core.testing import run_ranks

DTYPES = "float32 float64 float16 bfloat16 int64 int32 int16 int8 uint8 bool complex64".split()


def test_every_element_type_travels():
    def travel(names):
        import torch

        from hp_core.platform import get_platform
        from hp_core.process_group import group_of_ranks

        group = group_of_ranks((0, 1))
        rank = torch.distributed.get_rank()
        calls = get_platform().collectives
        wrong = []
        for name in names:
            dtype = getattr(torch, name)
            own = torch.tensor([rank, 1, 0, 1]).to(dtype)
            other = torch.tensor([1 - rank, 1, 0, 1]).to(dtype)
            pair = torch.stack([own, other] if rank == 0 else [other, own])
            results = {}
            gathered = torch.empty(8, dtype=dtype)
            calls.all_gather(gathered, own, group)
            results["all_gather"] = (gathered, pair.view(-1))
            reduced = own.clone()
            calls.all_reduce(reduced, "sum", group)
            results["all_reduce"] = (
                reduced,
                (own.int() + other.int()).to(dtype) if dtype.is_complex is False else own + other,
            )
            part = torch.empty(2, dtype=dtype)
            calls.reduce_scatter(part, own, "sum", group)
            results["reduce_scatter"] = (part, results["all_reduce"][1][2 * rank : 2 * rank + 2])
            swapped = torch.empty(4, dtype=dtype)
            calls.all_to_all(swapped, own, [2, 2], [2, 2], group)
            results["all_to_all"] = (swapped, pair[:, 2 * rank : 2 * rank + 2].reshape(-1))
            sent = own.clone()
            calls.broadcast(sent, 1, group)
            results["broadcast"] = (sent, pair[1])
            given = torch.empty(4, dtype=dtype)
            calls.scatter(given, [pair[1], pair[0]] if rank == 0 else None, 0, group)
            results["scatter"] = (given, pair[1 - rank])
            taken = torch.empty(4, dtype=dtype)
            calls.exchange([(own, 1 - rank)], [(taken, 1 - rank)], group)
            results["exchange"] = (taken, other)
            wrong += [(name, kind, a, b) for kind, (a, b) in results.items() if not torch.equal(a, b)]
        return wrong

    assert run_ranks(2, travel, DTYPES) == [[], []]


@pytest.mark.parametrize(("reduce_op", "expected"), [("sum", 3.0), ("avg", 1.5), ("max", 2.0), ("min", 1.0)])
def test_reduce_ops(reduce_op, expected):
    def reduce(reduce_op):
        import torch

        from hp_core.platform import get_platform
        from hp_core.process_group import group_of_ranks

        group = group_of_ranks((0, 1))
        calls = get_platform().collectives
        value = torch.full((4,), torch.distributed.get_rank() + 1.0)
        part = torch.empty(2)
        calls.reduce_scatter(part, value, reduce_op, group)
        work = calls.all_reduce(value, reduce_op, group, async_op=True)
        work.wait()
        return value.tolist() + part.tolist()

    assert run_ranks(2, reduce, reduce_op) == [[expected] * 6] * 2


def test_records_are_exact():
    def record():
        import torch

        from hp_core.platform import get_platform
        from hp_core.platform.recorder import record_collectives
        from hp_core.process_group import group_of_ranks

        group = group_of_ranks((0, 1, 2, 3))
        calls = get_platform().collectives
        x = torch.zeros(8)
        calls.all_reduce(x.clone(), "sum", group)  # outside of any log
        with record_collectives() as log:
            calls.all_gather(torch.empty(32), x, group)
            calls.reduce_scatter(torch.empty(2), x, "sum", group)
            with record_collectives() as inner:
                calls.all_reduce(x, "max", group)
            calls.all_to_all(torch.empty(8), x, [2] * 4, [2] * 4, group)
        return (
            [(r.kind, r.nbytes, r.group_size, r.dtype, r.reduce_op) for r in log],
            len(inner),
            log.nbytes,
            log.summary(),
        )

    records, inner, total, summary = run_ranks(4, record)[0]
    assert records == [
        ("all_gather", 96, 4, "float32", None),
        ("reduce_scatter", 24, 4, "float32", "sum"),
        ("all_reduce", 48, 4, "float32", "max"),
        ("all_to_all", 24, 4, "float32", None),
    ]
    assert inner == 1
    assert total == 192
    assert "all_gather: 1 calls, 96 bytes" in summary
