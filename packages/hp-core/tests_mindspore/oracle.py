"""`check_ops(ranks, cases)`: functions of tensors on DTensors in many combinations of layouts, against dense.

Compared are values, shapes, gradients by the law, and that a second call plans nothing. Which layouts are tried is the
validator's choice (`hp_core.testing.validator.combinations`).
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from typing import Any

from hp_core.testing import run_ranks

__all__ = ["Case", "check_ops"]

Case = tuple[str, Callable[..., Any], str]
"""What it is, the function of tensors, and its operands: shapes ("4x6"), with a letter in front: p positive, b bool, i7 ids."""

MESHES = {2: ((2,), ("tp",)), 4: ((2, 2), ("dp", "tp"))}
MOST = {2: 16, 4: 8}


def check_ops(ranks: int, cases: Sequence[Case], most: int | None = None) -> None:
    """Compare each case with its dense run, in at most so many combinations of layouts."""
    __tracebackhide__ = True
    faults: dict[str, None] = {}
    for found in run_ranks(ranks, _check, cases[0][1], list(cases), ranks, most or MOST[ranks], timeout=150.0):
        faults |= dict.fromkeys(found)
    assert not faults, "differs from dense:\n" + "\n".join(faults)


def _check(_: Any, cases: Sequence[Case], ranks: int, most: int) -> list[str]:
    from hp_core import init_device_mesh
    from hp_core.testing.validator.combinations import combinations, spread

    shape, names = MESHES[ranks]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    faults = []
    for name, function, texts in cases:
        case = _Case(function, texts, zlib.crc32(name.encode()))
        every = combinations(mesh, case.operands, extras=False)
        for number in spread(len(every), most):
            layouts = every[number]
            where = ", ".join(layout.compact_str for layout in layouts)
            try:
                faults += [f"{name}({texts}): {what} in {where}" for what in case.compare(layouts)]
            except Exception as error:  # every kind of failure is a finding about this case
                faults.append(f"{name}({texts}): {type(error).__name__}: {error} in {where}")
    return faults


class _Case:
    """A function, its dense operands, and what the dense run gives."""

    def __init__(self, function: Callable[..., Any], texts: str, seed: int) -> None:
        import numpy as np

        from hp_core.platform.protocol import SampleOperand

        self.function = function
        self.random = np.random.default_rng(seed)
        self.operands = []
        for text in texts.split():
            kind, _, sizes = text.rpartition(":")
            shape = () if sizes == "-" else tuple(int(size) for size in sizes.split("x"))
            if kind == "b":
                value = SampleOperand(self.random.random(shape) < 0.5, False, False)
            elif kind.startswith("i"):
                value = SampleOperand(self.random.integers(0, int(kind[1:]), shape), False, False)
            else:
                drawn = self.random.integers(-8, 9, shape) / 8
                drawn = self.random.random(shape) + 0.5 if kind == "p" else drawn + 0.01
                value = SampleOperand(drawn.astype(np.float32), True, kind != "n")
            self.operands.append(value)
        dense = self._run([operand.tensor for operand in self.operands], lambda local, index: _tensor(local))
        self.results, self.gradients = dense

    def _run(self, locals_: Sequence[Any], wrap: Callable[[Any, int], Any]) -> tuple[list[Any], list[Any]]:
        """Outputs, and gradients of the sum of all outputs times fixed weights, by the differentiable locals."""
        import mindspore as ms
        import numpy as np

        places = [index for index, operand in enumerate(self.operands) if operand.differentiable]
        held: list[Any] = []

        def loss(*differentiable: Any) -> Any:
            given = dict(zip(places, differentiable, strict=True))
            result = self.function(*[wrap(given.get(i, local), i) for i, local in enumerate(locals_)])
            held[:] = list(result) if isinstance(result, (tuple, list)) else [result]
            total = None
            for index, output in enumerate(held):
                if output.dtype not in (ms.float32, ms.float64):
                    continue
                weight = np.random.default_rng(index).normal(size=tuple(output.shape)).astype(np.float32)
                term = (output * _like(weight, output)).sum()
                total = term if total is None else total + term
            return total if not hasattr(total, "_spec") else total.full_tensor()

        inputs = [_tensor(locals_[place]) for place in places]
        if not inputs:
            loss()
            return held, []
        gradients = ms.grad(loss, tuple(range(len(places))))(*inputs)
        return held, list(gradients) if isinstance(gradients, tuple) else [gradients]

    def compare(self, layouts: Sequence[Any]) -> list[str]:
        """What differs in this combination of layouts."""
        import numpy as np

        from hp_core import DTensor
        from hp_core.dtensor.dispatch import dispatch_cache_info

        values = [operand.tensor for operand in self.operands]
        locals_ = [_part(value, layout) for value, layout in zip(values, layouts, strict=True)]

        def wrap(local: Any, index: int) -> Any:
            return DTensor.from_local(_tensor(local), layouts[index], shape=values[index].shape)

        outputs, gradients = self._run(locals_, wrap)
        problems = []
        for index, (output, wanted) in enumerate(zip(outputs, self.results, strict=True)):
            if tuple(output.shape) != tuple(wanted.shape) or output.dtype != wanted.dtype:
                problems.append(f"output {index} is {output.shape} {output.dtype} for {wanted.shape} {wanted.dtype}")
                continue
            whole = output.detach().full_tensor().asnumpy()
            if not np.allclose(whole, wanted.asnumpy(), rtol=2e-4, atol=2e-5):
                problems.append(f"output {index} differs in {output.layout.compact_str}")
        places = [index for index, operand in enumerate(self.operands) if operand.differentiable]
        for place, gradient, wanted in zip(places, gradients, self.gradients, strict=True):
            part = _own_part(wanted.asnumpy(), layouts[place])
            if tuple(gradient.shape) != part.shape:
                problems.append(f"gradient {place} has local shape {gradient.shape} for {part.shape}")
            elif not np.allclose(gradient.asnumpy(), part, rtol=2e-4, atol=2e-5):
                problems.append(f"gradient {place} differs by {np.abs(gradient.asnumpy() - part).max():.2e}")
        before = dispatch_cache_info().misses
        again = self.function(*[wrap(local, index) for index, local in enumerate(locals_)])
        again = list(again) if isinstance(again, (tuple, list)) else [again]
        if dispatch_cache_info().misses != before:
            problems.append("the second call was planned again")
        if any(first.layout is not second.layout for first, second in zip(outputs, again, strict=True)):
            problems.append("the second call's layouts differ")
        return problems


def _tensor(value: Any) -> Any:
    import numpy as np
    from mindspore import Tensor

    return Tensor.from_numpy(np.array(value)) if isinstance(value, (np.ndarray, np.generic)) else value


def _like(weight: Any, output: Any) -> Any:
    from hp_core import DTensor

    if not hasattr(output, "_spec"):
        return _tensor(weight)
    layout = output.layout.gradient
    return DTensor.from_local(_tensor(_own_part(weight, layout)), layout, shape=tuple(output.shape))


def _own_part(value: Any, layout: Any) -> Any:
    return value[tuple(slice(start, stop) for start, stop in layout.bounds(value.shape))]


def _part(value: Any, layout: Any) -> Any:
    """This rank's part; where a sum is pending, unequal parts that add up to the value."""
    import numpy as np

    coordinate = layout.mesh.require_coordinate(None)
    for axis, _ in layout.partials:
        noise = (np.random.default_rng(axis).integers(-8, 9, value.shape) / 8).astype(value.dtype)
        value = 3 * value + noise if coordinate[axis] == 0 else -2 * value - noise
    return _own_part(value, layout)
