"""Several optimizers as one, and which parameters `get_hyper_optimizer` gives to which."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_state_dict,
)

from hp_core import init_device_mesh
from hp_core.errors import PlanError
from hp_core.testing import run_ranks
from hp_fsdp.optim import AdamW, ChainedOptimizer, Muon, get_hyper_optimizer


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 8)
        self.experts = nn.Parameter(torch.randn(3, 8, 6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + torch.einsum("bh,ehd->bd", torch.tanh(self.up(self.norm(x))), self.experts)


class Model(nn.Module):
    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.tokens = nn.Embedding(10, 6)
        self.pos_embed = nn.Parameter(torch.randn(1, 1, 6))
        self.layers = nn.ModuleList([Block(), Block()])
        self.lm_head = nn.Linear(6, 10, bias=False)
        if tied:
            self.lm_head.weight = self.tokens.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = (self.tokens(tokens) + self.pos_embed)[0]
        for layer in self.layers:
            x = layer(x)
        return self.lm_head(x)  # type: ignore[no-any-return]


def names_of(model: nn.Module, optimizer: Any) -> dict[str, set[str]]:
    names = {id(param): name for name, param in model.named_parameters()}
    return {
        type(one).__name__: {names[id(param)] for group in one.param_groups for param in group["params"]}
        for one in optimizer.optimizers
    }


MATRICES = {f"layers.{i}.{name}" for i in (0, 1) for name in ("up.weight", "experts")}
TOKENS = torch.arange(8) % 5


# -- which parameter goes where -------------------------------------------------------------------------------------


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_but_embeddings_and_heads_go_to_muon(tied: bool) -> None:
    model = Model(tied)
    everyone = {name for name, _ in model.named_parameters()}
    optimizer = get_hyper_optimizer(model, muon_kwargs={"lr": 0.02}, adamw_kwargs={"lr": 0.001, "weight_decay": 0.0})
    assert names_of(model, optimizer) == {"Muon": MATRICES, "AdamW": everyone - MATRICES}
    assert [group["lr"] for group in optimizer.param_groups] == [0.02, 0.001]


def test_choices_by_predicate_name_pattern_and_parameter() -> None:
    model = Model()
    everyone = {name for name, _ in model.named_parameters()}
    up = {"layers.0.up.weight", "layers.1.up.weight"}
    choices: list[tuple[dict[str, Any], set[str]]] = [
        ({"muon_params": lambda name, param: name.endswith("up.weight")}, up),
        ({"muon_params": "layers.*.up.weight"}, up),
        ({"muon_params": ["layers.0.up.weight", model.layers[1].up.weight]}, up),  # type: ignore[union-attr]
        ({"adamw_params": lambda name, param: name not in up}, up),
        ({"muon_params": sorted(up), "adamw_params": sorted(everyone - up)}, up),
        ({"adamw_params": ["*"]}, set()),
    ]
    for arguments, expected in choices:
        found = names_of(model, get_hyper_optimizer(model, **arguments))
        assert found.get("Muon", set()) == expected
        assert found["AdamW"] == everyone - expected


def test_tied_names_mean_one_parameter() -> None:
    model = Model(tied=True)
    optimizer = get_hyper_optimizer(model, muon_params=["lm_head.weight", *sorted(MATRICES)])
    assert names_of(model, optimizer)["Muon"] == {*MATRICES, "tokens.weight"}


def test_frozen_parameters_may_be_in_no_choice() -> None:
    model = Model()
    everyone = [name for name, _ in model.named_parameters()]
    rest = [name for name in everyone if name not in MATRICES and name != "pos_embed"]
    with pytest.raises(PlanError, match=r"'pos_embed' of shape \(1, 1, 6\) is in neither"):
        get_hyper_optimizer(model, muon_params=sorted(MATRICES), adamw_params=rest)
    model.pos_embed.requires_grad_(False)
    get_hyper_optimizer(model, muon_params=sorted(MATRICES), adamw_params=rest)


def test_mistakes_are_named() -> None:
    model = Model()
    with pytest.raises(PlanError, match=r"muon_kwargs: Muon has no argument 'beta'; it has .*momentum, nesterov"):
        get_hyper_optimizer(model, muon_kwargs={"beta": 1})
    with pytest.raises(PlanError, match=r"adamw_kwargs: AdamW has no argument 'momentum'"):
        get_hyper_optimizer(model, adamw_kwargs={"momentum": 1})
    with pytest.raises(TypeError, match="muon_args"):
        get_hyper_optimizer(model, muon_args={})  # type: ignore[call-arg]
    with pytest.raises(
        PlanError, match=r"no parameter of the model is called 'layers.0.up.wieght'. Near it: 'layers.0.up.weight'"
    ):
        get_hyper_optimizer(model, muon_params=["layers.0.up.wieght"])
    with pytest.raises(PlanError, match="none of the model's parameters"):
        get_hyper_optimizer(model, muon_params=[nn.Parameter(torch.ones(2, 2))])
    with pytest.raises(PlanError, match=r"'layers.0.up.weight' is in muon_params and in adamw_params"):
        get_hyper_optimizer(model, muon_params=["layers.0.up.weight"], adamw_params="*")
    with pytest.raises(PlanError, match="no matrix"):
        get_hyper_optimizer(model, muon_params="*")
    with pytest.raises(PlanError, match="has no parameters"):
        get_hyper_optimizer(nn.Identity())


# -- one optimizer to the outside -----------------------------------------------------------------------------------


def trained(model: nn.Module, optimizer: Any, steps: int) -> None:
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(TOKENS), TOKENS).backward()
        optimizer.step()


def test_it_does_what_its_optimizers_do() -> None:
    together, apart = Model(), Model()
    chained = get_hyper_optimizer(together)
    names = names_of(together, chained)
    params = dict(apart.named_parameters())
    single = [
        Muon([param for name, param in params.items() if name in names["Muon"]]),
        AdamW([param for name, param in params.items() if name in names["AdamW"]]),
    ]
    for _ in range(2):
        trained(together, chained, 1)
        apart.zero_grad()
        nn.functional.cross_entropy(apart(TOKENS), TOKENS).backward()
        for optimizer in single:
            optimizer.step()
    for left, right in zip(together.parameters(), apart.parameters(), strict=True):
        torch.testing.assert_close(left, right)


def test_closures_run_once_and_hooks_run_around_all() -> None:
    model = Model()
    optimizer = get_hyper_optimizer(model)
    events: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: events.append("before"))
    optimizer.register_step_post_hook(lambda *_: events.append("after"))
    optimizer.optimizers[1].register_step_post_hook(lambda *_: events.append("adamw"))

    def closure() -> torch.Tensor:
        events.append("closure")
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(model(TOKENS), TOKENS)
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) > float(optimizer.step(closure))
    assert events == ["before", "closure", "adamw", "after"] * 2
    optimizer.zero_grad(set_to_none=False)
    assert all(float(param.grad.abs().sum()) == 0 for param in model.parameters())  # type: ignore[union-attr]
    optimizer.zero_grad()
    assert all(param.grad is None for param in model.parameters())


@pytest.mark.parametrize(
    "make",
    [
        lambda optimizer: torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 4),
        lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 0.5**step, lambda step: 1 + step]),
        lambda optimizer: torch.optim.lr_scheduler.OneCycleLR(optimizer, [0.1, 0.2], 10, cycle_momentum=False),
        lambda optimizer: torch.optim.lr_scheduler.SequentialLR(
            optimizer,
            [torch.optim.lr_scheduler.LinearLR(optimizer), torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)],
            [2],
        ),
        lambda optimizer: torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=0),
    ],
    ids=["cosine", "lambda", "one cycle", "sequential", "plateau"],
)
def test_torchs_schedulers_reach_both(make: Callable[[Any], Any]) -> None:
    model = Model()
    optimizer = get_hyper_optimizer(model, muon_kwargs={"lr": 0.02}, adamw_kwargs={"lr": 0.01})
    reference = torch.optim.SGD([{"params": [nn.Parameter(torch.ones(1))], "lr": lr} for lr in (0.02, 0.01)])
    schedules = make(optimizer), make(reference)
    for _ in range(4):
        trained(model, optimizer, 1)
        reference.step()
        for schedule in schedules:
            if isinstance(schedule, torch.optim.lr_scheduler.ReduceLROnPlateau):
                schedule.step(1.0)
            else:
                schedule.step()
        rates = [group["lr"] for group in reference.param_groups]
        assert [group["lr"] for group in optimizer.param_groups] == pytest.approx(rates)
        assert [one.param_groups[0]["lr"] for one in optimizer.optimizers] == pytest.approx(rates)


def test_momentum_schedules_say_that_not_all_have_it() -> None:
    optimizer = get_hyper_optimizer(Model())
    with pytest.raises(ValueError, match="cycle_momentum"):
        torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.1, 10)


def test_state_dicts_and_copies() -> None:
    model, twin = Model(), Model()
    optimizer, other = get_hyper_optimizer(model), get_hyper_optimizer(twin)
    trained(model, optimizer, 2)
    saved = optimizer.state_dict()
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    assert numbers == list(range(len(numbers))) == sorted(saved["state"])
    twin.load_state_dict(model.state_dict())
    other.param_groups[0]["lr"] = 5.0
    other.load_state_dict(copy.deepcopy(saved))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    trained(model, optimizer, 1)
    trained(twin, other, 1)
    for left, right in zip(model.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(left, right)
    both = copy.deepcopy((model, optimizer))
    again = pickle.loads(pickle.dumps((model, optimizer)))
    trained(model, optimizer, 1)
    for copied, copied_optimizer in (both, again):
        trained(copied, copied_optimizer, 1)
        for left, right in zip(model.parameters(), copied.parameters(), strict=True):
            torch.testing.assert_close(left, right)
    with pytest.raises(PlanError, match="1 param groups, these optimizers 2"):
        optimizer.load_state_dict({**saved, "param_groups": saved["param_groups"][:1]})


def test_bad_chains_are_refused() -> None:
    weight = nn.Parameter(torch.ones(3, 3))
    with pytest.raises(PlanError, match="at least one"):
        ChainedOptimizer()
    with pytest.raises(PlanError, match="argument 0 is a list"):
        ChainedOptimizer([AdamW([weight])])  # type: ignore[arg-type]
    with pytest.raises(PlanError, match=r"shape \(3, 3\) is in optimizers 0 \(Muon\) and 1 \(AdamW\)"):
        ChainedOptimizer(Muon([weight]), AdamW([weight]))
    chained = ChainedOptimizer(Muon([weight]))
    with pytest.raises(PlanError, match=r"optimizers\[0\] is Muon"):
        chained.add_param_group({"params": [nn.Parameter(torch.ones(2, 2))]})


# -- distributed checkpoints ----------------------------------------------------------------------------------------


def sharded(make_unit: Callable[..., Any], whole: bool = False) -> tuple[nn.Module, Any]:
    """The model with its parameters on a chunk, and a way to give them gradients."""
    model = Model()
    named = list(model.named_parameters())
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    unit = make_unit([param.detach() for _, param in named], mesh, whole=whole)
    for (name, _), param in zip(named, unit.params, strict=True):
        owner, _, own = name.rpartition(".")
        setattr(model.get_submodule(owner), own, param)
    return model, unit


def gradients(model: nn.Module, seed: int) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(tuple(param.shape), generator=generator) for param in model.parameters()]


def checkpointed(make_unit: Callable[..., Any], folder: str, kind: str) -> None:
    kinds: dict[str, Callable[[nn.Module], Any]] = {
        "adamw": lambda model: AdamW(model.parameters(), lr=0.1),
        "hyper": lambda model: get_hyper_optimizer(model, muon_kwargs={"ns_dtype": "float32"}),
    }

    def step(model: nn.Module, unit: Any, optimizer: Any, seed: int) -> None:
        unit.give(gradients(model, seed))
        optimizer.step()
        optimizer.zero_grad()

    model, unit = sharded(make_unit)
    optimizer = kinds[kind](model)
    for seed in range(2):
        step(model, unit, optimizer, seed)
    weights, states = get_state_dict(model, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    # into another layout, and into an optimizer that has no state yet
    other, other_unit = sharded(make_unit, whole=True)
    other_optimizer = kinds[kind](other)
    weights, states = get_state_dict(other, other_optimizer)
    dcp.load({"model": weights, "optimizer": states}, checkpoint_id=folder)
    set_state_dict(other, other_optimizer, model_state_dict=weights, optim_state_dict=states)
    for left, right in ((model, other),):
        for mine, loaded in zip(left.parameters(), right.parameters(), strict=True):
            torch.testing.assert_close(mine.full_tensor(), loaded.full_tensor())  # type: ignore[operator]
    step(model, unit, optimizer, 9)
    step(other, other_unit, other_optimizer, 9)
    for mine, loaded in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine.full_tensor(), loaded.full_tensor(), rtol=1e-5, atol=1e-5)  # type: ignore[operator]
    names = get_optimizer_state_dict(model, optimizer, options=StateDictOptions(flatten_optimizer_state_dict=True))
    key = "momentum_buffer" if kind == "hyper" else "exp_avg"
    assert f"state.layers.0.up.weight.{key}" in names


@pytest.mark.parametrize("kind", ["adamw", "hyper"])
def test_distributed_checkpoints_restore_weights_and_states(unit: Any, tmp_path: Path, kind: str) -> None:
    """Public reports, case 101, among others: biases of which a rank has nothing."""
    run_ranks(2, checkpointed, unit, str(tmp_path), kind)
