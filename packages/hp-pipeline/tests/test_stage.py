"""The stage's own parts on one process: backwards in two pieces, messages taken apart, batches cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from hp_core.errors import PlanError
from hp_pipeline.batches import BatchDimSpec, cut_all, cut_batch
from hp_pipeline.itinerary import releases
from hp_pipeline.messages import Form, pack, unpack
from hp_pipeline.platform.torch.chunk import TorchChunk
from hp_pipeline.stage import PipelineStage
from hp_pipeline.steps import parse_step


class Model(nn.Module):
    """Parts from which the graphs below are made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.norm = nn.LayerNorm(4)
        self.free = nn.Parameter(torch.randn(4, 4))


GRAPHS: dict[str, Callable[[Any, torch.Tensor], list[torch.Tensor]]] = {
    "a chain": lambda m, x: [m.second(torch.tanh(m.norm(m.first(x))))],
    "a layer used twice": lambda m, x: [m.first(torch.tanh(m.first(x)))],
    "a weight used in two ways": lambda m, x: [m.second((x @ m.free).tanh() @ m.free.t() @ m.free)],
    "a root of weights alone": lambda m, x: [m.first(x), m.free * 2, (m.free @ m.second.weight).sum()],
    "a root that is a weight": lambda m, x: [m.first(x), m.free],
    "a weight of a root that is used as well": lambda m, x: [x @ m.free, m.free * 3],
    "the input itself": lambda m, x: [x, m.first(x)],
    "weights made of weights": lambda m, x: [x @ (m.first.weight * m.free) + m.first.bias * m.norm.weight],
    "an input that isn't used": lambda m, x: [m.first(torch.ones(2, 4).double())],
    "a root given twice": lambda m, x: [m.first(x), *[m.free * 2] * 2],
    "a product with itself": lambda m, x: [m.first(x) * m.first(x) * (m.norm.weight * m.norm.weight)],
}


@pytest.mark.parametrize("name", GRAPHS)
def test_a_backward_in_two_pieces_gives_the_same(name: str) -> None:
    torch.manual_seed(0)
    model = Model().double()

    def gradients(split: bool) -> list[torch.Tensor | None]:
        model.zero_grad()
        leaf = torch.arange(8.0, dtype=torch.float64).view(2, 4).requires_grad_()
        roots = GRAPHS[name](model, leaf)
        chunk = TorchChunk([leaf], roots)
        arriving = [torch.full_like(root, 0.3 + at) for at, root in enumerate(roots)]
        if not split:
            return [*chunk.backward(arriving), *(parameter.grad for parameter in model.parameters())]
        first = chunk.backward_inputs(arriving)
        assert all(parameter.grad is None for parameter in model.parameters()), "weights wait for the second piece"
        chunk.backward_weights()
        return [*first, *(parameter.grad for parameter in model.parameters())]

    for whole, pieces in zip(gradients(False), gradients(True), strict=True):
        assert (whole is None) == (pieces is None)
        if whole is not None:
            torch.testing.assert_close(pieces, whole, rtol=1e-13, atol=1e-13)


def test_the_second_piece_computes_no_node_of_the_first_again() -> None:
    """Otherwise a split backward would cost more than a whole one."""
    runs = []

    class Counted(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
            return x * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            runs.append(1)
            return gradient * 2

    torch.manual_seed(0)
    model = Model().double()
    leaf = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    chunk = TorchChunk([leaf], [model.second(Counted.apply(model.first(leaf)))])
    chunk.backward_inputs([torch.ones(2, 4, dtype=torch.float64)])
    chunk.backward_weights()
    assert runs == [1]
    assert model.first.weight.grad is not None


def test_roots_without_gradients_are_left_out() -> None:
    model = Model().double()
    leaf = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    for split in (False, True):
        chunk = TorchChunk([leaf], [model.first(leaf), model.second(leaf)])
        backward = chunk.backward_inputs if split else chunk.backward
        assert backward([None, None]) == [None]
        if split:
            chunk.backward_weights()
    assert all(parameter.grad is None for parameter in model.parameters())


LEAVES = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**70), 2**70),
    st.floats(allow_nan=False),
    st.text(max_size=5),
    st.builds(
        lambda rows, kind: torch.ones(rows, 2).to(kind),
        st.integers(0, 3),
        st.sampled_from([torch.float32, torch.int64, torch.bool]),
    ),
)
TREES = st.recursive(
    LEAVES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=3), inner, max_size=3), st.tuples(inner, inner)
    ),
)


