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


def test_gathers_and_reductions_over_gloo_may_overlap_and_lie_in_their_own_buffers():
    def overlap():
        import torch

        from hp_core.platform import get_platform
        from hp_core.process_group import group_of_ranks

        group = group_of_ranks((0, 1, 2, 3))
        calls = get_platform().collectives
        rank = torch.distributed.get_rank()
        whole = torch.zeros(4, 3)
        whole[rank] = rank  # gathered in place
        values = torch.arange(12.0) + rank  # reduced into its own place
        many = [torch.full((8,), 10.0 * number + rank) for number in range(3)]
        sums = [torch.empty(2) for _ in many]
        note = torch.full((2,), -1.0)
        works = [calls.all_gather(whole, whole[rank], group, async_op=True)]
        works += [
            calls.reduce_scatter(part, value, "avg", group, async_op=True)
            for part, value in zip(sums, many, strict=True)
        ]
        works.append(calls.reduce_scatter(values.view(4, 3)[rank], values, "sum", group, async_op=True))
        # a message of the user's own, on the same group at the same time
        calls.exchange([(torch.full((2,), float(rank)), (rank + 1) % 4)], [(note, (rank - 1) % 4)], group)
        for work in reversed(works):
            work.wait()
        nothing = torch.empty(0)
        calls.all_gather(nothing, torch.empty(0), group)
        calls.reduce_scatter(nothing, torch.empty(0), "sum", group)
        return (
            whole[:, 0].tolist(),
            values.view(4, 3)[rank].tolist() == (4 * torch.arange(12.0).view(4, 3)[rank] + 6).tolist(),
            [part.tolist() for part in sums],
            note.tolist() == [float((rank - 1) % 4)] * 2,
        )

    expected = ([0.0, 1.0, 2.0, 3.0], True, [[10 * number + 1.5] * 2 for number in range(3)], True)
    assert run_ranks(4, overlap) == [expected] * 4


def test_half_precision_is_rounded_once_after_all_addends():
    def reduce():
        import torch

        from hp_core.platform import get_platform
        from hp_core.process_group import group_of_ranks

        group = group_of_ranks((0, 1, 2, 3))
        value = torch.full((4,), 256.0 if torch.distributed.get_rank() == 0 else 1.0, dtype=torch.bfloat16)
        part = torch.empty(1, dtype=torch.bfloat16)
        get_platform().collectives.reduce_scatter(part, value, "sum", group)
        return part.item()

    assert run_ranks(4, reduce) == [260.0] * 4  # 259; rounded after each addend it would stay 256
