"""The parameters of a group as few flat tensors, where they are neighbours in one storage and so are their gradients.

Found by looking at addresses, so it serves whatever laid the parameters out: the chunks of sharded units, or plain tensors.
State is made to be neighbours too. A step checks with a few list comparisons that all is as it was, and plans anew if not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any, NoReturn

import torch

from hp_core.dtensor.api import DTensorMethods
from hp_core.errors import PlanError

__all__ = ["FlatGroup", "Run", "local_of"]

_IS_SPARSE = attrgetter("is_sparse")


@dataclass(eq=False, slots=True)
class Run:
    """Parameters whose elements follow one another without a gap, in the parameters, their gradients and their states.

    A gap ends a run, even one that is padding: whether it is can't be told from here, and it may be a parameter of another
    optimizer. One more tensor in the list that a kernel gets costs next to nothing.

    Attributes:
        members: numbers of the parameters in the group, in the order of the storage.
        sizes: elements of each.
        flat: all of them as one 1-D tensor; a single parameter as it is.
        states: the same of each state.
        step: how many steps they have made, shared by all; None where nobody counts.
    """

    members: list[int]
    sizes: list[int]
    flat: torch.Tensor
    states: dict[str, torch.Tensor]
    step: torch.Tensor | None


@dataclass(eq=False, slots=True)
class _Seen:
    """What a plan rests on, as it was when the plan was made."""

    absent: list[bool] = field(default_factory=list)
    addresses: list[int] = field(default_factory=list)
    merged: list[int] = field(default_factory=list)
    apart: list[tuple[int, int]] = field(default_factory=list)
    heads: list[int] = field(default_factory=list)
    distances: list[int] = field(default_factory=list)
    reaches: list[tuple[int, int]] = field(default_factory=list)
    tables: list[dict[str, Any]] = field(default_factory=list)
    values: dict[str, list[int]] = field(default_factory=dict)


class FlatGroup:
    """The parameters of one group that have gradients, as runs.

    Attributes:
        locals: the parameters' local tensors.
        kinds: device types and element types that occur.
        runs: valid after `gradients()`.
        grads: the gradient of each parameter's local tensor, or None; valid from `gradients()` to `finish()`.
    """

    def __init__(self, params: Sequence[torch.Tensor], keys: Sequence[str], counted: bool) -> None:
        """Look at the parameters.

        Args:
            params: the parameters; of distributed ones the local tensors count.
            keys: names of the states that look like the parameter.
            counted: whether each has its own count of steps, called "step", so that runs end where counts differ.
        """
        self.params = list(params)
        self.keys = tuple(keys)
        self.counted = counted
        self.locals = [local_of(param) for param in self.params]
        self.kinds = {(local.device.type, local.dtype) for local in self.locals}
        self.grads: list[torch.Tensor | None] = []
        self.runs: list[Run] = []
        self._seen: _Seen | None = None

    def gradients(self, state: Any, counts_on_device: bool = False) -> list[torch.Tensor]:
        """The gradient of each run, with all runs and states as they shall be for this step.

        Args:
            state: the optimizer's state: parameter -> name -> value. What is missing is made, as zeros.
            counts_on_device: whether counts of steps shall be where the parameters are; else on the CPU.

        Raises:
            PlanError: a gradient is sparse.
        """
        self.grads = [local.grad for local in self.locals]
        if self._seen is None or not self._holds(self._seen, state):
            self._seen = self._plan(state, counts_on_device)
        return [self._flat_gradient(run) for run in self.runs]

    def finish(self) -> None:
        """Let go of the gradients, and tell autograd that the parameters were written to, whichever tensor it was through."""
        self.grads = []
        torch.autograd.graph.increment_version([self.locals[index] for run in self.runs for index in run.members])

    # -- one step ---------------------------------------------------------------------------------------------------

    def _holds(self, seen: _Seen, state: Any) -> bool:
        """Whether the plan still describes what there is. Lists are compared, so this costs little per parameter."""
        grads = self.grads
        if [grad is None for grad in grads] != seen.absent:
            return False
        if [local.data_ptr() for local in self.locals] != seen.addresses:
            return False
        if seen.tables and state.get(self.params[seen.absent.index(False)]) is not seen.tables[0]:
            return False
        for key, values in seen.values.items():
            if list(map(id, [table.get(key) for table in seen.tables])) != values:
                return False
        if any(_meet(grads[left], grads[right]) for left, right in seen.apart):
            return False
        if not seen.merged:
            return True
        # Only members of longer runs count: a parameter that lies alone may have its gradient anywhere.
        merged: list[Any] = [grads[index] for index in seen.merged]
        if any(map(_IS_SPARSE, merged)) or not all(map(torch.Tensor.is_contiguous, merged)):
            return False
        found = list(map(torch.Tensor.data_ptr, merged))
        if [here - found[head] for here, head in zip(found, seen.heads, strict=True)] != seen.distances:
            return False
        return all(_reaches(merged[head], numel) for head, numel in seen.reaches)

    def _flat_gradient(self, run: Run) -> torch.Tensor:
        first = self.grads[run.members[0]]
        assert first is not None
        if first.is_sparse:
            _refuse_sparse(run.members[0])
        if len(run.members) > 1:
            return first.as_strided((sum(run.sizes),), (1,), first.storage_offset())
        if first.stride() != run.flat.stride():
            return torch.empty_like(run.flat).copy_(first)
        return first

    # -- planning ---------------------------------------------------------------------------------------------------

    def _plan(self, state: Any, counts_on_device: bool) -> _Seen:
        present = [index for index, grad in enumerate(self.grads) if grad is not None]
        for index in present:
            if self.grads[index].is_sparse:  # type: ignore[union-attr]
                _refuse_sparse(index)
        tables = {index: state[self.params[index]] for index in present}
        counts = self._counts(tables)
        neighbours, apart = self._neighbours(present, counts)
        self.runs = [self._run(members, tables, counts, counts_on_device) for members in neighbours]
        seen = _Seen(
            apart=apart,
            absent=[grad is None for grad in self.grads],
            addresses=[local.data_ptr() for local in self.locals],
            tables=[tables[index] for index in present],
        )
        for run in self.runs:
            if len(run.members) > 1 and run.flat.numel():
                head, distance = len(seen.merged), 0
                for index, size in zip(run.members, run.sizes, strict=True):
                    seen.merged.append(index)
                    seen.heads.append(head)
                    seen.distances.append(distance)
                    distance += size * run.flat.element_size()
                seen.reaches.append((head, sum(run.sizes)))
        for key in (*self.keys, *(("step",) if self.counted else ())):
            seen.values[key] = [id(table[key]) for table in seen.tables]
        return seen

    def _counts(self, tables: Mapping[int, dict[str, Any]]) -> dict[int, float]:
        """Steps made by each parameter. Reading a tensor may wait for the device: so once per tensor, and only here."""
        read: dict[int, float] = {}
        counts = {}
        for index, table in tables.items():
            step = table.get("step", 0.0) if self.counted else 0.0
            if id(step) not in read:
                read[id(step)] = float(step)
            counts[index] = read[id(step)]
        return counts

    def _neighbours(
        self, present: Sequence[int], counts: Mapping[int, float]
    ) -> tuple[list[list[int]], list[tuple[int, int]]]:
        """Runs as long as they get, and the pairs of neighbours that are apart only because their gradients are.

        Parameters without elements here lie nowhere: those of one kind are one run.
        """
        runs: list[list[int]] = []
        apart: list[tuple[int, int]] = []
        empty: dict[Any, list[int]] = {}
        blocks = []
        for index in present:
            local = self.locals[index]
            if not local.numel():
                empty.setdefault((local.dtype, local.device, counts[index]), []).append(index)
            elif _is_block(local):
                blocks.append((*_place(local), index))
            else:
                runs.append([index])
        end: Any = None
        for *where, address, index in sorted(blocks):
            local, last = self.locals[index], runs[-1][-1] if end is not None else -1
            if end != (where, address, counts[index]):
                runs.append([index])
            elif _meet(self.grads[last], self.grads[index]):
                runs[-1].append(index)
            else:
                runs.append([index])
                apart.append((last, index))
            end = where, address + local.nbytes, counts[index]
        return [*runs, *empty.values()], apart

    def _run(
        self,
        members: list[int],
        tables: Mapping[int, dict[str, Any]],
        counts: Mapping[int, float],
        counts_on_device: bool,
    ) -> Run:
        sizes = [self.locals[index].numel() for index in members]
        flat = _as_one([self.locals[index].detach() for index in members], sizes)
        states = {key: self._flat_state(key, members, sizes, tables) for key in self.keys}
        step = None
        if self.counted:
            step = torch.tensor(
                counts[members[0]], dtype=torch.float32, device=flat.device if counts_on_device else "cpu"
            )
            for index in members:
                tables[index]["step"] = step
        return Run(members, sizes, flat, states, step)

    def _flat_state(
        self, key: str, members: Sequence[int], sizes: Sequence[int], tables: Mapping[int, dict[str, Any]]
    ) -> torch.Tensor:
        """One tensor of a state for a run, of which the parameters' own states are views; what there is is kept."""
        held = [None if key not in tables[index] else local_of(tables[index][key]) for index in members]
        if len(members) == 1 and held[0] is not None:
            return held[0]
        if all(value is not None for value in held) and _are_neighbours(held):  # type: ignore[arg-type]
            return _as_one(held, sizes)  # type: ignore[arg-type]
        like = self.locals[members[0]]
        if len(members) == 1:
            flat = torch.zeros_like(like)
            views: Sequence[torch.Tensor] = [flat]
        else:
            flat = torch.zeros(sum(sizes), dtype=like.dtype, device=like.device)
            views = torch.split(flat, list(sizes))
        for index, view, value in zip(members, views, held, strict=True):
            shaped = view.view(self.locals[index].shape) if len(members) > 1 else view
            if value is not None:
                shaped.copy_(value)
            tables[index][key] = _like_parameter(self.params[index], shaped)
        return flat


