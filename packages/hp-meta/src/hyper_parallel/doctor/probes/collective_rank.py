"""One rank of `doctor run`: every collective, with values that are known beforehand, and how long each takes.

All numbers are small whole ones, so that a sum is exact in any order and the values must be equal to the last bit.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from importlib import import_module
from typing import Any

from hyper_parallel.doctor.probes.answer import Answer, describe

__all__ = ["probe"]


def probe(answer: Answer, request: dict[str, Any]) -> None:
    """Join the others and go through all collectives for each size."""
    rank, size, backend = request["rank"], request["size"], request["backend"]
    answer.step("import torch")
    torch = import_module("torch")
    device = "cpu"
    if backend != "gloo":
        kind = "cuda" if backend == "nccl" else "npu"
        if kind == "npu":
            answer.step("import torch_npu")
            import_module("torch_npu")
        answer.step(f"choosing device {kind}:{rank}")
        count = getattr(torch, kind).device_count()
        if count < size:
            raise RuntimeError(
                f"{size} processes need a device each, and torch {torch.__version__} finds {count} ({kind})"
            )
        device = f"{kind}:{rank}"
        getattr(torch, kind).set_device(rank)
    distributed = torch.distributed
    answer.step(f"init_process_group({backend!r}): waiting for the other ranks")
    start = time.perf_counter()
    limit = timedelta(seconds=request["timeout"])
    distributed.init_process_group(backend, init_method="env://", rank=rank, world_size=size, timeout=limit)
    answer.fact("seconds", time.perf_counter() - start)
    results: list[list[object]] = []
    for length in request["lengths"]:
        collectives = _Collectives(torch, device, rank, size, length)
        for name, operation in collectives.all().items():
            if name == "barrier" and results:
                continue  # it carries nothing, whatever the length
            answer.step(f"{name} of {4 * length} bytes")
            try:
                right, seconds = _measure(operation, collectives.synchronize, request["repeats"])
            except (RuntimeError, NotImplementedError) as error:
                # Backends lack some; what else goes wrong is a result, too, and the others would wait for this rank.
                if "not support" not in str(error) and "not implemented" not in str(error).lower():
                    raise
                results.append([name, 4 * length, None, describe(error)])
                continue
            results.append([name, 4 * length, right, seconds])
        answer.fact("results", results)
    answer.step("destroy_process_group")
    distributed.destroy_process_group()


def _measure(
    operation: Callable[[], Iterator[bool]], synchronize: Callable[[], None], repeats: int
) -> tuple[bool, float]:
    """Whether the values are right every time, and the median of the seconds, the first time left away."""
    right, seconds = True, []
    for _ in range(repeats + 1):
        steps = operation()
        next(steps)  # prepares
        synchronize()
        start = time.perf_counter()
        next(steps)  # communicates
        seconds.append(time.perf_counter() - start)
        right = next(steps) and right  # compares
    return right, statistics.median(seconds[1:])


class _Collectives:
    """The operations on one size, each in three steps: prepare, communicate, tell whether the values are right.

    Element `i` of rank `r` is `i % 7 + r`, of `length` elements in float32.
    """

    def __init__(self, torch: Any, device: str, rank: int, size: int, length: int) -> None:
        self.torch, self.distributed = torch, torch.distributed
        self.device, self.rank, self.size, self.length = device, rank, size, length
        self.base = (torch.arange(length, device=device) % 7).to(torch.float32)
        # Of every rank's data, chunk by chunk, as gathers and exchanges see it.
        self.everyone = torch.cat([self.base + other for other in range(size)])
        self.total = self.base * size + size * (size - 1) // 2

    def all(self) -> dict[str, Callable[[], Iterator[bool]]]:
        """The operations by name."""
        return {
            "barrier": self.barrier,
            "broadcast": self.broadcast,
            "all_reduce": self.all_reduce,
            "all_gather": self.all_gather,
            "reduce_scatter": self.reduce_scatter,
            "all_to_all": self.all_to_all,
            "send and receive": self.ring,
        }

    def synchronize(self) -> None:
        """Wait for the device, and for the other ranks, so that all start together."""
        self.wait()
        self.distributed.barrier()

    def wait(self) -> None:
        """Wait for the device; what a rank has called may still be under way there."""
        if self.device != "cpu":
            getattr(self.torch, self.device.partition(":")[0]).synchronize()

    def equal(self, have: Any, want: Any) -> bool:
        return bool(self.torch.equal(have, want))

    def barrier(self) -> Iterator[bool]:
        yield True
        self.distributed.barrier()
        self.wait()
        yield True
        yield True

    def broadcast(self) -> Iterator[bool]:
        root = self.size - 1
        data = self.base + self.rank
        yield True
        self.distributed.broadcast(data, root)
        self.wait()
        yield True
        yield self.equal(data, self.base + root)

    def all_reduce(self) -> Iterator[bool]:
        data = self.base + self.rank
        yield True
        self.distributed.all_reduce(data)
        self.wait()
        yield True
        yield self.equal(data, self.total)

    def all_gather(self) -> Iterator[bool]:
        into, data = self.torch.empty_like(self.everyone), self.base + self.rank
        yield True
        self.distributed.all_gather_into_tensor(into, data)
        self.wait()
        yield True
        yield self.equal(into, self.everyone)

    def reduce_scatter(self) -> Iterator[bool]:
        # Chunk c of rank r is base + c + r: rank c receives size * (base + c) + the sum of all r.
        into, data = self.torch.empty_like(self.base), self.everyone + self.rank
        yield True
        self.distributed.reduce_scatter_tensor(into, data)
        self.wait()
        yield True
        yield self.equal(into, self.total + self.size * self.rank)

    def all_to_all(self) -> Iterator[bool]:
        # Chunk c of rank r is base + c + 100 r: rank c receives base + c + 100 r from every r.
        into, data = self.torch.empty_like(self.everyone), self.everyone + 100 * self.rank
        wanted = self.torch.cat([self.base + self.rank + 100 * other for other in range(self.size)])
        yield True
        self.distributed.all_to_all_single(into, data)
        self.wait()
        yield True
        yield self.equal(into, wanted)

    def ring(self) -> Iterator[bool]:
        into, data = self.torch.empty_like(self.base), self.base + self.rank
        after, before = (self.rank + 1) % self.size, (self.rank - 1) % self.size
        yield True
        if self.size == 1:
            into.copy_(data)
        else:
            send = self.distributed.P2POp(self.distributed.isend, data, after)
            receive = self.distributed.P2POp(self.distributed.irecv, into, before)
            for work in self.distributed.batch_isend_irecv([send, receive]):
                work.wait()
        self.wait()
        yield True
        yield self.equal(into, self.base + before)
