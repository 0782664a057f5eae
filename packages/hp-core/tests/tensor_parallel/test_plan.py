"""Plans are checked before anything is changed, and a wrong one says what is near."""

from __future__ import annotations

import pytest

from hp_core.errors import LayoutError, PlanError
from hp_core.testing import assert_same_error, run_ranks


def _apply(which: str) -> None:
    import torch
    from torch import nn

    from hp_core import (
        ColwiseParallel,
        PrepareModuleInput,
        Replicate,
        RowwiseParallel,
        Shard,
        init_device_mesh,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    grid = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    model = nn.ModuleDict({"layers": nn.ModuleList([nn.ModuleDict({"wq": nn.Linear(4, 4)}) for _ in range(2)])})
    model["norm"] = nn.LayerNorm(4)
    tied = nn.ModuleDict({"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)})
    tied["b"].weight = tied["a"].weight
    column = ColwiseParallel()
    {
        "no match": lambda: parallelize_module(model, mesh, {"layers.*.wk": column}),
        "twice": lambda: parallelize_module(model, mesh, {"layers.*.wq": column, "layers.0.wq": column}),
        "no style": lambda: parallelize_module(model, mesh, {"norm": "colwise"}),
        "no plan": lambda: parallelize_module(model, mesh),
        "norm": lambda: parallelize_module(model, mesh, {"norm": column}),
        "axis": lambda: parallelize_module(
            model, init_device_mesh("cpu", (2, 1), mesh_dim_names=("a", "b")), {"norm": column}
        ),
        "tied": lambda: parallelize_module(tied, mesh, {"a": column, "b": RowwiseParallel()}),
        "plain": lambda: parallelize_module(model["layers"][0], grid, {"wq": column})["wq"](torch.ones(2, 4)),
        "inputs": lambda: parallelize_module(
            model["norm"],
            mesh,
            PrepareModuleInput(input_layouts=(Shard(0), Shard(0)), desired_input_layouts=(Replicate(),) * 2),
        )(torch.ones(2, 4)),
        "lengths": lambda: PrepareModuleInput(input_layouts=(Shard(0),), desired_input_layouts=(Shard(0), Shard(0))),
    }[which]()


@pytest.mark.parametrize(
    ("which", "kind", "message"),
    [
        ("no match", PlanError, r"'layers\.\*\.wk'\] matches no submodule of ModuleDict; near names: .*layers\.0\.wq"),
        ("twice", PlanError, r"'layers\.0\.wq' is matched by 'layers\.\*\.wq' and 'layers\.0\.wq'"),
        ("no style", PlanError, "is a str, not a parallel style"),
        ("no plan", PlanError, "needs a plan"),
        ("norm", PlanError, "'norm' is a LayerNorm"),
        ("axis", PlanError, "none is called 'tp'; say which one with axis="),
        ("tied", LayoutError, "'weight' of module 'b' is tied to one of module 'a'"),
        ("plain", PlanError, r"a plain tensor can't say how it lies on axes \['dp'\]"),
        ("inputs", PlanError, "describes 2 positional inputs, but the module was called with 1"),
        ("lengths", PlanError, "must be equally many"),
    ],
)
def test_a_wrong_plan_is_refused_alike_on_all_ranks(which, kind, message):
    assert_same_error(2, _apply, kind, message, which)


def test_nothing_is_changed_by_a_plan_that_is_refused():
    def half():
        from torch import nn

        from hp_core import ColwiseParallel, DTensor, init_device_mesh, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        model = nn.ModuleDict({"a": nn.Linear(4, 4)})
        try:
            parallelize_module(model, mesh, {"a": ColwiseParallel(), "nothing": ColwiseParallel()})
        except PlanError:
            return isinstance(model["a"].weight, DTensor)
        return None

    assert run_ranks(2, half) == [False, False]


def test_the_current_mesh_is_the_default():
    def inside():
        from torch import nn

        from hp_core import ColwiseParallel, get_current_mesh, init_device_mesh, parallelize_module

        with init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)) as mesh:
            layer = parallelize_module(nn.Linear(4, 6), parallelize_plan=ColwiseParallel())
            inside = get_current_mesh() is mesh
        return inside, get_current_mesh(), tuple(layer.weight.to_local().shape)

    assert run_ranks(2, inside) == [(True, None, (3, 4))] * 2
