"""Messages and bytes of every transition between two layouts: hp-core's plan, the exhaustive optimum, torch's DTensor.

Nothing is timed. hp-core's numbers are its plans', checked against what four real ranks put on the wire; the optimum is that
of the brute force of hp-core's own tests; torch's are counted while its DTensor runs over a process group that pretends.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
import torch.distributed.tensor as torch_tensor
from torch.distributed.device_mesh import init_device_mesh as torch_mesh

from benchmarks.core.torch_collectives import TorchCollectiveCount, all_to_all_as_one, fake_world
from benchmarks.report import Aim, Section, table
from hp_core import DTensor, Partial, Placement, Replicate, Shard, init_device_mesh
from hp_core.layout import Layout, from_placements
from hp_core.mesh import DeviceMesh
from hp_core.redistribute import plan_redistribute
from hp_core.testing import close_ranks, record_collectives, run_ranks

__all__ = ["MESHES", "SHAPES", "Cost", "Transition", "measure", "recorded", "section"]

MESHES = ((2, 2), (2, 2, 2))
SHAPES = ((16, 16), (13, 7))
AXES = ("dp", "cp", "tp")
ITEMSIZE = 4
PLACEMENTS: dict[str, Placement] = {"R": Replicate(), "S0": Shard(0), "S1": Shard(1), "P": Partial()}
TORCH_PLACEMENTS = {
    "R": torch_tensor.Replicate(),
    "S0": torch_tensor.Shard(0),
    "S1": torch_tensor.Shard(1),
    "P": torch_tensor.Partial(),
}
Words = tuple[str, ...]
"""One placement per mesh axis, as text."""


class Cost(NamedTuple):
    """What a transition puts on the wire: rounds of communication, and bytes that the busiest rank sends."""

    messages: int
    nbytes: int


@dataclass(frozen=True)
class Transition:
    """One transition and what it costs.

    Attributes:
        src: placements to start from.
        dst: placements to reach.
        ours: hp-core's plan.
        optimum: fewest messages, and of those ways the fewest bytes.
        torch: torch's DTensor with a true all-to-all; None where it refuses.
        torch_cpu: the same as it runs on CPU, where it gathers instead.
    """

    src: Words
    dst: Words
    ours: Cost
    optimum: Cost
    torch: Cost | None
    torch_cpu: Cost | None

    @property
    def above_torch(self) -> bool:
        """Whether hp-core needs more messages, or more bytes, than torch."""
        return self.torch is not None and (self.ours.messages > self.torch.messages or self.ours.nbytes > self.torch.nbytes)


def section(meshes: Iterable[tuple[int, ...]] = MESHES) -> Section:
    """Count, and tell of it."""
    rows, aims, notes, worst = [], [], [], []
    for sizes in meshes:
        for shape in SHAPES:
            transitions = measure(sizes, shape)
            name = f"{sizes}, {' x '.join(map(str, shape))}"
            rows.append(_row(name, transitions))
            aims += _aims(f"transitions on {name}", transitions)
            worst += [(name, one) for one in _widest_gaps(transitions)]
            if prod(sizes) == 4:
                wrong = _against_wire(transitions, recorded(sizes, shape))
                notes.append(f"{name}: {wrong} of {len(transitions)} plans differ from what four ranks recorded.")
    head = (
        "mesh, tensor", "transitions", "ours = optimum", "torch refuses", "torch needs more", "messages ours : torch",
        "bytes ours : torch", "bytes torch on CPU",
    )  # fmt: skip
    lines = [
        f"All ordered pairs of different layouts made of {', '.join(PLACEMENTS)} (pending sum), one per mesh axis, of float32 tensors. "
        "Optimum: fewest messages, then fewest bytes, by brute force over all layouts. Bytes: sent by the busiest rank, "
        "summed over the transitions that torch can do. Torch gets the flattened meshes that it needs for merging "
        "collectives, and its all-to-all is counted as one; the last column is what it really sends on CPU, where it gathers instead.",
        "",
        *table(head, rows),
        "",
        *notes,
        "",
        "Where torch needs most, compared with ours:",
        "",
        *table(("mesh, tensor", "from", "to", "messages ours : torch", "bytes ours : torch"), [_gap(*one) for one in worst], left=3),
    ]
    return Section("Messages and bytes of every transition", tuple(lines), tuple(aims))


def measure(sizes: tuple[int, ...], shape: tuple[int, int]) -> list[Transition]:
    """The cost of all transitions of a tensor on a mesh of these sizes."""
    mesh = DeviceMesh(sizes, AXES[: len(sizes)])
    layouts = {words: _layout(mesh, words) for words in _all_words(len(sizes))}
    best = _optima(mesh, layouts.values(), shape)
    pairs = [(src, dst) for src, dst in product(layouts, repeat=2) if src != dst]
    try:
        # in a process of its own: what torch remembers of a world that pretends must not meet a real one
        [counted] = run_ranks(1, count_torch, sizes, shape, pairs, timeout=300.0, init=False)
    finally:
        close_ranks()
    transitions = []
    for (src, dst), (ideal, on_cpu) in zip(pairs, counted, strict=True):
        plan = plan_redistribute(layouts[src], layouts[dst], shape, ITEMSIZE)
        ours = Cost(plan.messages, plan.nbytes)
        transitions.append(Transition(src, dst, ours, best[layouts[src], layouts[dst]], ideal, on_cpu))
    return transitions


def count_torch(
    sizes: tuple[int, ...], shape: tuple[int, int], pairs: Sequence[tuple[Words, Words]]
) -> list[tuple[Cost | None, Cost | None]]:
    """Run all transitions with torch's DTensor as rank 0, which holds most; with an ideal all-to-all, and as on CPU."""
    mesh = DeviceMesh(sizes, AXES[: len(sizes)])
    with fake_world(prod(sizes)):
        native = torch_mesh("cpu", sizes, mesh_dim_names=mesh.mesh_dim_names)
        for names in _merged(mesh.mesh_dim_names):
            native[names]._flatten("_".join(names))

        def cost(src: Words, dst: Words) -> Cost | None:
            local = torch.zeros(_layout(mesh, src).local_shape(shape, rank=0))
            where = [TORCH_PLACEMENTS[word] for word in src]
            tensor = torch_tensor.DTensor.from_local(
                local, native, where, run_check=False, shape=torch.Size(shape), stride=(shape[1], 1)
            )
            try:
                with TorchCollectiveCount() as count:
                    tensor.redistribute(placements=[TORCH_PLACEMENTS[word] for word in dst])
            except RuntimeError as error:
                if "redistributing to Partial is for internal use only" not in str(error):
                    raise
                return None
            return Cost(count.messages, count.nbytes)

        with all_to_all_as_one():
            ideal = [cost(src, dst) for src, dst in pairs]
        return list(zip(ideal, (cost(src, dst) for src, dst in pairs), strict=True))


