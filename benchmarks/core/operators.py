"""What a DTensor adds to a single op: microseconds and function calls of common ops on small tensors, forward only.

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
from benchmarks.report import Section, table
from hp_core.testing import record_collectives, run_ranks

__all__ = ["OPERATORS", "section"]

ROWS, FEATURES, CLASSES = 32, 32, 64
PARAMETERS = 20
CALLS = 20

Call = Callable[[], object]
Make = Callable[[Wrap], Call]


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
    for name in OPERATORS:
        samples = Samples.pooled([rank[name].samples for rank in ranks])
        calls, left_out = ranks[0][name].calls, ranks[0][name].left_out
        raw = samples.median(RAW)
        times = [f"{1e6 * samples.median(one):.1f}" if one in samples.rounds else left_out for one in CONTENDERS]
        added = [f"{1e6 * (samples.median(one) - raw):.1f}" if one in samples.rounds else "" for one in (OURS, TORCH)]
        counts = [f"{calls[one].python} + {calls[one].native}" if one in calls else "" for one in CONTENDERS]
        rows.append((name, *times, *added, *counts))
    head = ("op", *CONTENDERS, f"{OURS} adds", f"{TORCH} adds", *(f"calls {one}" for one in CONTENDERS))
    lines = [
        f"Forward, microseconds per call (medians), local tensors of [{ROWS}, {FEATURES}]; no communication. The optimizers: "
        f"per step on {PARAMETERS} parameters of [16, 32]. Calls: exact number of function calls, Python + native.",
        "",
        *table(head, rows),
    ]
    return Section("Single ops", tuple(lines))


def measure(rounds: int) -> dict[str, Measured]:
    """On a rank: time each op and count its calls; a contender that refuses an op is left out."""
    wraps = wrappers()
    results = {}
    for name, make in OPERATORS.items():
        contenders = {contender: make(wrap) for contender, wrap in wraps.items()}
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


OPERATORS: dict[str, Make] = {
    "add": _two(lambda x, y: x + y),
    "mul by a number": _one(lambda x: x * 0.5),
    "silu": _one(F.silu),
    "linear": _linear,
    "rms_norm": _rms_norm,
    "softmax": _one(lambda x: F.softmax(x, dim=-1)),
    "view": _view,
    "transpose": _one(lambda x: x.transpose(0, 1)),
    "cat": _two(lambda x, y: torch.cat([x, y], dim=1)),
    "split": _one(lambda x: x.split(FEATURES // 2, dim=1)),
    "attention (SDPA)": _attention,
    "cross entropy": _cross_entropy,
    "add_ in place": _add_in_place,
    "AdamW step": _adamw(foreach=False),
    "AdamW step, foreach": _adamw(foreach=True),
}
