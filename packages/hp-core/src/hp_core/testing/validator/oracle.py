"""The oracle, on one rank: run a call on DTensors in many combinations of layouts and compare with the dense run.

Compared are values, shapes, dtypes, gradients and their layouts, by the law of gradients; a second call must plan nothing.
What the calls send is recorded. All values are compared at the end, many at once, and pending results are then gathered
once for all: hardly any communication is the oracle's own.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from math import prod
from typing import Any
from unittest.mock import patch

from hp_core.dtensor import dispatch
from hp_core.dtensor.api import DTensorMethods
from hp_core.errors import HyperParallelError
from hp_core.layout import Layout
from hp_core.mesh import DeviceMesh
from hp_core.platform import get_platform
from hp_core.platform.protocol import OpSample, SampleOperand, Tensor
from hp_core.platform.recorder import CollectiveLog, record_collectives
from hp_core.process_group import get_rank
from hp_core.random import manual_seed
from hp_core.rules.registry import find_rule
from hp_core.testing.validator.combinations import Combination
from hp_core.testing.validator.parts import (
    fresh_input,
    gradient_part,
    local_part,
    own_part,
    partners,
    plain,
    reduced,
)

__all__ = ["FAULT", "Outcome", "Sent", "examine", "only_own_rules"]

Sent = tuple[tuple[tuple[str, int], ...], int]
"""Calls by kind of collective, and bytes this rank put on the wire."""

_NOTHING: Sent = ((), 0)
FAULT = "fault"
"""The cell of a combination that couldn't be run to its end."""
_AT_ONCE = 2000
"""Combinations whose values are compared at once."""


@dataclass
class Outcome:
    """What one rank found of one call.

    Attributes:
        cells: per combination what was sent forward and backward, or the kind of a refusal.
        faults: per combination (-1: of the call as such) what differs.
        reached: names of the rules that were looked up.
    """

    cells: list[tuple[Sent, Sent] | str] = field(default_factory=list)
    faults: list[tuple[int, str]] = field(default_factory=list)
    reached: set[str] = field(default_factory=set)


def examine(sample: OpSample, mesh: DeviceMesh, combinations: Sequence[Combination]) -> Outcome:
    """Compare a call with its dense run in these combinations of layouts; called alike on all ranks of the mesh."""
    outcome = Outcome()
    with _rules_looked_up(outcome.reached):
        dispatch.dispatch_cache_clear()
        reference = _Reference(sample, mesh)
        if reference.refusal is not None:
            outcome.cells = [reference.refusal] * len(combinations)
            return outcome
        checks = _Checks(mesh)
        for number, combination in enumerate(combinations):
            try:
                # a second call costs its collectives again: where ranks are many, one in three combinations has it
                again = mesh.ndim == 1 or number % 3 == 0
                outcome.cells.append(_compare(reference, combination, number, checks, again))
            except HyperParallelError as error:
                outcome.cells.append(FAULT)
                outcome.faults.append((number, f"{type(error).__name__} after the forward had begun: {error}"))
            except _DifferentError as error:
                outcome.cells.append(FAULT)
                outcome.faults.append((number, str(error)))
            except Exception as error:
                outcome.cells.append(FAULT)
                outcome.faults.append((number, f"{type(error).__name__}: {error}"))
            if (number + 1) % _AT_ONCE == 0:
                outcome.faults += checks.settle()
    outcome.faults += checks.settle()
    return outcome


def kind_of(error: Exception) -> str:
    """An error without what changes from call to call: its type and the words before the first number, quote or layout."""
    words = []
    for word in str(error).split():
        if not word[0].isalpha() or set(word) & set("[="):
            break
        words.append(word)
    return f"{type(error).__name__}: {' '.join(words[:12])}".rstrip(": ")


@contextmanager
def only_own_rules() -> Iterator[None]:
    """A rule must answer: inside, the framework's own distributed library doesn't fill a gap unseen."""
    platform = get_platform()
    own_library = platform.fallback
    platform.fallback = lambda *_: NotImplemented  # type: ignore[method-assign]
    try:
        yield
    finally:
        platform.fallback = own_library  # type: ignore[method-assign]