def recorded(sizes: tuple[int, ...], shape: tuple[int, int]) -> list[list[Cost]]:
    """What the recorder sees on every rank of a real world, for each transition in the order of `measure`."""
    return run_ranks(prod(sizes), _record, sizes, shape, timeout=300.0)


def _record(sizes: tuple[int, ...], shape: tuple[int, int]) -> list[Cost]:
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=AXES[: len(sizes)])
    costs = []
    for src, dst in product(_all_words(len(sizes)), repeat=2):
        if src != dst:
            layout = _layout(mesh, src)
            tensor = DTensor.from_local(torch.zeros(layout.local_shape(shape)), layout, shape=shape)
            with record_collectives() as log:
                tensor.redistribute(_layout(mesh, dst))
            costs.append(Cost(sum(record.kind != "recv" for record in log), log.nbytes))
    return costs


# -- the optimum ----------------------------------------------------------------------------------------------------


def _optima(mesh: DeviceMesh, layouts: Iterable[Layout], shape: tuple[int, int]) -> dict[tuple[Layout, Layout], Cost]:
    """Fewest messages, then fewest bytes, between all pairs of layouts."""
    exhaustive = _brute_force()
    dear = 10**9  # one message outweighs all bytes, so that the cost of a way can be read off its sum
    graph = exhaustive.BruteForce(exhaustive.all_layouts(mesh, len(shape)), shape, ITEMSIZE, dear, (1,) * mesh.ndim)
    return {
        (src, dst): Cost(*divmod(cost, dear)) for src in layouts for dst, cost in graph.costs_from(src).items()
    }


