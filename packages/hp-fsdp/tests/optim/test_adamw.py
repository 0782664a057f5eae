"""AdamW on flat storage: equal to torch's, in as few tensors as there are runs, with states that other code can read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from hp_core import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.errors import LayoutError, PlanError
from hp_core.testing import record_collectives, run_ranks
from hp_fsdp.optim import AdamW

SHAPES = [(8, 5), (7,), (3, 8), (1,), (5, 3), ()]


def values(shapes: Sequence[tuple[int, ...]] = SHAPES, seed: int = 0) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator) for shape in shapes]


class Neighbours:
    """Plain parameters that are views of one chunk, with gradients that are views of another."""

    def __init__(self, tensors: Sequence[torch.Tensor], gaps: Sequence[int] = ()) -> None:
        self.gaps = gaps
        self.chunk, views = self._laid_out(tensors, gaps)
        self.params = [nn.Parameter(view) for view in views]

    def _laid_out(
        self, tensors: Sequence[torch.Tensor], gaps: Sequence[int]
    ) -> tuple[torch.Tensor, list[torch.Tensor]]:
        starts, end = [], 0
        for place, tensor in enumerate(tensors):
            end += gaps[place] if place < len(gaps) else 0
            starts.append(end)
            end += tensor.numel()
        chunk = torch.zeros(end)
        views = [chunk[start : start + t.numel()].view(t.shape) for start, t in zip(starts, tensors, strict=True)]
        for view, tensor in zip(views, tensors, strict=True):
            view.copy_(tensor)
        return chunk, views

    def give(self, gradients: Sequence[torch.Tensor | None], gaps: Sequence[int] | None = None) -> None:
        pairs = zip(self.params, gradients, strict=True)
        filled = [torch.zeros_like(param) if given is None else given for param, given in pairs]
        _, views = self._laid_out(filled, self.gaps if gaps is None else gaps)
        for param, gradient, view in zip(self.params, gradients, views, strict=True):
            param.grad = None if gradient is None else view


class Kernels(TorchDispatchMode):
    """The ops that run, with the number of tensors in their first argument."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        first = args[0] if args else None
        self.calls.append((function._overloadpacket.__name__, len(first) if isinstance(first, (list, tuple)) else 1))
        return function(*args, **(kwargs or {}))

    def lengths(self, name: str) -> list[int]:
        return [length for called, length in self.calls if called == name]


def assert_equal(params: Sequence[Any], dense: Sequence[torch.Tensor]) -> None:
    for param, expected in zip(params, dense, strict=True):
        found = param.detach()
        found = found.full_tensor() if hasattr(found, "full_tensor") else found
        torch.testing.assert_close(found, expected.detach(), rtol=2e-6, atol=2e-7)


OPTIONS: dict[str, dict[str, Any]] = {
    "default": {},
    "foreach": {"foreach": True},
    "neither": {"foreach": False, "fused": False},
    "fused": {"fused": True},
    "amsgrad": {"amsgrad": True},
    "maximize": {"maximize": True},
    "tensor lr": {"lr": torch.tensor(0.02)},
    "amsgrad foreach": {"amsgrad": True, "foreach": True},
}


def train_all(make_unit: Callable[..., Any], ranks: int, all_options: dict[str, dict[str, Any]]) -> None:
    for name, options in all_options.items():
        print(name)  # shown if it fails
        train(make_unit, ranks, options)


def train(make_unit: Callable[..., Any], ranks: int, options: dict[str, Any]) -> None:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    unit = make_unit(values(), mesh)
    dense = [nn.Parameter(value) for value in values()]
    options = {"lr": 0.01, "weight_decay": 0.1, **options}
    mine, theirs = AdamW(unit.params, **options), torch.optim.AdamW(dense, **options)
    for step in range(3):
        gradients = values(seed=step + 1)
        unit.give(gradients)
        for param, gradient in zip(dense, gradients, strict=True):
            param.grad = gradient
        with record_collectives() as log:
            mine.step()
        theirs.step()
        assert not log, log.summary()
    assert_equal(unit.params, dense)
    for param, expected in zip(unit.params, dense, strict=True):
        state, other = mine.state[param], theirs.state[expected]
        assert set(state) == set(other)
        assert float(state["step"]) == 3
        for key in sorted(set(state) - {"step"}):
            assert state[key].layout is param.layout
            torch.testing.assert_close(state[key].full_tensor(), other[key], rtol=2e-6, atol=2e-7)
    held = {state["exp_avg"]._local.untyped_storage().data_ptr() for state in mine.state.values()}
    assert len(held - {0}) == 1, "the states of a chunk are one buffer"


