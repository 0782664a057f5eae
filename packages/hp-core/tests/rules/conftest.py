"""The oracle of all op tests: run a function on DTensors in every combination of layouts and compare with the dense run.

`check_ops(ranks, cases)` compares values, shapes, dtypes, gradients and their layouts, and sees that a second call
plans nothing. One call checks many cases; all that differs is reported in one message.
"""

from __future__ import annotations

import inspect
import random
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from math import prod
from typing import Any

import pytest
import torch

from hp_core.errors import ShardingRuleError
from hp_core.testing import run_ranks

Case = tuple[str, Callable[..., Any], str]
"""What it is, the function of tensors, and its operands: blank-separated, alternatives separated by ";".

An operand is its shape ("4x6"; "-" for a scalar), with a letter in front for other values than normal ones: p positive,
u between 0 and 1, b bool, i<n> integers below n (as in "i7:4x6"), n normal without gradient, f normal, never partial.
"""

MESHES = {2: ((2,), ("tp",)), 4: ((2, 2), ("dp", "tp"))}
MOST_COMBINATIONS = {2: 64, 4: 8}
TOLERANCE = {"rtol": 1e-11, "atol": 1e-11}


@pytest.fixture(scope="session")
def check_ops() -> Callable[..., None]:
    """Compare each case with the dense run on 2 or 4 ranks, in at most so many combinations of layouts each."""

    def check(ranks: int, cases: Sequence[Case], most: int | None = None) -> None:
        __tracebackhide__ = True
        # a function of the test module tells the launcher to send that module by value
        local = next((function for _, function, _ in cases if inspect.isfunction(function)), compare_all)
        results = run_ranks(
            ranks, compare_all, local, list(cases), ranks, most or MOST_COMBINATIONS[ranks], timeout=100.0
        )
        faults = {fault[:60]: f"{where}: {fault}" for result in reversed(results) for where, fault in reversed(result)}
        assert not faults, "differs from dense:\n" + "\n".join(faults.values())

    return check


def compare_all(_: Callable[..., Any], cases: Sequence[Case], ranks: int, most: int) -> list[tuple[str, str]]:
    """Run all cases on this rank; returns each combination that differs, with the fault."""
    from hp_core.mesh import init_device_mesh
    from hp_core.platform import get_platform

    shape, names = MESHES[ranks]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    platform = get_platform()
    faults: list[tuple[str, str]] = []
    own_library = platform.fallback
    # a rule must answer: the framework's own library may not fill a gap unseen
    platform.fallback = lambda *_: NotImplemented  # type: ignore[method-assign, assignment]
    try:
        for name, function, alternatives in cases:
            for operands in alternatives.split(";"):
                faults += compare(name, function, operands.split(), mesh, most)
    finally:
        platform.fallback = own_library  # type: ignore[method-assign]
    return faults


def compare(
    name: str, function: Callable[..., Any], operands: Sequence[str], mesh: Any, most: int
) -> list[tuple[str, str]]:
    """One case in all combinations of layouts, or a fixed sample of them."""
    generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
    values = [make_value(operand, generator) for operand in operands]
    results = as_tuple(function(*[value.clone().requires_grad_(grad) for value, _, grad in values]))
    weights = [
        torch.randn(result.shape, generator=generator, dtype=torch.float64).to(result.dtype) for result in results
    ]
    dense = [value.clone().requires_grad_(grad) for value, _, grad in values]
    roots = differentiable(as_tuple(function(*dense)), weights)
    if roots:
        torch.autograd.backward([root for root, _ in roots], [weight for _, weight in roots])

    choices = [list(layouts(mesh, value.dim(), pending)) for value, pending, _ in values]
    count = prod(map(len, choices))
    numbers = range(count) if count <= most else random.Random(zlib.crc32(name.encode())).sample(range(count), most)
    faults = []
    for number in numbers:
        combination = combination_of(number, choices)
        where = f"{' '.join(operands)} laid out {', '.join(layout.compact_str for layout in combination)}"
        try:
            fault = compare_one(function, values, combination, dense, results, weights)
        except ShardingRuleError as error:
            if "can't write in place" in str(error) and any(layout.is_partial() for layout in combination):
                continue  # rightly refused: the values of what is written to are not known yet
            fault = f"{type(error).__name__}: {error}"
        except Exception as error:
            fault = f"{type(error).__name__}: {error}"
        if fault:
            print(name, where, fault, file=sys.stderr, flush=True)
            faults.append((where, f"{name}: {fault}"))
    return faults


def combination_of(number: int, choices: Sequence[Sequence[Any]]) -> list[Any]:
    """The combination of this number, out of as many as there are: one choice for each operand."""
    combination = []
    for options in choices:
        number, index = divmod(number, len(options))
        combination.append(options[index])
    return combination


