"""What travels between stages: a tree of values as a list of tensors, and its form, which both ends know after the first one.

The form is structure, shapes, element types and which tensors have gradients. Numbers may change from micro-batch to
micro-batch and travel as tensors too; any other value belongs to the form.
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from hp_core.errors import PlanError
from hp_core.platform import get_platform
from hp_core.platform.protocol import Tensor
from hp_pipeline.platform import get_tools

__all__ = ["Form", "Parcel", "pack", "unpack"]

_LARGEST = 2**63
_IN_ONE_PIECE = 2**18
"""Bytes; below, a copy takes less time than a second message."""
_ALIGNED = 16


@dataclass(frozen=True, slots=True)
class Slot:
    """One leaf of a tree.

    Attributes:
        kind: "tensor", "int", "bool", "float", or "value" for what is none of these.
        shape: of a tensor.
        dtype: of a tensor, by name.
        requires_grad: whether gradients of a tensor are sent back.
        value: a "value", pickled.
    """

    kind: str
    shape: tuple[int, ...] = ()
    dtype: str = ""
    requires_grad: bool = False
    value: bytes = b""

    def __str__(self) -> str:
        if self.kind != "tensor":
            return self.kind if self.kind != "value" else repr(pickle.loads(self.value))
        return f"{self.dtype} {self.shape}" + (" with gradient" if self.requires_grad else "")


@dataclass(frozen=True)
class Form:
    """What two messages have in common that differ in numbers only."""

    structure: Hashable
    slots: tuple[Slot, ...]

    @cached_property
    def buffers(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and element type of each tensor that travels: the tree's own, then whole numbers, then others."""
        found = [(slot.shape, slot.dtype) for slot in self.slots if slot.kind == "tensor"]
        whole = sum(slot.kind in ("int", "bool") for slot in self.slots)
        broken = sum(slot.kind == "float" for slot in self.slots)
        found += [((whole,), "int64")] * bool(whole) + [((broken,), "float64")] * bool(broken)
        return tuple(found)

    @cached_property
    def gradients(self) -> tuple[tuple[tuple[int, ...], str], ...]:
        """Shape and element type of each gradient that travels back."""
        return tuple((slot.shape, slot.dtype) for slot in self.slots if slot.requires_grad)

    @cached_property
    def outputs_fit(self) -> bool:
        """Whether they travel in one piece with their header (`fits`)."""
        return fits(self.buffers)

    @cached_property
    def gradients_fit(self) -> bool:
        """Whether gradients travel in one piece with their header."""
        return fits(self.gradients)

    @cached_property
    def differentiable(self) -> tuple[int, ...]:
        """Which of the tensors have gradients, by their place among the tensors."""
        tensors = [slot for slot in self.slots if slot.kind == "tensor"]
        return tuple(place for place, slot in enumerate(tensors) if slot.requires_grad)

    @cached_property
    def tensors_only(self) -> bool:
        """Whether all leaves are tensors."""
        return all(slot.kind == "tensor" for slot in self.slots)

    @cached_property
    def description(self) -> bytes:
        """The form as bytes."""
        return pickle.dumps((get_tools().unflatten(range(len(self.slots)), self.structure), self.slots))

    @cached_property
    def signature(self) -> int:
        """A number that differs where forms do, nearly always."""
        return zlib.crc32(self.description)

    @staticmethod
    def of_description(description: bytes) -> Form:
        """The form that has this description."""
        tree, slots = pickle.loads(description)
        form = Form(get_tools().flatten(tree)[1], slots)
        form.__dict__["description"] = description  # both ends sign the same bytes
        return form

    def difference(self, other: Form) -> str:
        """In words how the other differs."""
        if self.structure != other.structure:
            return f"was made of {self.structure} and is made of {other.structure}"
        changed = [
            f"value {number}: {old} -> {new}"
            for number, (old, new) in enumerate(zip(self.slots, other.slots, strict=True))
            if old != new
        ]
        return "; ".join(changed)