@pytest.mark.parametrize("ranks", [2, 4])
def test_three_steps_on_chunks_equal_torchs_on_dense_parameters(unit: Any, ranks: int) -> None:
    run_ranks(ranks, train_all, unit, ranks, OPTIONS)


@pytest.mark.parametrize("count", [3, 40])
def test_one_kernel_on_one_tensor_per_chunk_whatever_the_number_of_parameters(count: int) -> None:
    chunks = [Neighbours(values([(4, 3), (5,)] * count)) for _ in range(2)]
    optimizer = AdamW([param for chunk in chunks for param in chunk.params])
    for step in range(3):
        for chunk in chunks:
            chunk.give(values([(4, 3), (5,)] * count, seed=step))
        with Kernels() as kernels:
            optimizer.step()
        assert kernels.lengths("_fused_adamw_") == [2]
    computing = [name for name, _ in kernels.calls if not name.startswith("_record_function")]
    assert sorted(computing) == ["_foreach_add_", "_fused_adamw_", "as_strided", "as_strided"]


def test_python_calls_of_a_step_dont_grow_with_the_number_of_parameters() -> None:
    counts = []
    for count in (3, 40):
        chunk = Neighbours(values([(4, 3), (5,)] * count))
        optimizer = AdamW(chunk.params)
        for step in range(2):
            chunk.give(values([(4, 3), (5,)] * count, seed=step))
            optimizer.step()
        chunk.give(values([(4, 3), (5,)] * count, seed=2))
        calls = 0

        def count_call(frame: Any, event: str, arg: Any) -> None:
            nonlocal calls
            calls += event == "call"

        sys.setprofile(count_call)
        optimizer.step()
        sys.setprofile(None)
        counts.append(calls)
    assert counts[0] == counts[1] < 120


def test_parameters_without_gradients_break_a_run_and_stay() -> None:
    chunk, dense = Neighbours(values()), [nn.Parameter(value) for value in values()]
    mine, theirs = AdamW(chunk.params, lr=0.1), torch.optim.AdamW(dense, lr=0.1)
    lengths = []
    for step, missing in enumerate([(2,), (2, 3), (), (0,), ()]):
        gradients: list[Any] = values(seed=step + 1)
        for place in missing:
            gradients[place] = None
        chunk.give(gradients)
        for param, gradient in zip(dense, gradients, strict=True):
            param.grad = gradient
        with Kernels() as kernels:
            mine.step()
        theirs.step()
        lengths += kernels.lengths("_fused_adamw_")
        assert_equal(chunk.params, dense)
        assert {id(param) in map(id, mine.state) for param in chunk.params} == ({True, False} if step < 2 else {True})
    assert lengths == [2, 2, 4, 4, 5]  # counts of steps differ from the third on, and whose counts differ are apart
    assert [float(mine.state[param]["step"]) for param in chunk.params] == [
        float(theirs.state[param]["step"]) for param in dense
    ]


def test_what_lies_between_belongs_to_someone_else() -> None:
    """A gap may be padding or another optimizer's parameter, even one that is zero like its gradient: both stay as they are."""
    tensors = [torch.ones(4), torch.zeros(4), torch.ones(4)]
    chunk = Neighbours(tensors)
    optimizers = AdamW([chunk.params[0], chunk.params[2]], lr=0.1), AdamW([chunk.params[1]], lr=0.1)
    chunk.give([torch.ones(4)] * 3)
    optimizers[0].step()
    assert torch.equal(chunk.params[1], torch.zeros(4))
    optimizers[1].step()
    assert torch.allclose(chunk.params[1], torch.full((4,), -0.1))
    padded = Neighbours(tensors, gaps=(0, 3, 0))
    optimizer = AdamW(padded.params, lr=0.1, eps=0.0)
    padded.give([torch.ones(4)] * 3)
    with Kernels() as kernels:
        optimizer.step()
    assert kernels.lengths("_fused_adamw_") == [2]
    assert torch.equal(padded.chunk[4:7], torch.zeros(3))


