"""HCCL without hardware: what is asked of `mindspore.mint.distributed`, seen by a double that records it."""

from __future__ import annotations

import inspect
from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint

from hp_core.errors import ProcessGroupError
from hp_core.platform.mindspore.hccl import HcclCollectives, HcclProcesses
from hp_core.platform.protocol import Group
from hp_core.platform.recorder import record_collectives


class Handle:
    """An asynchronous call that can be waited for."""

    def __init__(self) -> None:
        self.waited = False

    def wait(self) -> None:
        self.waited = True


class Distributed:
    """Records every call, checked against the signature of the real function; rank 1 of 4."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.handles: list[Handle] = []
        self.initialized = True

    def is_initialized(self) -> bool:
        return self.initialized

    def get_rank(self) -> int:
        return 1

    def get_world_size(self) -> int:
        return 4

    def P2POp(self, op: str, tensor: Any, peer: int, group: str) -> Any:
        return op, peer, group, tuple(tensor.shape)

    def __getattr__(self, name: str) -> Any:
        signature = inspect.signature(getattr(mint.distributed, name))

        def call(*args: Any, **kwargs: Any) -> Any:
            bound = signature.bind(*args, **kwargs)
            self.calls.append((name, dict(bound.arguments)))
            handle = Handle()
            self.handles.append(handle)
            return [handle] if name == "batch_isend_irecv" else handle if kwargs.get("async_op") else None

        return call


GROUP = Group((0, 1, 2, 3), "group-of-four", frozenset({"npu"}))


def _ones(*shape: int, dtype: Any = np.float32) -> Any:
    return Tensor(np.ones(shape, dtype))


def _only(double: Distributed) -> tuple[str, dict[str, Any]]:
    [call] = double.calls
    return call


def test_a_gather_is_one_call_on_flat_tensors() -> None:
    double = Distributed()
    with record_collectives() as log:
        assert HcclCollectives(double).all_gather(_ones(8, 3), _ones(2, 3), GROUP) is None
    name, given = _only(double)
    assert name == "all_gather_into_tensor"
    assert (given["output_tensor"].shape, given["input_tensor"].shape) == ((24,), (6,))
    assert given["group"] == "group-of-four"
    assert (log[0].kind, log[0].nbytes, log[0].dtype) == ("all_gather", 3 * 24, "float32")


def test_a_reduce_scatter_of_averages_sums_and_divides() -> None:
    double = Distributed()
    output = _ones(2, 3)
    work = HcclCollectives(double).reduce_scatter(output, _ones(8, 3), "avg", GROUP, async_op=True)
    name, given = _only(double)
    assert (name, given["op"], given["async_op"]) == ("reduce_scatter_tensor", "sum", True)
    assert work is not None
    assert not work.is_completed()
    work.wait()
    assert double.handles[0].waited
    assert work.is_completed()
    assert output.asnumpy().tolist() == [[0.25] * 3] * 2


@pytest.mark.parametrize("reduce_op", ["sum", "max", "min"])
def test_an_all_reduce_works_in_place(reduce_op: str) -> None:
    double = Distributed()
    HcclCollectives(double).all_reduce(_ones(2, 3), reduce_op, GROUP)
    name, given = _only(double)
    assert (name, given["op"], given["tensor"].shape) == ("all_reduce", reduce_op, (6,))


def test_an_exchange_of_equal_pieces_names_no_splits() -> None:
    double = Distributed()
    collectives = HcclCollectives(double)
    collectives.all_to_all(_ones(8), _ones(8), [], [], GROUP)
    collectives.all_to_all(_ones(6), _ones(8), [3, 1, 1, 1], [2, 2, 2, 2], GROUP)
    equal, uneven = (given for _, given in double.calls)
    assert (equal["output_split_sizes"], equal["input_split_sizes"]) == (None, None)
    assert (uneven["output_split_sizes"], uneven["input_split_sizes"]) == ([3, 1, 1, 1], [2, 2, 2, 2])


def test_point_to_point_calls_of_one_step_are_one_batch() -> None:
    double = Distributed()
    HcclCollectives(double).exchange([(_ones(2, 2), 0)], [(_ones(3), 2), (_ones(4), 3)], GROUP)
    name, given = _only(double)
    assert name == "batch_isend_irecv"
    assert given["p2p_op_list"] == [
        ("irecv", 2, "group-of-four", (3,)),
        ("irecv", 3, "group-of-four", (4,)),
        ("isend", 0, "group-of-four", (4,)),
    ]
    assert double.handles[0].waited


def test_arrays_of_the_host_get_their_result_back() -> None:
    double = Distributed()
    array = np.full((2, 2), 8.0, np.float32)
    HcclCollectives(double).all_reduce(array, "avg", GROUP)
    assert array.tolist() == [[2.0, 2.0], [2.0, 2.0]]


def test_booleans_travel_as_bytes() -> None:
    double = Distributed()
    HcclCollectives(double).broadcast(_ones(4, dtype=np.bool_), 0, GROUP)
    assert _only(double)[1]["tensor"].dtype == ms.int8


def test_the_world_is_joined_and_groups_are_made_by_members_only() -> None:
    double = Distributed()
    double.initialized = False
    processes = HcclProcesses(double)
    with pytest.raises(ProcessGroupError, match="gloo"):
        processes.init_world("gloo", init_method=None, world_size=None, rank=None, timeout=None)
    assert not double.calls
    processes.init_world(None, init_method=None, world_size=None, rank=None, timeout=None)
    assert _only(double)[1]["backend"] == "hccl"
    double.initialized = True
    with pytest.raises(ProcessGroupError, match="exists already"):
        processes.init_world(None, init_method=None, world_size=None, rank=None, timeout=None)
    group = processes.new_group((1, 3))
    assert double.calls[-1] == ("new_group", {"ranks": [1, 3], "use_local_synchronization": True})
    assert (group.ranks, group.devices) == ((1, 3), frozenset({"npu"}))


def test_a_group_of_one_sends_nothing() -> None:
    double = Distributed()
    output = _ones(2)
    HcclCollectives(double).all_gather(output, _ones(2) * 5, Group((1,)))
    assert output.asnumpy().tolist() == [5.0, 5.0]
    assert not double.calls
