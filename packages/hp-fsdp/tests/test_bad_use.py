"""Mistakes are told alike on all ranks, with the remedy, before anything is communicated; nothing hangs, nothing changes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from hp_core import DTensor, MeshError, PlanError, Replicate, init_device_mesh, init_empty_weights, record_collectives
from hp_core.errors import LayoutError
from hp_core.testing import assert_same_error
from hp_fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard


def layer() -> nn.Linear:
    return nn.Linear(4, 4)


def twice(mesh: Any) -> None:
    fully_shard(fully_shard(layer(), mesh=mesh), mesh=mesh)


def outside_in(mesh: Any) -> None:
    model = nn.Sequential(layer(), layer())
    fully_shard(model, mesh=mesh)
    fully_shard(model[0], mesh=mesh)


def no_mesh(mesh: Any) -> None:
    fully_shard(layer())


def three_axes(mesh: Any) -> None:
    fully_shard(layer(), mesh=init_device_mesh("cpu", (1, 1, 2), mesh_dim_names=("a", "b", "c")))


def other_device(mesh: Any) -> None:
    # as if the mesh were one of accelerators
    fully_shard(layer(), mesh=init_device_mesh("cuda", (2,), mesh_dim_names=("accelerators",)))


def offload_on_cpu(mesh: Any) -> None:
    fully_shard(layer(), mesh=mesh, offload_policy=CPUOffloadPolicy())


def keep_among_three(mesh: Any) -> None:
    fully_shard(layer(), mesh=mesh, reshard_after_forward=3)


def unknown_granularity(mesh: Any) -> None:
    fully_shard(layer(), mesh=mesh, shard_granularity=lambda name, parameter: "column")


def wasteful_granularity(mesh: Any) -> None:
    module = nn.Sequential(nn.Linear(2048, 2048, bias=False), nn.Linear(4, 4))
    fully_shard(module, mesh=mesh, shard_granularity=lambda name, parameter: "whole", max_padding=0.1)


def on_the_data_axis(mesh: Any) -> None:
    module = layer()
    module.weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), mesh, [Replicate()]))
    fully_shard(module, mesh=mesh)


def on_another_world(mesh: Any) -> None:
    lonely = init_device_mesh("cpu", (2,), mesh_dim_names=("lonely",))
    module = layer()
    module.weight = nn.Parameter(DTensor.from_local(torch.zeros(4, 4), lonely, [Replicate()]))
    fully_shard(module, mesh=mesh)


def reduce_by_maximum(mesh: Any) -> None:
    fully_shard(layer(), mesh=mesh).set_reduce_op_type("max")


def prefetch_of_what_is_not_sharded(mesh: Any) -> None:
    fully_shard(layer(), mesh=mesh).set_modules_to_forward_prefetch([layer()])


def still_without_memory(mesh: Any) -> None:
    with init_empty_weights():
        module = layer()
    fully_shard(module, mesh=mesh)(torch.zeros(1, 4))


def parameter_of_another_shape(mesh: Any) -> None:
    module = fully_shard(layer(), mesh=mesh)
    module.weight = nn.Parameter(torch.zeros(3, 3))
    module(torch.zeros(1, 4))


def early_optimizer(mesh: Any) -> None:
    module = layer()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    fully_shard(module, mesh=mesh)
    optimizer.step()


def optimizer_of_whole_parameters(mesh: Any) -> None:
    module = fully_shard(layer(), mesh=mesh)
    module.unshard()
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.reshard()
    with record_collectives() as log:
        optimizer.step()
    assert not log


def step_without_sync(mesh: Any) -> None:
    module = fully_shard(layer(), mesh=mesh)
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    with module.no_sync():
        module(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def step_without_the_replicas(mesh: Any) -> None:
    module = fully_shard(layer(), mesh=init_device_mesh("cpu", (2, 1), mesh_dim_names=("replicas", "shards")))
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    module.set_requires_all_reduce(False)
    module(torch.ones(1, 4)).sum().backward()
    optimizer.step()


def another_order_on_one_rank(mesh: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4, bias=mesh.get_local_rank() == 0))
    for one in model:
        fully_shard(one, mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4))


def one_more_unit_on_one_rank(mesh: Any) -> None:
    model = nn.Sequential(layer(), layer())
    if mesh.get_local_rank() == 0:
        fully_shard(model[0], mesh=mesh)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4))


def other_types_on_one_rank(mesh: Any) -> None:
    model = layer().to(torch.float64 if mesh.get_local_rank() else torch.float32)
    fully_shard(model, mesh=mesh)
    model(torch.ones(1, 4, dtype=model.weight.dtype))


def replicated_on_one_rank(mesh: Any) -> None:
    model = nn.Linear(4, 4, bias=False)
    fully_shard(model, mesh=mesh, replicate_params=[model.weight] if mesh.get_local_rank() else [])
    model(torch.ones(1, 4))


def resharded_otherwise_on_one_rank(mesh: Any) -> None:
    model = layer()
    fully_shard(model, mesh=mesh, reshard_after_forward=mesh.get_local_rank() == 0)
    model(torch.ones(1, 4))


def replaced_by_nothing(mesh: Any) -> None:
    module = fully_shard(layer(), mesh=mesh)
    module.bias = None
    module(torch.ones(1, 4))


def replicated_in_another_type(mesh: Any) -> None:
    module = layer()
    policy = MixedPrecisionPolicy(torch.bfloat16)
    fully_shard(module, mesh=mesh, mp_policy=policy, replicate_params=[module.bias])


SILENT: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (twice, PlanError, "shard each module once"),
    (outside_in, PlanError, "from the inside out"),
    (no_mesh, PlanError, "no mesh given and none current"),
    (three_axes, MeshError, r"one axis \(FSDP\) or two \(HSDP"),
    (other_device, PlanError, "is on a device of type 'cpu', but the mesh is of type 'cuda'"),
    (offload_on_cpu, PlanError, "shards are already; leave it out"),
    (keep_among_three, PlanError, "a number of ranks that divides the 2"),
    (unknown_granularity, PlanError, "'column'"),
    (wasteful_granularity, PlanError, "max_padding="),
    (on_the_data_axis, LayoutError, "lay it out on the other axes only"),
    (on_another_world, MeshError, "make one mesh of all axes"),
    (replicated_in_another_type, PlanError, "'bias' is to be replicated"),
    (reduce_by_maximum, PlanError, "'avg' or 'sum'"),
    (prefetch_of_what_is_not_sharded, PlanError, "Linear was not"),
    (early_optimizer, PlanError, r"SGD holds a whole parameter \('(weight|bias)'\).*after fully_shard"),
]
LATER: list[tuple[Callable[[Any], None], type[Exception], str]] = [
    (still_without_memory, PlanError, "call init_parameters"),
    (parameter_of_another_shape, PlanError, r"'weight' of shape \(4, 4\) was replaced by a tensor of shape \(3, 3\)"),
    (optimizer_of_whole_parameters, PlanError, "after fully_shard"),
    (step_without_sync, PlanError, "holds gradients that were not reduced"),
    (step_without_the_replicas, PlanError, "holds gradients that were not reduced"),
    (another_order_on_one_rank, PlanError, r"rank 0 has \(bias.*rank 1 has"),
    (one_more_unit_on_one_rank, PlanError, "sharded other modules"),
    (other_types_on_one_rank, PlanError, "float32.*float64"),
    (replicated_on_one_rank, PlanError, r"rank 0 has \(weight.*rank 1 has \(weight.*replicated"),
    (resharded_otherwise_on_one_rank, PlanError, "reshard_after_forward=True.*reshard_after_forward=False"),
    (replaced_by_nothing, PlanError, "'bias' .*was replaced by nothing"),
]


@pytest.mark.parametrize(("mistake", "kind", "words"), SILENT, ids=[case[0].__name__ for case in SILENT])
def test_a_mistake_is_told_before_communication(mistake: Any, kind: Any, words: str) -> None:
    def body(mistake: Any) -> None:
        with record_collectives() as log:
            try:
                mistake(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
            finally:
                assert not log, log.summary()

    assert_same_error(2, body, kind, words, mistake)


@pytest.mark.parametrize(("mistake", "kind", "words"), LATER, ids=[case[0].__name__ for case in LATER])
def test_a_mistake_that_shows_in_use_is_told_alike(mistake: Any, kind: Any, words: str) -> None:
    def body(mistake: Any) -> None:
        mistake(init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))

    assert_same_error(2, body, kind, words, mistake)


def test_a_mesh_without_this_rank() -> None:
    def body() -> None:
        fully_shard(layer(), mesh=init_device_mesh("cpu", (1,), mesh_dim_names=("alone",), rank_list=[2]))

    assert_same_error(2, body, MeshError, "")


def test_a_refused_module_is_as_it_was() -> None:
    mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
    module = layer()
    before = dict(module.named_parameters())
    with pytest.raises(PlanError):
        fully_shard(module, mesh=mesh, shard_granularity=lambda name, parameter: "column")
    assert type(module) is nn.Linear
    assert all(parameter is before[name] for name, parameter in module.named_parameters())
    assert not module._forward_pre_hooks
