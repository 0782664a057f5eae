"""A DTensor as a MindSpore tensor: metadata and values mean the global tensor, and nothing silently means a part of it."""

from __future__ import annotations

from typing import Any

import mindspore as ms
import numpy as np
import pytest
from mindspore import Tensor, mint, ops

from hp_core import DeviceMesh, DTensor, Shard
from hp_core.dtensor.api import DTensorMethods
from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.platform import get_platform
from hp_core.testing import run_ranks


def _alone(*shape: int) -> Any:
    value = np.arange(np.prod(shape), dtype=np.float32).reshape(shape)
    return DTensor.from_local(Tensor(value), DeviceMesh((1,), ("tp",)), [Shard(0)])


def _metadata() -> Any:
    from hp_core import DTensor, Shard, init_device_mesh

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    rank = mesh.get_local_rank("tp")
    part = (
        np.arange(15, dtype=np.float32).reshape(5, 3)[:3]
        if rank == 0
        else np.arange(9, 15, dtype=np.float32).reshape(2, 3)
    )
    x = DTensor.from_local(Tensor(part.copy()), mesh, [Shard(0)], shape=(5, 3))
    rows = [row.full_tensor().asnumpy().tolist() for row in x]
    return (
        x.shape, x.ndim, x.size, x.numel(), len(x), x.dtype == ms.float32, x.nbytes, x.stride(), x.tolist(), rows,
        x.sum().item(), float(x.max()), bool((x >= 0).all()), tuple(x.to_local().shape),
    )  # fmt: skip


def test_metadata_and_values_are_those_of_the_global_tensor() -> None:
    dense = np.arange(15, dtype=np.float32).reshape(5, 3).tolist()
    for rank, found in enumerate(run_ranks(2, _metadata)):
        assert found[:8] == ((5, 3), 2, 15, 15, 5, True, 60, (3, 1))
        assert found[8] == dense
        assert found[9] == dense
        assert found[10:13] == (105.0, 14.0, True)
        assert found[13] == ((3, 3), (2, 3))[rank]


class _Reached(Exception):
    """An op was handed to the dispatcher."""


_HARMLESS = {
    "__abstractmethods__", "__reduce__", "__format__", "__getstate__", "__metaclass__", "__pos__", "__sizeof__",
    "const_arg", "data_sync", "delta_seed", "device", "flush_from_cache", "has_init", "hooks", "index_of_parent_",
    "init", "init_finished", "init_flag", "is_complex", "is_floating_point", "is_init", "is_meta", "is_pinned",
    "is_signed", "offload_file_path", "param_info", "parent_tensor_", "positive", "remove_hook", "set_cast_dtype",
    "set_const_arg", "set_init_flag", "storage_offset", "symbolic_shape", "type", "virtual_flag", "wait_pipeline",
}  # fmt: skip
"""Answered by MindSpore without an op, and true of the local tensor as of the global one, or MindSpore's own bookkeeping."""
_MACHINERY = {
    "__class__", "__del__", "__delattr__", "__dict__", "__dir__", "__doc__", "__fallback__", "__getattribute__", "__init__",
    "__init_subclass__", "__module__", "__new__", "__setattr__", "__setstate__", "__subclasshook__", "__weakref__",
    "assign_value_cpp", "convert_bytes_to_tensor", "data_ptr", "from_dlpack", "from_numpy", "init_check", "init_data",
    "is_shared", "load", "offload", "pin_memory", "set_device_address", "set_param_info", "set_storage", "share_memory_",
    "storage", "untyped_storage", "move_to", "getitem_index_info", "setitem_index_info",
}  # fmt: skip
"""Not called: they make or move storage, some of them crash when called without it."""


def test_no_method_of_a_tensor_computes_on_the_local_part_unseen() -> None:
    """Every public method of `mindspore.Tensor` reaches the dispatcher, is answered by DTensor, or is known as harmless."""

    def reached(*_: Any) -> None:
        raise _Reached

    probe = get_platform().define_dtensor(reached, DTensorMethods)
    spec = _alone(2, 2)._spec

    def make() -> Any:
        return get_platform().new_dtensor(probe, Tensor(np.ones((2, 2), np.float32)), spec)

    arguments = ((), (1,), (0,), (None,), (0, 1), (0, 0, 1), (0, None), (None, None), (2.0,), ((2, 2),), (ms.float16,))
    own = {name for kind in probe.__mro__[:3] for name in vars(kind)} - {"__doc__"}
    silent = []
    for name in sorted(set(dir(Tensor)) - own - _HARMLESS - _MACHINERY):
        if name.startswith("_") and not name.startswith("__"):
            continue
        method = getattr(Tensor, name)
        for given in arguments if callable(method) else ((),):
            tensors = [make() if value is None else value for value in given]
            try:
                result = getattr(make(), name)
                result = result(*tensors) if callable(method) else result
            except _Reached:
                break
            except Exception:
                continue
            if result is not NotImplemented:
                silent.append(name)
            break
    assert not silent


@pytest.mark.parametrize("name", ["fill", "resize", "set_dtype", "to_dlpack"])
def test_what_would_mean_the_local_part_is_refused(name: str) -> None:
    with pytest.raises(ShardingRuleError, match="to_local"):
        getattr(_alone(2, 2), name)(1)


def test_arrays_are_refused_since_they_could_mean_either() -> None:
    with pytest.raises(LayoutError, match="full_tensor"):
        _alone(2, 2).asnumpy()
    with pytest.raises(LayoutError, match="full_tensor"):
        np.asarray(_alone(2, 2))


def test_arithmetic_in_place_is_refused_because_the_back_end_ignores_it() -> None:
    x = _alone(2, 2)
    with pytest.raises(ShardingRuleError, match="x = x \\+ y"):
        x += x
    with pytest.raises(ShardingRuleError, match="where"):
        x[0] = 1.0


def test_copying_in_place_writes_to_the_local_tensor() -> None:
    x, y = _alone(2, 2), _alone(2, 2)
    y.copy_(x * 2)
    assert y.tolist() == [[0.0, 2.0], [4.0, 6.0]]
    assert y.to_local().asnumpy().tolist() == [[0.0, 2.0], [4.0, 6.0]]


def test_an_op_without_a_rule_is_an_error_that_says_what_to_do() -> None:
    with pytest.raises(ShardingRuleError, match=r"MatrixDeterminant.*register_sharding_rule"):
        ops.logdet(_alone(2, 2))


def test_a_plain_tensor_among_dtensors_is_refused() -> None:
    with pytest.raises(LayoutError, match="plain tensor of shape"):
        mint.matmul(_alone(2, 2), Tensor(np.ones((2, 2), np.float32)))