@dataclass(frozen=True)
class Parcel:
    """A tree, taken apart.

    Attributes:
        form: its form.
        leaves: its leaves as they are.
        tensors: those that are tensors.
    """

    form: Form
    leaves: tuple[Any, ...]
    tensors: tuple[Tensor, ...]

    @property
    def differentiable(self) -> list[Tensor]:
        """The tensors that gradients are sent back for, in the order of `Form.gradients`."""
        return [self.tensors[place] for place in self.form.differentiable]

    def travelling(self, device: Any) -> list[Tensor]:
        """The tensors that are sent, in the order of `Form.buffers`."""
        tools = get_tools()
        found = [tools.sendable(tensor) for tensor in self.tensors]
        if self.form.tensors_only:
            return found
        pairs = list(zip(self.leaves, self.form.slots, strict=True))
        whole = [int(leaf) for leaf, slot in pairs if slot.kind in ("int", "bool")]
        broken = [leaf for leaf, slot in pairs if slot.kind == "float"]
        if whole:
            found.append(tools.numbers(whole, "int64", device))
        if broken:
            found.append(tools.numbers(broken, "float64", device))
        return found


def fits(shapes: Sequence[tuple[tuple[int, ...], str]]) -> bool:
    """Whether tensors are small enough to travel in one piece with a header, and can lie side by side."""
    sizes = [get_tools().nbytes(shape, dtype) for shape, dtype in shapes]
    return bool(sizes) and sum(sizes) <= _IN_ONE_PIECE and all(size % _ALIGNED == 0 for size in sizes)


def pack(tree: Any, what: str, gradients: bool = True, known: Form | None = None) -> Parcel:
    """Take a tree apart.

    Args:
        tree: tensors and plain values in nested containers.
        what: whose it is, for errors.
        gradients: whether tensors with a place in the graph are to get gradients back.
        known: the form of what was packed before: the parcel has that very one, if it is equal.

    Raises:
        PlanError: a tensor can't travel.
    """
    platform, tools = get_platform(), get_tools()
    leaves, structure = tools.flatten(tree)
    slots = []
    for leaf in leaves:
        if platform.tensors.is_tensor(leaf):
            if not tools.is_plain(leaf):
                raise PlanError(
                    f"{what} holds a {type(leaf).__name__} of shape {tools.shape(leaf)}; between stages plain tensors travel. Let "
                    f"the stage give its local tensor (or the full one)."
                )
            dtype = platform.tensors.dtype_name(platform.tensors.dtype(leaf))
            slots.append(Slot("tensor", tools.shape(leaf), dtype, gradients and platform.autograd.requires_grad(leaf)))
        elif isinstance(leaf, bool):
            slots.append(Slot("bool"))
        elif isinstance(leaf, int) and -_LARGEST <= leaf < _LARGEST:
            slots.append(Slot("int"))
        elif isinstance(leaf, float):
            slots.append(Slot("float"))
        else:
            slots.append(Slot("value", value=pickle.dumps(leaf)))
    form = Form(structure, tuple(slots))
    if form == known:
        form = known
    if form.tensors_only:
        return Parcel(form, tuple(leaves), tuple(leaves))
    tensors = tuple(leaf for leaf, slot in zip(leaves, slots, strict=True) if slot.kind == "tensor")
    return Parcel(form, tuple(leaves), tensors)


def unpack(form: Form, received: Sequence[Tensor]) -> Parcel:
    """A tree of this form made of received tensors, which become leaves of a new graph."""
    tools = get_tools()
    if form.tensors_only:
        made = tuple(map(tools.leaf, received, [slot.requires_grad for slot in form.slots]))
        return Parcel(form, made, made)
    queue = list(received)
    tensors = [tools.leaf(queue.pop(0), slot.requires_grad) for slot in form.slots if slot.kind == "tensor"]
    whole = tools.values(queue.pop(0)) if any(slot.kind in ("int", "bool") for slot in form.slots) else []
    broken = tools.values(queue.pop(0)) if queue else []
    remaining = list(tensors)
    leaves: list[Any] = []
    for slot in form.slots:
        if slot.kind == "tensor":
            leaves.append(remaining.pop(0))
        elif slot.kind == "int":
            leaves.append(whole.pop(0))
        elif slot.kind == "bool":
            leaves.append(bool(whole.pop(0)))
        elif slot.kind == "float":
            leaves.append(broken.pop(0))
        else:
            leaves.append(pickle.loads(slot.value))
    return Parcel(form, tuple(leaves), tuple(tensors))