@settings(max_examples=100, deadline=None)
@given(TREES)
def test_any_tree_arrives_as_it_was(tree: Any) -> None:
    parcel = pack(tree, "a test")
    form = Form.of_description(parcel.form.description)
    assert form == parcel.form
    assert form.signature == parcel.form.signature
    travelling = parcel.travelling("cpu")
    assert [(tuple(one.shape), str(one.dtype).removeprefix("torch.")) for one in travelling] == list(form.buffers)
    from torch.utils._pytree import tree_unflatten

    again = tree_unflatten(list(unpack(form, travelling).leaves), form.structure)
    assert repr(again) == repr(tree)


def test_gradients_come_back_for_what_needs_them() -> None:
    leaf = torch.ones(2, requires_grad=True)
    parcel = pack([leaf * 2, leaf.detach(), torch.ones(3, dtype=torch.int64)], "a test")
    assert parcel.form.gradients == (((2,), "float32"),)
    assert [slot.requires_grad for slot in parcel.form.slots] == [True, False, False]
    received = unpack(parcel.form, parcel.travelling("cpu"))
    assert [one.requires_grad for one in received.tensors] == [True, False, False]
    assert all(one.is_leaf for one in received.tensors)


def test_forms_tell_how_they_differ() -> None:
    old = pack({"x": torch.ones(4, 16), "n": 3}, "a test").form
    assert pack({"x": torch.zeros(4, 16), "n": 5}, "a test").form == old
    assert (
        old.difference(pack({"x": torch.ones(4, 17), "n": 3}, "a test").form)
        == "value 0: float32 (4, 16) -> float32 (4, 17)"
    )


def test_sparse_tensors_are_refused() -> None:
    with pytest.raises(PlanError, match="plain tensors travel"):
        pack(torch.ones(2, 2).to_sparse(), "a test")


@given(st.integers(1, 9), st.integers(0, 20))
def test_batches_are_cut_evenly(parts: int, more: int) -> None:
    rows = parts + more
    cut = cut_batch({"x": torch.arange(rows), "y": (torch.arange(rows * 2).view(rows, 2), 7)}, 0, parts, "x")
    assert cut.rows == rows
    sizes = [len(part["x"]) for part in cut.parts]
    assert sum(sizes) == rows
    assert max(sizes) - min(sizes) <= 1
    assert sizes == sorted(sizes, reverse=True)
    assert torch.equal(torch.cat([part["x"] for part in cut.parts]), torch.arange(rows))
    assert all(part["y"][1] == 7 for part in cut.parts)


def test_values_that_have_no_batch_go_to_each_micro_batch() -> None:
    table = torch.ones(3)
    positional, keyword, rows = cut_all((torch.ones(2, 6), table), {"n": 4}, (BatchDimSpec(1), None), {}, 3)
    assert [tuple(part[0].shape) for part in positional] == [(2, 2)] * 3
    assert all(part[1] is table for part in positional)
    assert keyword == [{"n": 4}] * 3
    assert rows == 6


@pytest.mark.parametrize(
    ("args", "dims", "match"),
    [
        ((torch.ones(2, 4),), 0, "2 rows in dim 0, too few for 3 micro-batches"),
        ((torch.ones(6), torch.ones(7)), 0, "positional input 0 has 6, positional input 1 has 7"),
        ((torch.ones(6),), (0, 1), "2 entries for 1 positional"),
        ((torch.ones(6),), 1, "no dim 1"),
        (([torch.ones(6), torch.ones(4)],), 0, "6 and 4 rows"),
    ],
)
def test_batches_that_dont_fit_are_refused(args: Any, dims: Any, match: str) -> None:
    with pytest.raises(PlanError, match=match):
        cut_all(args, {}, dims, {}, 3)


def test_a_send_has_arrived_when_the_peer_has_answered_after_it() -> None:
    first = [parse_step(word) for word in "F0.0 SEND_F0.0 F0.1 SEND_F0.1 RECV_B0.0 RECV_B0.1".split()]
    second = [parse_step(word) for word in "RECV_F1.0 F1.0 B1.0 SEND_B1.0 RECV_F1.1 F1.1 B1.1 SEND_B1.1".split()]
    assert releases([first, second], (0, 1), 0) == {4: [1], 5: [3]}
    assert releases([first, second], (0, 1), 1) == {}


def test_a_stage_says_what_it_is() -> None:
    stage = PipelineStage(Model(), 1, 3)
    assert (stage.is_first, stage.is_last, stage.in_flight) == (False, False, 0)
    assert repr(stage) == "PipelineStage(1 of 3, Model)"