@contextmanager
def _rules_looked_up(names: set[str]) -> Iterator[None]:
    """Note the names of all rules that the dispatcher asks for."""

    def find(function: Any, name: str | None) -> Any:
        rule = find_rule(function, name)
        if rule is not None:
            names.add(rule.name)
        return rule

    with patch.object(dispatch, "find_rule", find):
        yield


class _Reference:
    """The dense run of a call: operands, outputs, the gradient each output is given, the gradients that come out.

    Parts of them are kept per layout, since combinations share layouts.
    """

    def __init__(self, sample: OpSample, mesh: DeviceMesh) -> None:
        tools = get_platform().op_samples()
        seed = zlib.crc32(f"{sample.op} {sample.call}".encode())
        self.function = sample.function
        self.seed = seed if sample.draws else None
        self.operands: list[SampleOperand] = tools.values(sample.operands, seed)
        self.refusal: str | None = None
        # random numbers are those of the global index, so a mesh of one rank draws what the dense op would
        alone = Layout((1,), ("alone",), [get_rank()]) if sample.draws else None
        inputs = [fresh_input(operand.tensor, alone, tuple(operand.tensor.shape)) for operand in self.operands]
        self.differentiable = [operand.differentiable for operand in self.operands]
        platform = get_platform()
        tensors = platform.tensors
        self.results: list[Any] = []
        self.is_tensor: list[bool] = []
        self.weights: list[Any] = []
        self.wants_gradient: list[bool] = []

        def run(leaves: list[Any]) -> list[tuple[Tensor, Tensor]]:
            try:
                self.results = [plain(result) for result in self.call(leaves)]
            except HyperParallelError as error:
                self.refusal = kind_of(error)
                return []
            self.is_tensor = [tensors.is_tensor(result) for result in self.results]
            self.wants_gradient = [
                is_tensor and _has_gradient(result)
                for result, is_tensor in zip(self.results, self.is_tensor, strict=True)
            ]
            self.weights = [
                tools.noise(result, seed + index) if is_tensor and tensors.is_floating(tensors.dtype(result)) else None
                for index, (result, is_tensor) in enumerate(zip(self.results, self.is_tensor, strict=True))
            ]
            found = zip(self.results, self.weights, self.wants_gradient, strict=True)
            return [(result, weight) for result, weight, wanted in found if wanted]

        gradients = tools.gradients(inputs, self.differentiable, run)
        # None where no output depends on the operand: zeros then are as good
        self.gradients = [None if gradient is None else tensors.clone(plain(gradient)) for gradient in gradients]
        self._inputs: dict[tuple[int, Layout], Tensor] = {}
        self._parts: dict[tuple[str, int, Layout], Tensor] = {}

    def call(self, inputs: Sequence[Any]) -> list[Any]:
        """The outputs of the call on these operands."""
        if self.seed is not None:
            manual_seed(self.seed)
        result = self.function(*inputs)
        return list(result) if isinstance(result, (tuple, list)) else [result]

    def inputs(self, combination: Combination) -> list[Any]:
        """The operands as DTensors laid out so."""
        found = []
        for index, (operand, layout) in enumerate(zip(self.operands, combination, strict=True)):
            local = self._inputs.get((index, layout))
            if local is None:
                local = self._inputs[index, layout] = local_part(operand.tensor, layout)
            shape = tuple(operand.tensor.shape)
            found.append(fresh_input(local, layout, shape))
        return found

    def part(self, what: str, index: int, layout: Layout) -> Tensor:
        """This rank's part of an output, of its weight, or of an operand's gradient, in this layout of that tensor."""
        found = self._parts.get((what, index, layout))
        if found is None:
            if what == "gradient":
                gradient = self.gradients[index]
                if gradient is None:
                    operand = self.operands[index].tensor
                    gradient = get_platform().tensors.zeros(tuple(operand.shape), operand)
                found = gradient_part(gradient, layout)
            else:
                whole = (self.results if what == "result" else self.weights)[index]
                found = own_part(get_platform().autograd.detach(whole), layout)
            self._parts[what, index, layout] = found
        return found


_Pending = tuple[Tensor, Tensor, Layout, int, tuple[int, str]]
"""Local tensor, wanted part, layout, number of elements of the global tensor; where and what."""