def test_param_groups_have_options_of_their_own() -> None:
    chunk, dense = Neighbours(values()), [nn.Parameter(value) for value in values()]

    def groups(params: Sequence[Any]) -> list[dict[str, Any]]:
        return [
            {"params": [p for p in params if p.dim() > 1], "weight_decay": 0.3},
            {"params": [p for p in params if p.dim() < 2], "lr": 0.5},
        ]

    mine, theirs = AdamW(groups(chunk.params)), torch.optim.AdamW(groups(dense))
    for step in range(2):
        chunk.give(values(seed=step))
        for param, gradient in zip(dense, values(seed=step), strict=True):
            param.grad = gradient
        mine.step()
        theirs.step()
    assert_equal(chunk.params, dense)


def test_gradients_that_move_apart_or_together_are_noticed() -> None:
    chunk, dense = Neighbours(values()), [nn.Parameter(value) for value in values()]
    mine, theirs = AdamW(chunk.params, lr=0.1), torch.optim.AdamW(dense, lr=0.1)
    lengths = []
    for step in range(7):
        gradients = values(seed=step)
        if step % 2:
            chunk.give(gradients)
        elif step == 6:
            chunk.give(gradients, gaps=[0, 2, 0, 0, 3, 0])
        else:
            for param, gradient in zip(chunk.params, gradients, strict=True):
                param.grad = gradient.t().contiguous().t() if step == 4 and gradient.dim() == 2 else gradient.clone()
        for param, gradient in zip(dense, gradients, strict=True):
            param.grad = gradient
        with Kernels() as kernels:
            mine.step()
        theirs.step()
        lengths += kernels.lengths("_fused_adamw_")
    assert_equal(chunk.params, dense)
    assert lengths == [6, 1, 6, 1, 6, 1, 3]


def test_gradients_of_the_last_step_are_let_go() -> None:
    chunk = Neighbours(values())
    optimizer = AdamW(chunk.params)
    chunk.give(values())
    gone = chunk.params[0].grad.untyped_storage()  # type: ignore[union-attr]
    import weakref

    alive = weakref.ref(gone)
    del gone
    optimizer.step()
    optimizer.zero_grad()
    assert alive() is None


def test_autograd_sees_the_write() -> None:
    chunk = Neighbours([torch.ones(3), torch.ones(3)])
    optimizer = AdamW(chunk.params)
    loss = sum((param**2).sum() for param in chunk.params)
    chunk.give([torch.ones(3)] * 2)
    optimizer.step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()  # type: ignore[union-attr]


def bytes_of_state(make_unit: Callable[..., Any]) -> tuple[int, int]:
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    unit = make_unit(values(), mesh)
    optimizer = AdamW(unit.params)
    unit.give(values())
    optimizer.step()
    storages = {
        value._local.untyped_storage().data_ptr(): value._local.untyped_storage().nbytes()
        for state in optimizer.state.values()
        for key, value in state.items()
        if key != "step"
    }
    return sum(storages.values()), sum(param._local.nbytes for param in unit.params)


def test_states_have_the_size_of_the_shard(unit: Any) -> None:
    """Public reports, case 108."""
    for state, shard in run_ranks(4, bytes_of_state, unit):
        assert state == 2 * shard


def of_two_meshes(make_unit: Callable[..., Any]) -> None:
    flat = init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    grid = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    unit = make_unit(values(), flat)
    other = make_unit(
        values(),
        grid,
        outer=[[Replicate(), Shard(0)]] + [[Replicate(), Replicate()]] * 4 + [[Replicate(), Replicate()]],
    )
    single = nn.Parameter(distribute_tensor(values()[0], grid, [Replicate(), Shard(1)], src_data_rank=None))
    plain = nn.Parameter(values()[0])
    dense = [nn.Parameter(value) for value in (*values(), *values(), values()[0], values()[0])]
    params = [*unit.params, *other.params, single, plain]
    mine, theirs = AdamW(params, lr=0.1), torch.optim.AdamW(dense, lr=0.1)
    for step in range(2):
        gradients = values(seed=step)
        unit.give(gradients)
        other.give(gradients)
        single.grad = distribute_tensor(gradients[0], grid, [Replicate(), Shard(1)], src_data_rank=None)
        plain.grad = gradients[0].clone()
        for param, gradient in zip(dense, [*gradients, *gradients, gradients[0], gradients[0]], strict=True):
            param.grad = gradient
        mine.step()
        theirs.step()
    assert_equal(params, dense)