def compare_one(
    function: Callable[..., Any],
    values: Sequence[tuple[torch.Tensor, bool, bool]],
    combination: Sequence[Any],
    dense: Sequence[torch.Tensor],
    expected: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
) -> str:
    """What differs in one combination of layouts, or nothing."""
    from hp_core.dtensor.api import DTensor
    from hp_core.dtensor.dispatch import dispatch_cache_info

    def build() -> list[Any]:
        return [
            DTensor.from_local(local_part(value, layout), layout, shape=tuple(value.shape)).requires_grad_(grad)
            for (value, _, grad), layout in zip(values, combination, strict=True)
        ]

    inputs = build()
    outputs = as_tuple(function(*inputs))
    faults = []

    def compare_outputs(results: Sequence[Any], when: str) -> None:
        if len(results) != len(expected):
            faults.append(f"{when}: {len(results)} outputs for {len(expected)}")
        for index, (result, wanted) in enumerate(zip(results, expected, strict=True)):
            if not isinstance(result, DTensor):
                faults.append(f"{when}: output {index} is {type(result).__name__}")
            elif result.shape != wanted.shape or result.dtype != wanted.dtype:
                faults.append(
                    f"{when}: output {index} is {tuple(result.shape)} {result.dtype} for {tuple(wanted.shape)} {wanted.dtype}"
                )
            elif tuple(result.to_local().shape) != result.layout.local_shape(tuple(wanted.shape)):
                faults.append(
                    f"{when}: output {index} has local shape {tuple(result.to_local().shape)} in {result.layout.compact_str}"
                )
            elif not equals_dense(result, wanted.detach()):
                faults.append(f"{when}: output {index} differs in {result.layout.compact_str}")

    compare_outputs(outputs, "first call")
    misses = dispatch_cache_info().misses
    compare_outputs(as_tuple(function(*build())), "second call")
    if dispatch_cache_info().misses != misses:
        faults.append("the second call was planned again")
    if faults:
        return "; ".join(faults)

    roots = [
        (output, DTensor.from_local(own_part(weight, output.layout), output.layout.gradient, shape=tuple(weight.shape)))
        for output, wanted, weight in zip(outputs, expected, weights, strict=True)
        if wanted.requires_grad
    ]
    for output, _ in roots:
        if not output.requires_grad:
            return "an output lost its gradient"
    if roots:
        torch.autograd.backward([root for root, _ in roots], [weight for _, weight in roots])
    for index, (tensor, reference) in enumerate(zip(inputs, dense, strict=True)):
        if tensor.grad is None or reference.grad is None:
            if tensor.grad is not reference.grad:
                faults.append(f"gradient {index} is {'missing' if tensor.grad is None else 'one too many'}")
            continue
        if tensor.grad.layout is not tensor.layout.gradient:
            faults.append(f"gradient {index} is laid out {tensor.grad.layout.compact_str}")
        elif tuple(tensor.grad.to_local().shape) != tensor.grad.layout.local_shape(tuple(tensor.shape)):
            faults.append(f"gradient {index} has local shape {tuple(tensor.grad.to_local().shape)}")
        elif not equals_dense(tensor.grad, reference.grad):
            faults.append(f"gradient {index} differs")
    return "; ".join(faults)


def make_value(operand: str, generator: torch.Generator) -> tuple[torch.Tensor, bool, bool]:
    """The value that an operand's text asks for, whether it may be partial, and whether it has a gradient."""
    kind, _, text = operand.rpartition(":")
    shape = () if text == "-" else tuple(int(size) for size in text.split("x"))
    if kind == "b":
        return torch.rand(shape, generator=generator) < 0.5, False, False
    if kind.startswith("i"):
        return torch.randint(0, int(kind[1:]), shape, generator=generator), False, False
    if kind in ("p", "u"):
        uniform = torch.rand(shape, generator=generator, dtype=torch.float64)
        return uniform + 0.5 if kind == "p" else uniform * 0.8 + 0.1, True, True
    return torch.randn(shape, generator=generator, dtype=torch.float64), kind != "f", kind != "n"


def layouts(mesh: Any, ndim: int, pending: bool) -> Iterator[Any]:
    """Every layout of a tensor: each placement on each axis, and both orders where two axes cut one dim."""
    from hp_core.layout import Layout
    from hp_core.placement import Partial, Replicate, Shard

    base = Layout.from_device_mesh(mesh)
    options = [Replicate(), *[Shard(dim) for dim in range(ndim)], *([Partial()] if pending else [])]
    for placements in product(options, repeat=mesh.ndim):
        yield base(*placements)
    if mesh.ndim == 2:
        for dim in range(ndim):
            yield base(*[None] * dim, tuple(reversed(mesh.mesh_dim_names)))


def local_part(value: torch.Tensor, layout: Any) -> torch.Tensor:
    """This rank's part of a value; where a sum is pending, unequal addends that give it."""
    mesh = layout.mesh
    coordinate = mesh.get_coordinate()
    for axis, _ in layout.partials:
        noise = torch.randn(value.shape, generator=torch.Generator().manual_seed(axis), dtype=torch.float64).to(
            value.dtype
        )
        value = 3 * value + noise if coordinate[axis] == 0 else -2 * value - noise
    return own_part(value, layout)


def own_part(value: torch.Tensor, layout: Any) -> torch.Tensor:
    """A copy of what this rank holds of a value."""
    for dim, (start, stop) in enumerate(layout.bounds(tuple(value.shape))):
        value = value.narrow(dim, start, stop - start)
    return value.clone(memory_format=torch.contiguous_format)


def equals_dense(tensor: Any, wanted: torch.Tensor) -> bool:
    """Whether this rank's part, after pending reductions, is that of the dense value, to rounding."""
    tensor = tensor.detach().reduce_partial()
    left, right = tensor.to_local(), own_part(wanted, tensor.layout)
    if not left.is_floating_point():
        return torch.equal(left, right)
    return torch.allclose(left, right, equal_nan=True, **TOLERANCE)


def differentiable(
    results: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Outputs with a gradient, with the weight that each has in the scalar that is differentiated."""
    return [(result, weight) for result, weight in zip(results, weights, strict=True) if result.requires_grad]


def as_tuple(result: Any) -> tuple[Any, ...]:
    """Outputs as a plain tuple."""
    return (result,) if isinstance(result, torch.Tensor) else tuple(result)