class _Checks:
    """Comparisons of values, put off until there are many."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self._mesh = mesh
        self._pairs: list[tuple[Tensor, Tensor]] = []
        self._tags: list[tuple[int, str]] = []
        self._unreduced: list[_Pending] = []

    def equal(self, local: Tensor, wanted: Tensor, number: int, what: str) -> None:
        """These are to be equal on this rank."""
        self._pairs.append((local, wanted))
        self._tags.append((number, what))

    def pending(self, local: Tensor, wanted: Tensor, layout: Layout, size: int, number: int, what: str) -> None:
        """Reduced over ranks as the layout says, the parts of a tensor of `size` elements are to be equal to `wanted`."""
        self._unreduced.append((local, wanted, layout, size, (number, what)))

    def settle(self) -> list[tuple[int, str]]:
        """What turned out to differ since the last time."""
        self._reduce()
        found = [self._tags[index] for index in get_platform().op_samples().differing(self._pairs)]
        self._pairs, self._tags, self._unreduced = [], [], []
        return found

    def _reduce(self) -> None:
        if not self._unreduced:
            return
        platform = get_platform()
        tensors = platform.tensors
        # one message of all that is pending, each in a slot of equal size on all ranks
        by_dtype: dict[Any, list[_Pending]] = {}
        for entry in self._unreduced:
            by_dtype.setdefault(tensors.dtype(entry[0]), []).append(entry)
        ranks = self._mesh.rank_list
        group = self._mesh.get_group(tuple(range(self._mesh.ndim)))
        for entries in by_dtype.values():
            sizes = [size for _, _, _, size, _ in entries]
            like = entries[0][0]
            own = tensors.zeros((sum(sizes),), like)
            start = 0
            for local, _, _, size, _ in entries:
                flat = tensors.reshape(local, (-1,))
                tensors.paste(own, ((start, start + flat.shape[0]),), flat)
                start += size
            everyone = tensors.zeros((len(ranks), sum(sizes)), like)
            platform.collectives.all_gather(everyone, own, group)
            start = 0
            for _, wanted, layout, size, (number, what) in entries:
                flat = tensors.reshape(wanted, (-1,))
                parts = [
                    tensors.narrow(everyone[place], 0, start, flat.shape[0]) for place in partners(self._mesh, layout)
                ]
                self.equal(reduced(parts, layout), flat, number, what)
                start += size


def _compare(
    reference: _Reference, combination: Combination, number: int, checks: _Checks, again: bool
) -> tuple[Sent, Sent] | str:
    """Run one combination forward and backward; returns what it sent, or how it was refused."""
    tools = get_platform().op_samples()
    inputs = reference.inputs(combination)
    refusals: list[str] = []
    first: list[Any] = []
    forward = CollectiveLog()
    begun = 0

    def run(leaves: list[Any]) -> list[tuple[Any, Any]]:
        nonlocal forward, begun
        with record_collectives() as forward:
            try:
                outputs = reference.call(leaves)
            except HyperParallelError as error:
                if forward:
                    raise
                refusals.append(kind_of(error))
                return []
        problems = _check_outputs(reference, outputs, number, checks)
        if problems:
            raise _DifferentError("; ".join(problems))
        first[:] = outputs
        pairs = []
        for index, output in enumerate(outputs):
            if reference.wants_gradient[index]:
                layout = output.layout
                if any(reduce_op != "sum" for _, reduce_op in layout.partials):
                    # the derivative by a pending average or extremum is the local part's: finish it, to have the dense one
                    output = output.reduce_partial()
                    layout = output.layout
                weight = get_platform().tensors.clone(reference.part("weight", index, layout.gradient))
                pairs.append((output, DTensorMethods.from_local(weight, layout.gradient, shape=tuple(output.shape))))
        begun = len(everything)
        return pairs

    with record_collectives() as everything:
        gradients = tools.gradients(inputs, reference.differentiable, run)
    if refusals:
        return refusals[0]
    problems = _check_gradients(reference, inputs, gradients, combination, number, checks)
    if again and not problems:
        problems = _check_second_call(reference, first, combination, number, checks)
    if problems:
        raise _DifferentError("; ".join(problems))
    return _sent(forward), _sent(CollectiveLog(everything[begun:]))


class _DifferentError(Exception):
    """What differs can be told without values."""


def _check_outputs(reference: _Reference, outputs: Sequence[Any], number: int, checks: _Checks) -> list[str]:
    if len(outputs) != len(reference.results):
        return [f"{len(outputs)} outputs for {len(reference.results)}"]
    problems = []
    autograd = get_platform().autograd
    for index, (output, wanted) in enumerate(zip(outputs, reference.results, strict=True)):
        if not reference.is_tensor[index]:
            if output != wanted:
                problems.append(f"output {index} is {output!r} for {wanted!r}")
            continue
        shape = tuple(wanted.shape)
        if not isinstance(output, DTensorMethods):
            problems.append(f"output {index} is {type(output).__name__}")
        elif tuple(output.shape) != shape or output.dtype != wanted.dtype:
            problems.append(f"output {index} is {tuple(output.shape)} {output.dtype} for {shape} {wanted.dtype}")
        elif tuple(output.local_shape) != output.layout.local_shape(shape):
            problems.append(
                f"output {index} has local shape {tuple(output.local_shape)} in {output.layout.compact_str}"
            )
        elif _has_no_extremum(wanted) and any(op in ("max", "min") for _, op in output.layout.partials):
            problems.append(f"output {index} of {wanted.dtype} waits for an extremum in {output.layout.compact_str}")
        elif _has_gradient(output.to_local()) != reference.wants_gradient[index]:
            problems.append(f"output {index} {'lost its' if reference.wants_gradient[index] else 'needs a'} gradient")
        else:
            layout = output.layout
            local = autograd.detach(output.to_local())
            part = reference.part("result", index, layout.gradient)
            what = f"output {index} differs in {layout.compact_str}"
            if layout.partials:
                checks.pending(local, part, layout, prod(shape), number, what)
            else:
                checks.equal(local, part, number, what)
    return problems


def _has_gradient(tensor: Tensor) -> bool:
    """Whether it takes part in gradients; a framework may say so of integers, too, where it means nothing."""
    platform = get_platform()
    return platform.autograd.requires_grad(tensor) and platform.tensors.is_floating(platform.tensors.dtype(tensor))


def _has_no_extremum(tensor: Tensor) -> bool:
    tensors = get_platform().tensors
    return tensors.dtype_name(tensors.dtype(tensor)).startswith("complex")


def _check_second_call(
    reference: _Reference, outputs: Sequence[Any], combination: Combination, number: int, checks: _Checks
) -> list[str]:
    """The same call again plans nothing, and gives the same."""
    autograd = get_platform().autograd
    before = dispatch.dispatch_cache_info().misses
    problems: list[str] = []

    def run(leaves: list[Any]) -> list[tuple[Any, Any]]:
        again = reference.call(leaves)
        if dispatch.dispatch_cache_info().misses != before:
            problems.append("the second call was planned again")
        for index, (first, second) in enumerate(zip(outputs, again, strict=True)):
            if not reference.is_tensor[index]:
                continue
            if second.layout is not first.layout:
                problems.append(f"the second call's output {index} is laid out {second.layout.compact_str}")
            else:
                local, wanted = autograd.detach(second.to_local()), autograd.detach(first.to_local())
                checks.equal(local, wanted, number, f"the second call's output {index} differs")
        return []

    get_platform().op_samples().gradients(reference.inputs(combination), reference.differentiable, run)
    return problems


def _check_gradients(
    reference: _Reference,
    inputs: Sequence[Any],
    gradients: Sequence[Any],
    combination: Combination,
    number: int,
    checks: _Checks,
) -> list[str]:
    problems = []
    for index, (tensor, layout) in enumerate(zip(inputs, combination, strict=True)):
        gradient, wanted = gradients[index], reference.gradients[index]
        if gradient is None:
            if wanted is not None:
                problems.append(f"gradient {index} is missing")
            continue
        if not reference.operands[index].differentiable:
            problems.append(f"gradient {index} is one too many")
            continue
        local = gradient.to_local()
        if gradient.layout is not layout.gradient:
            problems.append(f"gradient {index} is laid out {gradient.layout.compact_str}")
        elif tuple(local.shape) != layout.local_shape(tuple(tensor.shape)):
            problems.append(f"gradient {index} has local shape {tuple(local.shape)}")
        else:
            checks.equal(local, reference.part("gradient", index, layout), number, f"gradient {index} differs")
    return problems


def _sent(log: CollectiveLog) -> Sent:
    if not log:
        return _NOTHING
    return tuple(sorted(Counter(record.kind for record in log).items())), sum(record.nbytes for record in log)