def _brute_force() -> ModuleType:
    """The module of hp-core's tests that finds optima by exhaustion; the tests' folder isn't a package to import by name."""
    name = "hp_core_redistribute_tests"
    if name not in sys.modules:
        folder = Path(__file__).parents[2] / "packages" / "hp-core" / "tests" / "redistribute"
        spec = importlib.util.spec_from_file_location(name, folder / "__init__.py", submodule_search_locations=[str(folder)])
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return importlib.import_module(f"{name}.brute_force")


# -- words ----------------------------------------------------------------------------------------------------------


def _all_words(axes: int) -> list[Words]:
    return list(product(PLACEMENTS, repeat=axes))


def _layout(mesh: DeviceMesh, words: Words) -> Layout:
    return from_placements(mesh, [PLACEMENTS[word] for word in words], 2)


def _merged(names: Sequence[str]) -> list[tuple[str, ...]]:
    """All sets of at least two axes, in mesh order."""
    chosen = product((False, True), repeat=len(names))
    return [tuple(name for name, keep in zip(names, keeps, strict=True) if keep) for keeps in chosen if sum(keeps) > 1]


# -- the page -------------------------------------------------------------------------------------------------------


def _row(name: str, transitions: Sequence[Transition]) -> tuple[str, ...]:
    known = [one for one in transitions if one.torch is not None]
    more = [one for one in known if one.torch is not None and one.ours < one.torch]
    messages = [sum(cost.messages for cost in costs) for costs in _columns(known)]
    nbytes = [sum(cost.nbytes for cost in costs) for costs in _columns(known)]
    return (
        name,
        str(len(transitions)),
        f"{sum(one.ours == one.optimum for one in transitions)}",
        str(len(transitions) - len(known)),
        str(len(more)),
        f"{messages[0]} : {messages[1]}",
        f"{nbytes[0]} : {nbytes[1]}",
        str(nbytes[2]),
    )


def _columns(known: Sequence[Transition]) -> tuple[list[Cost], list[Cost], list[Cost]]:
    """Costs of ours, of torch with an all-to-all, and of torch on CPU."""
    return (
        [one.ours for one in known],
        [one.torch for one in known if one.torch is not None],
        [one.torch_cpu for one in known if one.torch_cpu is not None],
    )


def _aims(name: str, transitions: Sequence[Transition]) -> list[Aim]:
    worse = sum(one.ours != one.optimum for one in transitions)
    above = sum(one.above_torch for one in transitions)
    count = len(transitions)
    return [
        Aim(f"{name}: the optimum", "= optimum", f"{count - worse} of {count}", not worse, f"{worse} transitions"),
        Aim(f"{name}: torch DTensor", "never above torch", f"{above} above", not above, f"{above} transitions"),
    ]


def _widest_gaps(transitions: Sequence[Transition], most: int = 3) -> list[Transition]:
    """Where torch needs most more, messages first."""
    gaps = [one for one in transitions if one.torch is not None and one.ours < one.torch]
    return sorted(gaps, key=_gap_size, reverse=True)[:most]


def _gap_size(one: Transition) -> tuple[int, int]:
    assert one.torch is not None
    return one.torch.messages - one.ours.messages, one.torch.nbytes - one.ours.nbytes


def _gap(name: str, one: Transition) -> tuple[str, ...]:
    assert one.torch is not None
    return (
        name,
        ", ".join(one.src),
        ", ".join(one.dst),
        f"{one.ours.messages} : {one.torch.messages}",
        f"{one.ours.nbytes} : {one.torch.nbytes}",
    )


def _against_wire(transitions: Sequence[Transition], ranks: Sequence[Sequence[Cost]]) -> int:
    """How many plans promise something else than the busiest rank has recorded."""
    return sum(
        one.ours != Cost(max(cost.messages for cost in costs), max(cost.nbytes for cost in costs))
        for one, costs in zip(transitions, zip(*ranks, strict=True), strict=True)
    )
