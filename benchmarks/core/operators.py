"""What a DTensor adds to a single op: microseconds and function calls of every family on small tensors, forward only.

The operands lie so that nothing is communicated. They want gradients, as in training, so that graphs are recorded; the
optimizers step on twenty parameters that have gradients.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F

from benchmarks.core.overhead import CONTENDERS, OURS, RANKS, RAW, TORCH, Wrap, wrappers
from benchmarks.core.sampling import Calls, Samples, count_calls, take_turns
from benchmarks.core.torch_collectives import TorchCollectiveCount
from benchmarks.report import Section, at_most, table
from hp_core.testing import record_collectives, run_ranks

__all__ = ["OPERATORS", "section"]

ROWS, FEATURES, CLASSES = 32, 32, 64
PARAMETERS = 20
CALLS = 20

Call = Callable[[], object]
Make = Callable[[Wrap], Call]


@dataclass(frozen=True)
class Operator:
    """One line of the table.

    Attributes:
        family: the file of rules that it stands for.
        make: from how a contender wraps local tensors to the call that is timed.
        is_common: whether training steps are made of it, so that it must cost less than torch's DTensor.
    """

    family: str
    make: Make
    is_common: bool = False


@dataclass(frozen=True)
class Measured:
    """What a rank found out about one op.

    Attributes:
        samples: times of the contenders that run it without communication.
        calls: their function calls.
        left_out: why torch's DTensor was left out, if it was.
    """

    samples: Samples
    calls: dict[str, Calls]
    left_out: str


def section(rounds: int) -> Section:
    """Measure, and tell of it."""
    ranks = run_ranks(RANKS, measure, rounds, timeout=900.0)
    rows = []
    over: dict[bool, list[tuple[float, str]]] = {True: [], False: []}
    for name, operator in OPERATORS.items():
        samples = Samples.pooled([rank[name].samples for rank in ranks])
        calls, left_out = ranks[0][name].calls, ranks[0][name].left_out
        raw = samples.median(RAW)
        times = [f"{1e6 * samples.median(one):.1f}" if one in samples.rounds else left_out for one in CONTENDERS]
        added = [f"{1e6 * (samples.median(one) - raw):.1f}" if one in samples.rounds else "" for one in (OURS, TORCH)]
        ratio = ""
        if TORCH in samples.rounds:
            value = samples.paired_ratio(OURS, TORCH)
            ratio = f"{value:.2f}"
            over[operator.is_common].append((value, name))
        counts = [f"{calls[one].python} + {calls[one].native}" if one in calls else "" for one in CONTENDERS]
        rows.append((operator.family, name, *times, *added, ratio, *counts))
    head = (
        "family",
        "op",
        *CONTENDERS,
        f"{OURS} adds",
        f"{TORCH} adds",
        "ours / torch's",
        *(f"calls {one}" for one in CONTENDERS),
    )
    lines = [
        f"Forward, microseconds per call (medians), local tensors of [{ROWS}, {FEATURES}]; no communication. The optimizers: "
        f"per step on {PARAMETERS} parameters of [16, 32]. Calls: exact number of function calls, Python + native. Where "
        f"torch's DTensor refuses the op or communicates, it is left out. Ratios are medians over rounds.",
        "",
        *table(head, rows, left=2),
    ]
    worst_common, common_name = max(over[True])
    worst, name = max(over[True] + over[False])
    aims = (
        at_most(f"common ops over torch's DTensor (worst: {common_name})", worst_common, 1.0),
        at_most(f"any op over torch's DTensor (worst: {name})", worst, 2.0),
    )
    return Section("Single ops, every family", tuple(lines), aims)


def measure(rounds: int) -> dict[str, Measured]:
    """On a rank: time each op and count its calls; a contender that refuses an op is left out."""
    wraps = wrappers()
    results = {}
    for name, operator in OPERATORS.items():
        contenders = {contender: operator.make(wrap) for contender, wrap in wraps.items()}
        with record_collectives() as log:
            contenders[OURS]()
        assert not log, f"{name} communicates, so it doesn't show overhead alone: {log.summary()}"
        left_out = _obstacle(contenders[TORCH])
        if left_out:
            del contenders[TORCH]
        samples = take_turns(contenders, rounds, 1 if "AdamW" in name else CALLS)
        counts = {contender: count_calls(call) for contender, call in contenders.items()}
        results[name] = Measured(samples, counts, left_out)
    return results


def _obstacle(call: Call) -> str:
    """Why torch's DTensor can't take part, in a word; empty if it can."""
    try:
        with TorchCollectiveCount() as count:
            call()
    except (RuntimeError, NotImplementedError):
        return "refused"
    return "communicates" if count.messages else ""


# -- the ops --------------------------------------------------------------------------------------------------------


def _two(function: Callable[[Any, Any], object]) -> Make:
    def make(wrap: Wrap) -> Call:
        x, y = (wrap(torch.randn(ROWS, FEATURES), "S0", requires_grad=True) for _ in range(2))
        return lambda: function(x, y)

    return make


def _one(function: Callable[[Any], object]) -> Make:
    return _two(lambda x, _: function(x))


def _linear(wrap: Wrap) -> Call:
    x = wrap(torch.randn(ROWS, FEATURES), "R")
    weight = wrap(torch.randn(FEATURES, FEATURES), "S0", requires_grad=True)
    return lambda: F.linear(x, weight)


def _rms_norm(wrap: Wrap) -> Call:
    x = wrap(torch.randn(ROWS, FEATURES), "S0", requires_grad=True)
    weight = wrap(torch.randn(FEATURES), "R", requires_grad=True)
    return lambda: F.rms_norm(x, (FEATURES,), weight)


def _view(wrap: Wrap) -> Call:
    x = wrap(torch.randn(ROWS, FEATURES), "S0", requires_grad=True)
    rows = x.shape[0]
    return lambda: x.view(rows, 4, FEATURES // 4)


def _attention(wrap: Wrap) -> Call:
    query, key, value = (wrap(torch.randn(2, 4, 16, 8), "S1", requires_grad=True) for _ in range(3))
    return lambda: F.scaled_dot_product_attention(query, key, value, is_causal=True)


def _cross_entropy(wrap: Wrap) -> Call:
    logits = wrap(torch.randn(ROWS, CLASSES), "S0", requires_grad=True)
    target = wrap(torch.randint(CLASSES, (ROWS,)), "S0")
    return lambda: F.cross_entropy(logits, target, reduction="sum")


def _add_in_place(wrap: Wrap) -> Call:
    x, y = wrap(torch.zeros(ROWS, FEATURES), "S0"), wrap(torch.zeros(ROWS, FEATURES), "S0")
    return lambda: x.add_(y)


def _adamw(foreach: bool) -> Make:
    def make(wrap: Wrap) -> Call:
        parameters = [wrap(torch.randn(16, 32), "S0", requires_grad=True) for _ in range(PARAMETERS)]
        for parameter in parameters:
            parameter.grad = wrap(torch.randn(16, 32), "S0")
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, foreach=foreach)
        return lambda: optimizer.step()

    return make


def _of(shape: tuple[int, ...], placement: str, function: Callable[[Any], object]) -> Make:
    """A call on one tensor of this local shape."""

    def make(wrap: Wrap) -> Call:
        x = wrap(torch.randn(shape), placement, requires_grad=True)
        return lambda: function(x)

    return make


def _with_index(function: Callable[[Any, Any], object]) -> Make:
    """A call on rows that are cut, and an index for each of them."""

    def make(wrap: Wrap) -> Call:
        x = wrap(torch.randn(ROWS, FEATURES), "S0", requires_grad=True)
        index = wrap(torch.randint(FEATURES, (ROWS, 4)), "S0")
        return lambda: function(x, index)

    return make


def _bmm(wrap: Wrap) -> Call:
    x = wrap(torch.randn(4, 16, 8), "S0", requires_grad=True)
    y = wrap(torch.randn(4, 8, 16), "S0", requires_grad=True)
    return lambda: torch.bmm(x, y)


def _einsum(wrap: Wrap) -> Call:
    x = wrap(torch.randn(4, 16, 8), "S0", requires_grad=True)
    y = wrap(torch.randn(4, 8, 16), "S0", requires_grad=True)
    return lambda: torch.einsum("bij,bjk->bik", x, y)


def _addmm(wrap: Wrap) -> Call:
    bias = wrap(torch.randn(FEATURES), "S0", requires_grad=True)
    x = wrap(torch.randn(ROWS, FEATURES), "R")
    y = wrap(torch.randn(FEATURES, FEATURES), "S1", requires_grad=True)
    return lambda: torch.addmm(bias, x, y)


def _layer_norm(wrap: Wrap) -> Call:
    x = wrap(torch.randn(ROWS, FEATURES), "S0", requires_grad=True)
    weight, bias = (wrap(torch.randn(FEATURES), "R", requires_grad=True) for _ in range(2))
    return lambda: F.layer_norm(x, (FEATURES,), weight, bias)


def _embedding(wrap: Wrap) -> Call:
    ids = wrap(torch.randint(CLASSES, (ROWS,)), "S0")
    weight = wrap(torch.randn(CLASSES, FEATURES), "R", requires_grad=True)
    return lambda: F.embedding(ids, weight)


def _conv(wrap: Wrap) -> Call:
    x = wrap(torch.randn(4, 4, 8, 8), "S0", requires_grad=True)
    weight = wrap(torch.randn(8, 4, 3, 3), "R", requires_grad=True)
    return lambda: F.conv2d(x, weight, padding=1)


def _mse(wrap: Wrap) -> Call:
    x, y = (wrap(torch.randn(ROWS, FEATURES), "S0", requires_grad=True) for _ in range(2))
    return lambda: F.mse_loss(x, y, reduction="sum")


def _set_rows(wrap: Wrap) -> Call:
    x, y = wrap(torch.zeros(ROWS, FEATURES), "S0"), wrap(torch.zeros(ROWS), "S0")

    def call() -> None:
        x[:, 3] = y

    return call


def _foreach_mul(wrap: Wrap) -> Call:
    tensors = [wrap(torch.randn(16, 32), "S0") for _ in range(PARAMETERS)]
    return lambda: torch._foreach_mul_(tensors, 0.999)


OPERATORS: dict[str, Operator] = {
    "add": Operator("elementwise", _two(lambda x, y: x + y), True),
    "mul by a number": Operator("elementwise", _one(lambda x: x * 0.5), True),
    "silu": Operator("elementwise", _one(F.silu), True),
    "gelu": Operator("elementwise", _one(F.gelu), True),
    "where": Operator("elementwise", _two(lambda x, y: torch.where(x > 0, x, y))),
    "comparison": Operator("elementwise", _two(lambda x, y: x > y)),
    "cast": Operator("elementwise", _one(lambda x: x.to(torch.bfloat16)), True),
    "masked_fill": Operator("elementwise", _one(lambda x: x.masked_fill(x > 0, 0.0))),
    "linear": Operator("matmul", _linear, True),
    "bmm": Operator("matmul", _bmm, True),
    "einsum": Operator("matmul", _einsum),
    "addmm": Operator("matmul", _addmm),
    "sum of a dim": Operator("reduce", _one(lambda x: x.sum(-1)), True),
    "mean of a dim": Operator("reduce", _one(lambda x: x.mean(-1, keepdim=True)), True),
    "amax": Operator("reduce", _one(lambda x: x.amax(-1))),
    "max with indices": Operator("reduce", _one(lambda x: x.max(-1))),
    "argmax": Operator("reduce", _one(lambda x: x.argmax(-1))),
    "var": Operator("reduce", _one(lambda x: x.var(-1))),
    "vector_norm": Operator("reduce", _one(lambda x: torch.linalg.vector_norm(x, dim=-1))),
    "logsumexp": Operator("reduce", _one(lambda x: x.logsumexp(-1))),
    "softmax": Operator("norm", _one(lambda x: F.softmax(x, dim=-1)), True),
    "layer_norm": Operator("norm", _layer_norm, True),
    "rms_norm": Operator("norm", _rms_norm, True),
    "view": Operator("view", _view, True),
    "flatten": Operator("view", _of((8, 4, 32), "S0", lambda x: x.flatten(1)), True),
    "transpose": Operator("view", _one(lambda x: x.transpose(0, 1)), True),
    "permute": Operator("view", _of((8, 4, 32), "S0", lambda x: x.permute(0, 2, 1)), True),
    "expand": Operator("view", _of((8, 1, 32), "S0", lambda x: x.expand(-1, 4, -1))),
    "unsqueeze": Operator("view", _one(lambda x: x.unsqueeze(1)), True),
    "repeat": Operator("view", _one(lambda x: x.repeat(1, 2))),
    "cat": Operator("split", _two(lambda x, y: torch.cat([x, y], dim=1)), True),
    "stack": Operator("split", _two(lambda x, y: torch.stack([x, y], dim=1))),
    "split": Operator("split", _one(lambda x: x.split(FEATURES // 2, dim=1)), True),
    "chunk": Operator("split", _one(lambda x: x.chunk(2, dim=-1)), True),
    "unbind": Operator("split", _of((8, 4, 32), "S0", lambda x: x.unbind(1))),
    "slice": Operator("index", _one(lambda x: x[:, 4:12]), True),
    "select": Operator("index", _one(lambda x: x[:, 0])),
    "gather": Operator("index", _with_index(lambda x, index: x.gather(1, index))),
    "assign a column": Operator("scatter", _set_rows),
    "scatter_add": Operator("scatter", _with_index(lambda x, index: x.scatter_add(1, index, x[:, :4]))),
    "embedding": Operator("embedding", _embedding, True),
    "sort": Operator("scan", _one(lambda x: x.sort(-1))),
    "topk": Operator("scan", _one(lambda x: x.topk(4, -1))),
    "cumsum": Operator("scan", _one(lambda x: x.cumsum(-1))),
    "attention (SDPA)": Operator("attention", _attention, True),
    "conv2d": Operator("conv", _conv),
    "cross entropy": Operator("loss", _cross_entropy, True),
    "mse_loss": Operator("loss", _mse),
    "dropout": Operator("random", _one(lambda x: F.dropout(x, 0.1))),
    "add_ in place": Operator("in place", _add_in_place, True),
    "foreach mul_": Operator("foreach", _foreach_mul),
    "AdamW step": Operator("foreach", _adamw(foreach=False)),
    "AdamW step, foreach": Operator("foreach", _adamw(foreach=True)),
}
