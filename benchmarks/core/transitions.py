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
from hp_core.redistribute.planner import DEFAULT_COST_MODEL, CostModel
from hp_core.testing import record_collectives, run_ranks

__all__ = ["CASES", "Case", "Cost", "Transition", "differing_from_wire", "measure", "section"]

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


class Case(NamedTuple):
    """A mesh and a tensor on it."""

    sizes: tuple[int, ...]
    shape: tuple[int, int]

    def __str__(self) -> str:
        return f"{self.sizes}, {self.shape[0]} x {self.shape[1]}"

    def layout(self, words: Words) -> Layout:
        """The layout of these placements."""
        mesh = DeviceMesh(self.sizes, AXES[: len(self.sizes)])
        return from_placements(mesh, [PLACEMENTS[word] for word in words], len(self.shape))

    def pairs(self) -> list[tuple[Words, Words]]:
        """All ordered pairs of different layouts."""
        words = product(PLACEMENTS, repeat=len(self.sizes))
        return [(src, dst) for src, dst in product(words, repeat=2) if src != dst]


CASES = tuple(Case(sizes, shape) for sizes in ((2, 2), (2, 2, 2)) for shape in ((16, 16), (13, 7)))


class Cost(NamedTuple):
    """What a transition puts on the wire: rounds of communication, and bytes that the busiest rank sends."""

    messages: int
    nbytes: int

    def ordered(self, bytes_first: bool) -> tuple[int, int]:
        """To be compared: what counts most comes first."""
        return (self.nbytes, self.messages) if bytes_first else (self.messages, self.nbytes)


# No plan has both the fewest messages and the fewest bytes. Small tensors want the one, large ones the other:
# the planner's cost model decides, and so each of its two ends is compared.
OBJECTIVES: dict[bool, tuple[str, CostModel]] = {
    False: ("messages first", DEFAULT_COST_MODEL),
    True: ("bytes first", CostModel(latency=1e-9, bandwidth=1e3)),
}


@dataclass(frozen=True)
class Transition:
    """One transition and what it costs; `ours` and `optimum` by whether bytes come first.

    Attributes:
        src: placements to start from.
        dst: placements to reach.
        ours: hp-core's plan.
        optimum: the best there is.
        torch: torch's DTensor with a true all-to-all; None where it refuses.
        torch_bytes_on_cpu: bytes of the same on CPU, where it gathers instead.
    """

    src: Words
    dst: Words
    ours: dict[bool, Cost]
    optimum: dict[bool, Cost]
    torch: Cost | None
    torch_bytes_on_cpu: int

    def against_torch(self, bytes_first: bool) -> int:
        """1 where hp-core costs more than torch, -1 where it costs less, 0 where equal or torch refuses."""
        if self.torch is None:
            return 0
        ours, torchs = self.ours[bytes_first].ordered(bytes_first), self.torch.ordered(bytes_first)
        return (ours > torchs) - (ours < torchs)


def section(cases: Sequence[Case] = CASES) -> Section:
    """Count, and tell of it."""
    rows, aims, notes, gaps = [], [], [], []
    for case, transitions in zip(cases, measure(cases), strict=True):
        for bytes_first, (objective, _) in OBJECTIVES.items():
            rows.append((str(case), objective, *_row(transitions, bytes_first)))
            aims += _aims(f"transitions on {case}, {objective}", transitions, bytes_first)
        gaps += [_gap(case, one) for one in sorted(transitions, key=_gap_size, reverse=True)[:3]]
        if prod(case.sizes) == 4:
            wrong = differing_from_wire(case, transitions)
            notes.append(
                f"{case}: {len(transitions) - wrong} of {len(transitions)} plans are what four ranks recorded."
            )
            aims.append(
                Aim(
                    f"transitions on {case}: plan = what ranks send",
                    "all",
                    f"{len(transitions) - wrong}",
                    not wrong,
                    f"{wrong}",
                )
            )
    head = (
        "mesh, tensor", "objective", "transitions", "ours = optimum", "torch refuses", "ours below torch", "equal", "above",
        "of those below, a trade", "messages ours : torch", "bytes ours : torch", "bytes torch on CPU",
    )  # fmt: skip
    lines = [
        f"All ordered pairs of different layouts made of {', '.join(PLACEMENTS)} (pending sum), one per mesh axis, of float32 "
        "tensors; the optimum by brute force over all layouts. No plan has both the fewest messages and the fewest bytes: "
        "*messages first* is what hp-core does by default with tensors as small as these, *bytes first* what it does "
        "with large ones. Bytes: sent by the busiest rank. The sums are over the transitions that torch can do (it refuses to "
        "make a sum pending). A trade is a plan that is below torch in what comes first, and above it in the other. Torch "
        "gets the flattened meshes that it needs for merging collectives, and its all-to-all is counted as one; the last "
        "column is what it really sends on CPU, where it gathers instead.",
        "",
        *table(head, rows, left=2),
        "",
        *notes,
        "",
        "Where torch needs most more messages than ours (messages first):",
        "",
        *table(("mesh, tensor", "from", "to", "messages ours : torch", "bytes ours : torch"), gaps, left=3),
    ]
    return Section("Messages and bytes of every transition", tuple(lines), tuple(aims))


