"""How a batch is cut into micro-batches: `BatchDimSpec` says along which dim, or that a value goes to each as it is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hp_core.errors import PlanError
from hp_core.platform import get_platform
from hp_pipeline.platform import get_tools

__all__ = ["BatchDimSpec", "Cut", "cut_all", "cut_batch", "rows_of"]


@dataclass(frozen=True, slots=True)
class BatchDimSpec:
    """Which dim of an input is the batch.

    Attributes:
        dim: it; None for an input that every micro-batch gets whole.
    """

    dim: int | None = 0

    @staticmethod
    def from_tuple(dims: Sequence[int | None]) -> tuple[BatchDimSpec, ...]:
        """For positional inputs."""
        return tuple(map(BatchDimSpec, dims))

    @staticmethod
    def from_dict(dims: Mapping[str, int | None]) -> dict[str, BatchDimSpec]:
        """For keyword inputs."""
        return {name: BatchDimSpec(dim) for name, dim in dims.items()}


Dim = BatchDimSpec | int | None


@dataclass(frozen=True)
class Cut:
    """A value for each micro-batch.

    Attributes:
        parts: them.
        rows: length of the dim that was cut; None if none was.
    """

    parts: tuple[Any, ...]
    rows: int | None


def cut_batch(tree: Any, dim: Dim, parts: int, what: str) -> Cut:
    """Cut the tensors of a tree along one dim; plain values and tensors without dims go to each micro-batch.

    Where the dim doesn't divide, sizes differ by one, larger ones first.

    Raises:
        PlanError: there are fewer rows than micro-batches, or tensors differ in rows.
    """
    number = dim.dim if isinstance(dim, BatchDimSpec) else dim
    if number is None:
        return Cut((tree,) * parts, None)
    platform, tools = get_platform(), get_tools()
    leaves, structure = tools.flatten(tree)
    rows: int | None = None
    columns = []
    for leaf in leaves:
        shape = tools.shape(leaf) if platform.tensors.is_tensor(leaf) else ()
        if not shape:
            columns.append([leaf] * parts)
            continue
        if not -len(shape) <= number < len(shape):
            raise PlanError(
                f"{what} of shape {shape} has no dim {number} to be cut into micro-batches; see BatchDimSpec."
            )
        length = shape[number]
        if length < parts:
            raise PlanError(
                f"{what} of shape {shape} has {length} rows in dim {number}, too few for {parts} micro-batches. Pass a larger "
                f"batch, fewer micro-batches, or BatchDimSpec(None) for a value that isn't cut."
            )
        if rows is not None and rows != length:
            raise PlanError(
                f"tensors in {what} have {rows} and {length} rows in dim {number}; a batch has one number of rows."
            )
        rows = length
        columns.append(tools.split(leaf, number, parts))
    return Cut(tuple(tools.unflatten([column[part] for column in columns], structure) for part in range(parts)), rows)


def cut_all(
    args: Sequence[Any], kwargs: Mapping[str, Any], dims: Sequence[Dim] | Dim, kwarg_dims: Mapping[str, Dim], parts: int
) -> tuple[list[tuple[Any, ...]], list[dict[str, Any]], int | None]:
    """Positional and keyword inputs of each micro-batch, and the number of rows.

    Raises:
        PlanError: they don't fit together or to `dims`.
    """
    if isinstance(dims, BatchDimSpec | int) or dims is None:
        dims = [dims] * len(args)
    if args and len(dims) != len(args):
        raise PlanError(f"args_batch_dim has {len(dims)} entries for {len(args)} positional inputs; give one for each.")
    named = [(f"positional input {number}", value, dims[number]) for number, value in enumerate(args)]
    named += [(f"input {name!r}", value, kwarg_dims.get(name, 0)) for name, value in kwargs.items()]
    cuts = [cut_batch(value, dim, parts, what) for what, value, dim in named]
    rows = rows_of([(what, cut.rows) for (what, _, _), cut in zip(named, cuts, strict=True)])
    positional = [tuple(cut.parts[part] for cut in cuts[: len(args)]) for part in range(parts)]
    keyword = [dict(zip(kwargs, (cut.parts[part] for cut in cuts[len(args) :]), strict=True)) for part in range(parts)]
    return positional, keyword, rows


def rows_of(told: Sequence[tuple[str, int | None]]) -> int | None:
    """The one number of rows.

    Raises:
        PlanError: there are several.
    """
    known = [(what, rows) for what, rows in told if rows is not None]
    if len({rows for _, rows in known}) > 1:
        raise PlanError(
            "inputs differ in the number of rows to be cut into micro-batches: "
            + ", ".join(f"{what} has {rows}" for what, rows in known)
            + ". Say with BatchDimSpec which dim is the batch, or BatchDimSpec(None) for a value that isn't cut."
        )
    return known[0][1] if known else None