def local_of(value: Any) -> torch.Tensor:
    """What is held here of a tensor: the local tensor of a distributed one, else itself."""
    return value._local if isinstance(value, DTensorMethods) else value  # type: ignore[no-any-return]


def _like_parameter(param: Any, local: torch.Tensor) -> Any:
    if not isinstance(param, DTensorMethods):
        return local
    return DTensorMethods.from_local(local, param.layout, shape=tuple(param.shape))


def _refuse_sparse(index: int) -> NoReturn:
    raise PlanError(
        f"parameter {index} of a param group has a sparse gradient; only dense ones are optimized here. Make the embedding with "
        f"sparse=False, or give it to torch.optim.SparseAdam."
    )


def _meet(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether one tensor begins where the other ends, in one storage."""
    if left is None or right is None or left.is_sparse or right.is_sparse or not (_is_block(left) and _is_block(right)):
        return False
    return (
        left.data_ptr() + left.nbytes == right.data_ptr()
        and left.untyped_storage().data_ptr() == right.untyped_storage().data_ptr()
    )


def _reaches(tensor: torch.Tensor, numel: int) -> bool:
    """Whether the storage goes on for so many elements: what lies behind it may be another one's."""
    return (tensor.storage_offset() + numel) * tensor.element_size() <= tensor.untyped_storage().nbytes()


def _is_block(tensor: torch.Tensor) -> bool:
    """Whether the tensor is a dense block of a storage; not so are subclasses that only wrap others."""
    return type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.is_contiguous() and tensor.data_ptr() != 0


def _place(tensor: torch.Tensor) -> tuple[str, str, int, int]:
    """Device, element type, storage, address."""
    return str(tensor.device), str(tensor.dtype), tensor.untyped_storage().data_ptr(), tensor.data_ptr()


def _are_neighbours(tensors: Sequence[torch.Tensor]) -> bool:
    if not all(map(_is_block, tensors)):
        return not any(tensor.numel() for tensor in tensors)
    place = _place(tensors[0])
    for tensor in tensors:
        if _place(tensor) != place:
            return False
        place = (*place[:-1], place[-1] + tensor.nbytes)
    return True


def _as_one(tensors: Sequence[torch.Tensor], sizes: Sequence[int]) -> torch.Tensor:
    """Neighbours as one tensor; the only one as it is."""
    first = tensors[0]
    if len(tensors) == 1:
        return first
    return first.as_strided((sum(sizes),), (1,), first.storage_offset())
