"""What an index expression `x[...]` means for each dim: a list of entries, read once per kind of call.

As in the dense program, integers, slices, None and Ellipsis are taken first; tensors then pick from what is left of
their dims, broadcast together. Lists, numbers in tensor's clothing and bools are spelt as these before anything is planned.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Run
from hp_core.rules.spec import TensorSpec

__all__ = ["Entry", "Subscript", "needs_spelling", "read_subscript", "settled", "spelt"]


@dataclass(frozen=True)
class Entry:
    """One part of an index expression.

    Attributes:
        kind: "new" (a dim of size 1), "int", "slice", "tensor" (integers) or "mask" (bools).
        dim: the first dim of the operand that it is about; for "new", the next one.
        position: of an "int", counted from the front.
        run: of a "slice".
        tensor: of a "tensor" or "mask", its number among the index tensors.
        spec: of a "tensor" or "mask".
    """

    kind: str
    dim: int
    position: int = 0
    run: Run = (0, 1, 0)
    tensor: int = 0
    spec: TensorSpec | None = None

    @property
    def span(self) -> int:
        """Number of dims of the operand that it is about."""
        if self.kind == "mask":
            return self.spec.ndim  # type: ignore[union-attr]
        return 0 if self.kind == "new" else 1


@dataclass(frozen=True)
class Subscript:
    """A whole index expression on an operand of this shape.

    Attributes:
        shape: the operand's shape.
        entries: from the first dim to the last; each dim is spoken of once.
    """

    shape: tuple[int, ...]
    entries: tuple[Entry, ...]

    @property
    def picks(self) -> tuple[Entry, ...]:
        """The entries that are tensors."""
        return tuple(entry for entry in self.entries if entry.spec is not None)

    @property
    def has_mask(self) -> bool:
        """Whether the shape of what is picked depends on values."""
        return any(entry.kind == "mask" for entry in self.entries)

    @property
    def has_loose_scalar(self) -> bool:
        """Whether a 0-d tensor stands for a bool, or for an integer that is taken before the other tensors pick."""
        picks = self.picks
        return any(entry.spec.ndim == 0 and (entry.kind == "mask" or len(picks) > 1) for entry in picks)  # type: ignore[union-attr]

    def is_whole(self, entry: Entry) -> bool:
        """Whether it is a slice that takes all of its dim."""
        return entry.kind == "slice" and entry.run == (0, 1, self.shape[entry.dim])

    @property
    def basic(self) -> list[Entry]:
        """One entry per dim of what ints, slices and None leave; a mask stands once for each dim that it is about."""
        return [entry for entry in self.entries for _ in range(max(entry.span, 1)) if entry.kind != "int"]

    @property
    def pick_position(self) -> int:
        """Where the dims of the picked stand in the result: at the first tensor's, or in front if the tensors are apart."""
        places = [place for place, entry in enumerate(self.basic) if entry.spec is not None]
        together = all(second == first + 1 for first, second in pairwise(places))
        return places[0] if together else 0

    @property
    def pick_shape(self) -> tuple[int, ...]:
        """What the index tensors broadcast to."""
        shape: list[int] = []
        for entry in self.picks:
            sizes = tuple(entry.spec.shape)  # type: ignore[union-attr]
            shape = [1] * (len(sizes) - len(shape)) + shape
            for dim, size in enumerate(sizes, len(shape) - len(sizes)):
                if size != 1 and shape[dim] not in (1, size):
                    told = ", ".join(str(tuple(other.spec.shape)) for other in self.picks)  # type: ignore[union-attr]
                    raise IndexError(f"index tensors of shapes {told} don't broadcast together.")
                shape[dim] = size if size != 1 else shape[dim]
        return tuple(shape)


def read_subscript(name: str, index: Any, shape: Sequence[int]) -> Subscript:
    """Read an index expression whose tensors are specs.

    Raises:
        IndexError: an integer is out of range.
        ShardingRuleError: too many indices, or something that is no index here, with what to write instead.
    """
    shape = tuple(shape)
    given = list(index) if isinstance(index, tuple) else [index]
    flag = get_platform().ops.named_dtypes["bool"]
    spans = [0 if entry is None or entry is Ellipsis else entry.ndim if _is_mask(entry, flag) else 1 for entry in given]
    if sum(spans) > len(shape) or given.count(Ellipsis) > 1:
        raise ShardingRuleError(f"{name}: too many indices ({_told(index)}) for shape {shape}.")
    at = next((place for place, entry in enumerate(given) if entry is Ellipsis), len(given))
    rest: list[Any] = [slice(None)] * (len(shape) - sum(spans))
    given = given[:at] + rest + given[at + 1 :]
    entries = []
    dim = tensors = 0
    for one in given:
        entry = _entry(name, one, dim, tensors, shape, flag)
        entries.append(entry)
        dim += entry.span
        tensors += entry.spec is not None
    return Subscript(shape, tuple(entries))


