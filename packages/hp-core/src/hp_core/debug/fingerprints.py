"""`fingerprint`: hashes of what all ranks hold of a model, so that runs, layouts and replicas can be compared bit for bit.

Each rank hashes its own parts (`mixing.py`), the hashes are exchanged (`agreement.py`) and compared (`replicas.py`), and every
rank comes to the same result, so that all raise alike.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from hp_core.debug.agreement import Subject, agree, gathered
from hp_core.debug.mixing import hash_of_bits, hash_of_text, mixed, signed, wrapped
from hp_core.debug.parameters import NamedTensor, named_buffers, named_parameters, named_tensors, ours
from hp_core.debug.replicas import ABSENT, Holding, ReplicaDifference
from hp_core.dtensor.api import DTensorMethods, dtensor_type
from hp_core.errors import LayoutError, MeshError, PlanError, PlatformError, ReplicaError
from hp_core.geometry import box_numel
from hp_core.mesh import DeviceMesh, as_mesh, get_current_mesh
from hp_core.platform import get_platform
from hp_core.process_group import get_rank, get_world_size
from hp_core.protocols import StagedModule

__all__ = ["Fingerprint", "fingerprint"]

_MOST_TOLD = 8


@dataclass(frozen=True)
class Fingerprint:
    """What `fingerprint` found; equal on all ranks that took part.

    Attributes:
        what: "parameters", "gradients", "buffers" or "tensors".
        ranks: the hash of all that each rank holds; replicas have the same.
        tensors: by name, the hash of the global tensor, whatever its layout; None where replicas differ, where there is no
            gradient, or where some parts are on ranks that weren't asked.
        differences: replicas that differ, in the order of tensors; of the first 64 tensors that do.
        mesh: the mesh whose ranks were asked.
        untold: names of the other tensors whose replicas differ.
    """

    what: str
    ranks: Mapping[int, str]
    tensors: Mapping[str, str | None]
    differences: tuple[ReplicaDifference, ...]
    mesh: DeviceMesh | None = None
    untold: tuple[str, ...] = ()

    @property
    def coordinates(self) -> dict[tuple[int, ...], str]:
        """The hash of what each coordinate of the mesh holds."""
        if self.mesh is None:
            return {(position,): text for position, text in enumerate(self.ranks.values())}
        return {self.mesh.require_coordinate(rank): text for rank, text in self.ranks.items()}

    @property
    def total(self) -> str | None:
        """One hash of all global tensors and their names: equal for equal bits, whatever the layout and number of ranks.

        None if replicas differ, or nothing has a hash. Tensors without one (gradients that weren't computed) are left out.
        """
        known = {name: text for name, text in self.tensors.items() if text is not None}
        if self.differences or not known:
            return None
        return f"{wrapped(sum(mixed(hash_of_text(name) + int(text, 16)) for name, text in known.items())):016x}"

    def check(self) -> Fingerprint:
        """Return this if replicas are equal.

        Raises:
            ReplicaError: some aren't; it names the tensors and the ranks, on all ranks alike.
        """
        if self.differences:
            told = [f"  {difference}" for difference in self.differences[:_MOST_TOLD]]
            more = len(self.differences) + len(self.untold) - _MOST_TOLD
            if more > 0:
                told.append(f"  and {more} more")
            raise ReplicaError(
                f"{self.what} differ between ranks that should hold the same bits:\n" + "\n".join(told) + "\n"
                "Usual causes: a rank was seeded or loaded differently, a gradient wasn't reduced over an axis, or a device is "
                "faulty. Call fingerprint(model).check() after building, and again after each step, to find when it begins; if a "
                "rank means to have tensors of its own, name them with per_rank=."
            )
        return self

    def compare(self, other: Fingerprint | Mapping[str, str | None]) -> list[str]:
        """Names of the tensors that aren't equal, bit for bit, to those of another fingerprint, or that only one has.

        Args:
            other: the fingerprint, or its `tensors`, of another run, step, layout or number of ranks.
        """
        theirs = other.tensors if isinstance(other, Fingerprint) else other
        names = [*self.tensors, *(name for name in theirs if name not in self.tensors)]
        return [
            name
            for name in names
            if name not in self.tensors or name not in theirs or self.tensors[name] != theirs[name]
        ]

    def __str__(self) -> str:
        state = "replicas equal" if not self.differences else f"{len(self.differences) + len(self.untold)} DIFFER"
        lines = [
            f"{self.what} {self.total or '(no total)'}: {len(self.tensors)} tensors on {len(self.ranks)} ranks, {state}"
        ]
        lines += [f"  rank {rank}: {text}" for rank, text in self.ranks.items()]
        return "\n".join([*lines, *(f"  {difference}" for difference in self.differences)])


def fingerprint(
    model: Any,
    what: Literal["parameters", "gradients", "buffers"] | Sequence[Any] = "parameters",
    *,
    mesh: DeviceMesh | Any | None = None,
    per_rank: str | Iterable[str] = (),
) -> Fingerprint:
    """Hash what every rank holds of a model, and compare ranks that should hold the same.

    All ranks of the mesh call it; a few bytes per tensor are exchanged. Nothing is gathered or changed. Parts count as
    replicas when they are the same part of the tensor of the same name: on ranks along a `Replicate` axis, along the replicas
    of an HSDP mesh, and on all ranks for plain tensors.

    Example:
        >>> fingerprint(model).check()  # raises if replicas differ
        >>> print(fingerprint(model, "gradients").total)  # equal for dp=2 and tp=2, if all bits are

    Args:
        model: a module or a pipeline stage; or tensors by name, as a mapping or pairs.
        what: "parameters", "gradients" (what PyTorch keeps in `.grad`) or "buffers"; or the gradients themselves, one for each
            trainable parameter in the order of the module, as MindSpore's `value_and_grad` gives them.
        mesh: the ranks to ask. Default: the current mesh; else the largest that some tensor lies on; else the world (of a
            pipeline stage: this rank alone). In a pipeline, whose stages hold different layers, give the mesh without the
            pipeline's axis: `mesh["dp", "tp"]`.
        per_rank: globs of the names of tensors of which ranks mean to have their own, such as plain expert weights: those are
            compared only within the mesh that they lie on.

    Raises:
        PlanError: the ranks hold tensors of different names, shapes or element types; or a glob fits none.
        MeshError: a tensor lies on ranks that aren't in `mesh`.
        LayoutError: a tensor has a pending reduction.
        PlatformError: a tensor has no storage (it is on the meta device).
    """
    staged = isinstance(model, StagedModule)
    label, tensors = _chosen(model.submodule if staged else model, what)
    own = _matches(tensors, (per_rank,) if isinstance(per_rank, str) else tuple(per_rank))
    asked, ranks = _asked(tensors, mesh, staged)
    _require_hashable(tensors, ranks)
    _require_same_tensors(label, tensors, ranks)
    holdings = [_holding(named, named.name in own) for named in tensors]
    subjects = [Subject(named.name, named.shape, _kind(named), named.name not in own) for named in tensors]
    found = agree(subjects, holdings, _hash_of_rank(tensors, holdings), ranks)
    hashes = {name: None if one is None else _text(one) for name, one in found.hashes.items()}
    of_ranks = {rank: _text(one) for rank, one in found.ranks.items()}
    return Fingerprint(label, of_ranks, hashes, found.differences, asked, found.untold)


def _chosen(model: Any, what: Any) -> tuple[str, list[NamedTensor]]:
    """What is hashed: how to call it, and the tensors; a gradient that isn't there stands as its parameter without elements."""
    if not isinstance(what, str):
        return "gradients", _given_gradients(model, list(what))
    if isinstance(model, Mapping) or _is_pairs(model):
        return "tensors", named_tensors(model)
    if what == "parameters":
        return what, named_parameters(model)
    if what == "buffers":
        return what, named_buffers(model)
    if what != "gradients":
        raise PlanError(f"fingerprint(model, {what!r}): hash 'parameters', 'gradients' or 'buffers'.")
    autograd = get_platform().autograd
    if not autograd.keeps_gradients:
        raise PlatformError(
            "MindSpore keeps no gradients with parameters: give fingerprint(cell, gradients) what value_and_grad returned for "
            "cell.trainable_params()."
        )
    trained = [named for named in named_parameters(model) if autograd.requires_grad(named.local)]
    return what, [_with_gradient(named, autograd.kept_gradient(named.tensor)) for named in trained]


def _given_gradients(model: Any, gradients: list[Any]) -> list[NamedTensor]:
    autograd = get_platform().autograd
    trained = [named for named in named_parameters(model) if autograd.requires_grad(named.local)]
    if len(gradients) != len(trained):
        raise PlanError(f"{len(gradients)} gradients were given for {len(trained)} trainable parameters of the model.")
    return [_with_gradient(named, gradient) for named, gradient in zip(trained, gradients, strict=True)]


class _NoGradient:
    """In place of a gradient that isn't there: where it would be."""

    def __init__(self, parameter: NamedTensor) -> None:
        self.parameter = parameter
        self.shape = parameter.shape


def _with_gradient(parameter: NamedTensor, gradient: Any) -> NamedTensor:
    if gradient is None:
        return NamedTensor(parameter.name, parameter.aliases, _NoGradient(parameter))
    gradient = ours(gradient)
    layout = parameter.layout
    if layout is not None and not isinstance(gradient, dtensor_type()):
        if tuple(gradient.shape) != tuple(parameter.local.shape):
            raise PlanError(
                f"the gradient of {parameter.name!r} has shape {list(gradient.shape)}, but rank {get_rank()} holds a part of shape "
                f"{list(parameter.local.shape)} of it; give local gradients, in the order of the trainable parameters."
            )
        gradient = DTensorMethods.from_local(gradient, layout.gradient, shape=parameter.shape)
    return NamedTensor(parameter.name, parameter.aliases, gradient)


def _is_pairs(model: Any) -> bool:
    return isinstance(model, (list, tuple)) and all(isinstance(pair, tuple) and len(pair) == 2 for pair in model)


def _matches(tensors: Sequence[NamedTensor], globs: tuple[str, ...]) -> set[str]:
    found: set[str] = set()
    for glob in globs:
        fits = {named.name for named in tensors for name in (named.name, *named.aliases) if fnmatchcase(name, glob)}
        if not fits:
            some = ", ".join(repr(named.name) for named in tensors[:5])
            raise PlanError(f"per_rank={glob!r} fits no tensor; there are {len(tensors)}: {some}, ...")
        found |= fits
    return found


def _asked(tensors: Sequence[NamedTensor], mesh: Any, staged: bool) -> tuple[DeviceMesh | None, tuple[int, ...]]:
    """The ranks that take part, ascending, and their mesh; a stage of plain tensors can't tell who else has it."""
    chosen = get_current_mesh() if mesh is None else as_mesh(mesh)
    if chosen is None:
        meshes = [named.mesh for named in tensors if named.mesh is not None]
        chosen = max(meshes, key=lambda one: one.size(), default=None)
    if chosen is not None:
        chosen.require_coordinate()
        return chosen, tuple(sorted(chosen.rank_list))
    alone = staged or not get_platform().processes.is_initialized()
    return None, (get_rank(),) if alone else tuple(range(get_world_size()))


def _require_hashable(tensors: Sequence[NamedTensor], ranks: tuple[int, ...]) -> None:
    for named in tensors:
        if isinstance(named.tensor, _NoGradient):
            continue
        if named.layout is not None:
            if named.layout.is_partial():
                raise LayoutError(
                    f"{named.name!r} is laid out {named.layout}: a reduction is pending, so ranks hold addends, not parts; call "
                    f"reduce_partial() on it first."
                )
            outside = sorted(set(named.layout.mesh.rank_list) - set(ranks))
            if outside:
                raise MeshError(
                    f"{named.name!r} lies on {named.layout.mesh!r}, whose ranks {outside} aren't among those asked {list(ranks)}; "
                    f"give fingerprint() a mesh that holds all of them."
                )
        if get_platform().tensors.is_meta(named.local):
            raise PlatformError(
                f"{named.name!r} is on the meta device and has no values yet; call init_parameters() first."
            )


def _require_same_tensors(label: str, tensors: Sequence[NamedTensor], ranks: tuple[int, ...]) -> None:
    """Refuse, on all ranks alike, to compare ranks that hold different things."""
    text = "\n".join(f"{named.name} {named.aliases} {_kind(named)}" for named in tensors)
    table = gathered([signed(hash_of_text(f"{label}\n{text}")), len(tensors)], ranks)
    kinds: dict[tuple[int, ...], list[int]] = {}
    for rank, row in table.items():
        kinds.setdefault(tuple(row), []).append(rank)
    if len(kinds) > 1:
        told = "; ".join(f"ranks {members} have {count} tensors" for (_, count), members in kinds.items())
        raise PlanError(
            f"fingerprint() of {label}: the ranks have tensors of different names, shapes or element types ({told}), so they can't "
            f"be compared. In a pipeline ask the ranks of one stage: fingerprint(stage.submodule, mesh=mesh['dp'])."
        )


def _kind(named: NamedTensor) -> str:
    """Shape and element type, which parameters of equal bits may differ by."""
    if isinstance(named.tensor, _NoGradient):
        named = named.tensor.parameter
    tensors = get_platform().tensors
    return f"{list(named.shape)} {tensors.dtype_name(tensors.dtype(named.local))}"


def _holding(named: NamedTensor, own: bool) -> Holding:
    if isinstance(named.tensor, _NoGradient):
        boxes = named.tensor.parameter.boxes
        return Holding(_place(named.tensor.parameter, own), ABSENT if sum(map(box_numel, boxes)) else 0, 0)
    boxes = named.boxes
    elements = sum(map(box_numel, boxes))
    bits = hash_of_bits(named.local, boxes, named.shape) if elements else 0
    return Holding(_place(named, own), elements, signed(bits))


def _place(named: NamedTensor, own: bool) -> int:
    whose: Any = None
    if own:
        whose = get_rank() if named.mesh is None else sorted(named.mesh.rank_list)
    return signed(hash_of_text(f"{named.boxes} {whose}"))


def _hash_of_rank(tensors: Sequence[NamedTensor], holdings: Sequence[Holding]) -> int:
    """The hash of what this rank holds."""
    total = 0
    for named, holding in zip(tensors, holdings, strict=True):
        if holding.elements:
            total += mixed(
                hash_of_text(named.name) + mixed(holding.place + mixed(holding.elements + mixed(holding.bits)))
            )
    return total


def _text(number: int) -> str:
    return f"{wrapped(number):016x}"
