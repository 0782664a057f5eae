"""Samples of MindSpore's ops: what the validator of sharding rules calls, family by family, on a CPU.

A table for each family, in the form that `hp_core.platform.sample_table` describes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import Any

import mindspore as ms
import numpy as np

from hp_core.platform.mindspore.arrays import Array, as_array, as_tensor
from hp_core.platform.mindspore.autograd import seeded
from hp_core.platform.mindspore.op_samples.values import differing, make_operand, noise
from hp_core.platform.mindspore.wrapper import new_dtensor
from hp_core.platform.protocol import OpSample, SampleOperand

__all__ = ["MindSporeOpSamples"]

_TABLES = ("elementwise", "products", "shapes", "reductions", "indices", "layers")


class MindSporeOpSamples:
    """See `hp_core.platform.protocol.OpSamples`."""

    record = "tests_mindspore/golden"
    most: dict[str, int] = {"2": 6, "2x2": 5}  # noqa: RUF012

    def table(self) -> tuple[OpSample, ...]:
        """All samples."""
        return _table()

    def has_inplace(self, op: str) -> bool:
        """No: MindSpore's CPU back end leaves tensors as they are when they are written to by arithmetic."""
        return False

    def values(self, operands: str, seed: int) -> list[SampleOperand]:
        """Dense values of the operands."""
        random = np.random.default_rng(seed)
        return [make_operand(text, random) for text in operands.split()]

    def noise(self, like: Any, seed: int) -> Array:
        """Random values of the same shape and element type."""
        return noise(like, seed)

    def gradients(
        self,
        inputs: Sequence[Any],
        differentiable: Sequence[bool],
        run: Callable[[list[Any]], Sequence[tuple[Any, Any]]],
    ) -> list[Any]:
        """Gradients of the inputs by the outputs that `run` gives: by `mindspore.grad` of a function of local tensors."""
        given = [as_tensor(value) for value in inputs]
        places = [place for place, wanted in enumerate(differentiable) if wanted]
        if not places:
            run(given)
            return [None] * len(given)
        failures: list[BaseException] = []
        depends: list[bool] = []

        def computed(*locals_: Any) -> Any:
            for place, local in zip(places, locals_, strict=True):
                whole = given[place]
                if hasattr(whole, "_spec"):
                    local = type(whole).from_local(local, whole.layout, shape=whole.shape)
                given[place] = local
            try:
                pairs = run(given)
            except BaseException as error:  # MindSpore must leave the function in order; raised again below
                failures.append(error)
                pairs = ()
            depends.append(bool(pairs))
            outputs = [getattr(output, "_local", output) for output, _ in pairs] or list(locals_)
            seeds = [getattr(seed, "_local", seed) for _, seed in pairs] or [
                np.zeros_like(as_array(x)) for x in locals_
            ]
            return seeded(outputs, seeds)

        own = [getattr(given[place], "_local", given[place]) for place in places]
        found = ms.grad(computed, tuple(range(len(places))))(*own)
        if failures:
            raise failures[0]
        result: list[Any] = [None] * len(given)
        if depends[0]:
            for place, gradient in zip(places, found if isinstance(found, tuple) else (found,), strict=True):
                whole = given[place]
                distributed = hasattr(whole, "_spec")
                result[place] = (
                    new_dtensor(type(whole), gradient, whole._spec.gradient) if distributed else as_array(gradient)
                )
        return result

    def extremum(self, left: Any, right: Any, largest: bool) -> Array:
        """The larger, or the smaller, of each two elements."""
        found: Array = (np.maximum if largest else np.minimum)(as_array(left), as_array(right))
        return found

    def differing(self, pairs: Sequence[tuple[Any, Any]]) -> list[int]:
        """Numbers of the pairs that differ by more than rounding."""
        return differing(pairs)

    def native_calls(self) -> dict[str, tuple[Callable[..., Any], ...]]:
        """None: MindSpore has no distributed op library."""
        return {}


@cache
def _table() -> tuple[OpSample, ...]:
    samples: dict[tuple[str, str, str], OpSample] = {}
    for name in _TABLES:
        for sample in import_module(f"{__name__}.{name}").SAMPLES:
            samples.setdefault((sample.op, sample.call, sample.operands), sample)
    return tuple(samples.values())