def needs_spelling(index: Any) -> bool:
    """Whether something in an index expression must first be made a tensor, an integer or None."""
    return any(
        isinstance(entry, (list, range, bool)) or _is_plain_tensor(entry)
        for entry in (index if isinstance(index, tuple) else (index,))
    )


def spelt(x: Any, index: Any) -> tuple[tuple[Any, ...], bool]:
    """The same index without lists, bools and plain tensors, and whether it picks nothing (a False among its entries)."""
    tensors = get_platform().tensors
    found: list[Any] = []
    nothing = False
    if isinstance(index, list) and any(not isinstance(entry, int) for entry in index):
        raise ShardingRuleError(
            f"the index {index!r} is ambiguous: write x[tuple(index)] for one entry per dim, or x[index,] for positions in dim 0."
        )
    for entry in index if isinstance(index, tuple) else (index,):
        if isinstance(entry, bool):
            nothing = nothing or not entry
            found.append(None)
        elif isinstance(entry, (list, range)):
            numbers, shape = _flattened(entry)
            values = tensors.reshape(tensors.from_ints([int(number) for number in numbers], x._local), shape)
            if numbers and all(isinstance(number, bool) for number in numbers):
                values = tensors.cast(values, get_platform().ops.named_dtypes["bool"])
            found.append(type(x).from_local(values, x.layout.replicated))
        else:
            found.append(int(entry) if _is_plain_tensor(entry) else entry)
    return tuple(found), nothing


def settled(index: tuple[Any, ...]) -> tuple[Any, ...]:
    """The same index with the values of 0-d tensors in their place, which waits for them."""
    flag = get_platform().ops.named_dtypes["bool"]
    return tuple(
        (bool(entry) if entry.dtype is flag else int(entry)) if hasattr(entry, "_spec") and not entry.ndim else entry
        for entry in (index if isinstance(index, tuple) else (index,))
    )


def _entry(name: str, given: Any, dim: int, tensors: int, shape: tuple[int, ...], flag: Any) -> Entry:
    if given is None:
        return Entry("new", dim)
    if isinstance(given, TensorSpec):
        return Entry("mask" if given.dtype is flag else "tensor", dim, tensor=tensors, spec=given)
    size = shape[dim] if dim < len(shape) else 0
    if isinstance(given, slice):
        if not all(bound is None or isinstance(bound, int) for bound in (given.start, given.stop, given.step)):
            raise ShardingRuleError(
                f"{name}: the slice bounds {given.start!r}, {given.stop!r}, {given.step!r} must be integers; write int(t)."
            )
        start, stop, step = given.indices(size)
        if step < 0:
            raise ValueError(f"{name}: the step of a slice must be greater than zero, got {step}; use flip().")
        count = len(range(start, stop, step))
        return Entry("slice", dim, run=(start, step if count > 1 else 1, count))
    if isinstance(given, int):
        if not -size <= given < size:
            raise IndexError(f"{name}: index {given} is out of bounds for dim {dim} of size {size} (shape {shape}).")
        return Entry("int", dim, position=given % size)
    raise ShardingRuleError(
        f"{name}: a DTensor can't be indexed with {type(given).__name__}; use integers, slices, None, ..., lists of integers or "
        f"bools, and DTensors of integers or bools."
    )


def _is_mask(entry: Any, flag: Any) -> bool:
    return isinstance(entry, TensorSpec) and entry.dtype is flag


def _is_plain_tensor(entry: Any) -> bool:
    return get_platform().tensors.is_tensor(entry) and not hasattr(entry, "_spec")


def _flattened(nested: Any) -> tuple[list[Any], tuple[int, ...]]:
    """The numbers in a list of (lists of ...) numbers, and its shape."""
    if not isinstance(nested, (list, tuple, range)):
        if not isinstance(nested, int):
            raise ShardingRuleError(
                f"a list that indexes a DTensor may hold integers or bools, not {type(nested).__name__}; separate the dims' "
                f"entries by commas, or stack() tensors."
            )
        return [nested], ()
    parts = [_flattened(item) for item in nested]
    if any(shape != parts[0][1] for _, shape in parts):
        raise ShardingRuleError(f"the lists within {nested!r} differ in length.")
    return [number for numbers, _ in parts for number in numbers], (len(parts), *(parts[0][1] if parts else ()))


def _told(index: Any) -> str:
    return ", ".join(
        f"<{entry!r}>" if isinstance(entry, TensorSpec) else repr(entry)
        for entry in (index if isinstance(index, tuple) else (index,))
    )