def test_parameters_of_different_meshes_in_one_optimizer(unit: Any) -> None:
    """Public reports, case 109."""
    run_ranks(4, of_two_meshes, unit)


def interchange(make_unit: Callable[..., Any]) -> None:
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    dense = [nn.Parameter(value) for value in values()]
    theirs = torch.optim.AdamW(dense, lr=0.1, amsgrad=True)
    unit = make_unit(values(), mesh)
    mine = AdamW(unit.params, lr=0.1, amsgrad=True)

    def step(optimizer: Any, params: Any, seed: int) -> None:
        if params is unit.params:
            unit.give(values(seed=seed))
        else:
            for param, gradient in zip(params, values(seed=seed), strict=True):
                param.grad = gradient
        optimizer.step()

    step(theirs, dense, 1)
    step(mine, unit.params, 1)
    mine.load_state_dict(theirs.state_dict())  # whole tensors into shards
    step(theirs, dense, 2)
    step(mine, unit.params, 2)
    assert_equal(unit.params, dense)
    again = AdamW(unit.params, lr=0.1, amsgrad=True)
    again.load_state_dict(mine.state_dict())
    torchs = torch.optim.AdamW(unit.params, lr=0.1, amsgrad=True)
    torchs.load_state_dict(mine.state_dict())
    step(theirs, dense, 3)
    step(again, unit.params, 3)
    assert_equal(unit.params, dense)
    short = theirs.state_dict()
    short["state"][0]["exp_avg"] = torch.zeros(2, 2)
    with pytest.raises(LayoutError, match=r"'exp_avg' has shape \(2, 2\), but its parameter has \(8, 5\)"):
        mine.load_state_dict(short)


def test_state_dicts_go_to_torch_and_back(unit: Any) -> None:
    run_ranks(2, interchange, unit)


def test_a_state_of_torch_goes_on_here_and_the_other_way_round() -> None:
    params = [[nn.Parameter(value) for value in values()] for _ in range(3)]
    kinds = [torch.optim.AdamW(params[0]), AdamW(params[1]), torch.optim.AdamW(params[2])]
    for step in range(6):
        for group, optimizer in zip(params, kinds, strict=True):
            for param, gradient in zip(group, values(seed=step), strict=True):
                param.grad = gradient.clone()
            optimizer.step()
        import copy

        kinds[1], kinds[2] = (
            (AdamW if step % 2 == 0 else torch.optim.AdamW)(params[1]),
            (torch.optim.AdamW if step % 2 == 0 else AdamW)(params[2]),
        )
        for optimizer in kinds[1:]:
            optimizer.load_state_dict(copy.deepcopy(kinds[0].state_dict()))
    assert_equal(params[1], params[0])
    assert_equal(params[2], params[0])


def test_closures_hooks_schedulers_and_copies() -> None:
    import copy
    import pickle

    chunk = Neighbours(values([(3,), (2, 2)]))
    optimizer = AdamW(chunk.params, lr=0.1)
    steps = []
    optimizer.register_step_post_hook(lambda *_: steps.append(1))
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = sum((param**2).sum() for param in chunk.params)
        loss.backward()  # type: ignore[union-attr]
        return loss  # type: ignore[return-value]

    first, second = optimizer.step(closure), None
    schedule.step()
    second = optimizer.step(closure)
    assert second < first
    assert steps == [1, 1]
    assert optimizer.param_groups[0]["lr"] == 0.05
    for twin in (copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))):
        twin.step()
        assert float(next(iter(twin.state.values()))["step"]) == 2 + (
            twin.param_groups[0]["params"][0].grad is not None
        )


def test_bad_use_is_refused() -> None:
    embedding = nn.Embedding(4, 3, sparse=True)
    with pytest.raises(PlanError, match="differentiable"):
        AdamW(embedding.parameters(), differentiable=True)
    optimizer = AdamW(embedding.parameters())
    embedding(torch.tensor([1])).sum().backward()
    with pytest.raises(PlanError, match=r"sparse gradient.*SparseAdam"):
        optimizer.step()


def test_importing_loads_no_framework() -> None:
    program = "import sys, hp_fsdp.optim; dir(hp_fsdp.optim); assert not {'torch', 'mindspore'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True)