def measure(cases: Sequence[Case]) -> list[list[Transition]]:
    """The cost of all transitions, for each case. Needs no ranks, but a process that has no process group."""
    return [_transitions(case, _count_torch(case)) for case in cases]


def differing_from_wire(case: Case, transitions: Sequence[Transition]) -> int:
    """How many default plans promise something else than the busiest of real ranks records."""
    ranks = run_ranks(prod(case.sizes), _record, case, timeout=300.0)
    return sum(
        one.ours[False] != Cost(max(cost.messages for cost in costs), max(cost.nbytes for cost in costs))
        for one, costs in zip(transitions, zip(*ranks, strict=True), strict=True)
    )


def _transitions(case: Case, torchs: Sequence[tuple[Cost | None, int]]) -> list[Transition]:
    best = {bytes_first: _optima(case, bytes_first) for bytes_first in OBJECTIVES}
    transitions = []
    for (src, dst), (torchs_cost, on_cpu) in zip(case.pairs(), torchs, strict=True):
        ends = case.layout(src), case.layout(dst)
        ours = {}
        for bytes_first, (_, model) in OBJECTIVES.items():
            plan = plan_redistribute(*ends, case.shape, ITEMSIZE, cost_model=model)
            ours[bytes_first] = Cost(plan.messages, plan.nbytes)
        optimum = {bytes_first: best[bytes_first][ends] for bytes_first in OBJECTIVES}
        transitions.append(Transition(src, dst, ours, optimum, torchs_cost, on_cpu))
    return transitions


def _count_torch(case: Case) -> list[tuple[Cost | None, int]]:
    """Run all transitions with torch's DTensor as rank 0, which holds most; the cost, and its bytes on CPU."""
    with fake_world(prod(case.sizes)), all_to_all_as_one():
        native = torch_mesh("cpu", case.sizes, mesh_dim_names=AXES[: len(case.sizes)])
        for names in _merged(AXES[: len(case.sizes)]):
            native[names]._flatten("_".join(names))

        def cost(src: Words, dst: Words) -> tuple[Cost | None, int]:
            local = torch.zeros(case.layout(src).local_shape(case.shape, rank=0))
            where = [TORCH_PLACEMENTS[word] for word in src]
            tensor = torch_tensor.DTensor.from_local(
                local, native, where, run_check=False, shape=torch.Size(case.shape), stride=(case.shape[1], 1)
            )
            try:
                with TorchCollectiveCount() as count:
                    tensor.redistribute(placements=[TORCH_PLACEMENTS[word] for word in dst])
            except RuntimeError as error:
                if "redistributing to Partial is for internal use only" not in str(error):
                    raise
                return None, 0
            return Cost(count.messages, count.nbytes), count.nbytes_on_cpu

        return [cost(src, dst) for src, dst in case.pairs()]


def _record(case: Case) -> list[Cost]:
    """What the recorder sees on this rank of a real world."""
    init_device_mesh("cpu", case.sizes, mesh_dim_names=AXES[: len(case.sizes)])
    costs = []
    for src, dst in case.pairs():
        layout = case.layout(src)
        tensor = DTensor.from_local(torch.zeros(layout.local_shape(case.shape)), layout, shape=case.shape)
        with record_collectives() as log:
            tensor.redistribute(case.layout(dst))
        costs.append(Cost(sum(record.kind != "recv" for record in log), log.nbytes))
    return costs


def _merged(names: Sequence[str]) -> list[tuple[str, ...]]:
    """All sets of at least two axes, in mesh order."""
    chosen = product((False, True), repeat=len(names))
    return [tuple(name for name, keep in zip(names, keeps, strict=True) if keep) for keeps in chosen if sum(keeps) > 1]


# -- the optimum ----------------------------------------------------------------------------------------------------


def _optima(case: Case, bytes_first: bool) -> dict[tuple[Layout, Layout], Cost]:
    """The best there is, between all pairs of layouts."""
    exhaustive = _brute_force()
    mesh = DeviceMesh(case.sizes, AXES[: len(case.sizes)])
    # what comes first outweighs all of the other, so that both can be read off the cost of a way
    latency, byte_time, weight = (1, 10**6, 10**6) if bytes_first else (10**9, 1, 10**9)
    graph = exhaustive.BruteForce(
        exhaustive.all_layouts(mesh, len(case.shape)), case.shape, ITEMSIZE, latency, (byte_time,) * mesh.ndim
    )
    found = {}
    for words in product(PLACEMENTS, repeat=len(case.sizes)):
        src = case.layout(words)
        for dst, price in graph.costs_from(src).items():
            first, second = divmod(price, weight)
            found[src, dst] = Cost(second, first) if bytes_first else Cost(first, second)
    return found


def _brute_force() -> ModuleType:
    """The module of hp-core's tests that finds optima by exhaustion; the tests' folder isn't a package to import by name."""
    name = "hp_core_redistribute_tests"
    if name not in sys.modules:
        folder = Path(__file__).parents[2] / "packages" / "hp-core" / "tests" / "redistribute"
        spec = importlib.util.spec_from_file_location(
            name, folder / "__init__.py", submodule_search_locations=[str(folder)]
        )
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return importlib.import_module(f"{name}.brute_force")


# -- the page -------------------------------------------------------------------------------------------------------


def _row(transitions: Sequence[Transition], bytes_first: bool) -> tuple[str, ...]:
    known = [(one.ours[bytes_first], one.torch) for one in transitions if one.torch is not None]
    signs = [one.against_torch(bytes_first) for one in transitions if one.torch is not None]
    return (
        str(len(transitions)),
        str(sum(one.ours[bytes_first] == one.optimum[bytes_first] for one in transitions)),
        str(len(transitions) - len(known)),
        *(str(signs.count(sign)) for sign in (-1, 0, 1)),
        str(sum((ours.messages - torchs.messages) * (ours.nbytes - torchs.nbytes) < 0 for ours, torchs in known)),
        _sums((ours.messages, torchs.messages) for ours, torchs in known),
        _sums((ours.nbytes, torchs.nbytes) for ours, torchs in known),
        str(sum(one.torch_bytes_on_cpu for one in transitions)),
    )


def _sums(pairs: Iterable[tuple[int, int]]) -> str:
    ours, torchs = zip(*pairs, strict=True)
    return f"{sum(ours)} : {sum(torchs)}"


def _aims(name: str, transitions: Sequence[Transition], bytes_first: bool) -> list[Aim]:
    worse = sum(one.ours[bytes_first] != one.optimum[bytes_first] for one in transitions)
    above = sum(one.against_torch(bytes_first) > 0 for one in transitions)
    count = len(transitions)
    return [
        Aim(name, "= optimum", f"{count - worse} of {count}", not worse, f"{worse} transitions"),
        Aim(name, "never above torch", f"{above} above", not above, f"{above} transitions"),
    ]


def _gap_size(one: Transition) -> tuple[int, int]:
    ours = one.ours[False]
    return (0, 0) if one.torch is None else (one.torch.messages - ours.messages, one.torch.nbytes - ours.nbytes)


def _gap(case: Case, one: Transition) -> tuple[str, ...]:
    ours, torchs = one.ours[False], one.torch or Cost(0, 0)
    ends = (", ".join(one.src), ", ".join(one.dst))
    return (str(case), *ends, f"{ours.messages} : {torchs.messages}", f"{ours.nbytes} : {torchs.nbytes}")
