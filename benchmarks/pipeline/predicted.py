"""Bubbles and memory as simulated: beside the formulas of the papers, and beside torch's own tables."""

from __future__ import annotations

from collections.abc import Callable

from benchmarks.pipeline.contenders import TABLED, torch_schedule
from benchmarks.report import Aim, Section, table
from hp_pipeline import build_order, simulate

__all__ = ["FORMULAS", "SIZES", "compared", "section"]

SIZES = ((2, 8), (4, 16), (8, 32), (16, 64))
"""Ranks and micro-batches."""

# Bubble of every rank and the peak in chunks on rank s, for F = I = W = 1, B = 2, and 2 chunks where there are several.
FORMULAS: dict[str, tuple[str, Callable[[int], float], str, Callable[[int, int, int], float]]] = {
    "gpipe": ("3 (P - 1)", lambda p: 3 * (p - 1), "M", lambda p, m, s: m),
    "1f1b": ("3 (P - 1)", lambda p: 3 * (p - 1), "min(M, P - s)", lambda p, m, s: min(m, p - s)),
    "zbh1": ("P - 1", lambda p: p - 1, "P", lambda p, m, s: p),
    "loopedbfs": ("3 (P - 1)", lambda p: 3 * (p - 1), "2 M", lambda p, m, s: 2 * m),
    "interleaved1f1b": (
        "3 (P - 1)",
        lambda p: 3 * (p - 1),
        "min(2 M, P + 2 (P - s - 1) + 1)",
        lambda p, m, s: min(2 * m, p + 2 * (p - s - 1) + 1),
    ),
    "interleavedzb": ("P - 1", lambda p: p - 1, "2 P", lambda p, m, s: 2 * p),
    "zbv": ("P - 1", lambda p: p - 1, "2 P", lambda p, m, s: 2 * p),
    "dualpipev": ("2 (P - 1)", lambda p: 2 * (p - 1), "2 P + 1", lambda p, m, s: 2 * p + 1),
}


def section(_: int) -> Section:
    """Simulate, and tell of it."""
    rows, aims = [], []
    for order, (bubble_told, _, peak_told, _) in FORMULAS.items():
        off, above, cells = [], [], []
        for ranks, micro_batches in SIZES:
            formula, ours, theirs = compared(order, ranks, micro_batches)
            cells.append(f"{ours:g} / {'-' if theirs is None else f'{theirs:g}'}")
            if not formula:
                off.append(ranks)
            if theirs is not None and ours > theirs:
                above.append(ranks)
        rows.append((order, bubble_told, peak_told, *cells))
        aims.append(
            Aim(
                f"simulated bubble and peak, {order}",
                "the formulas",
                f"off for P in {off}" if off else "equal",
                not off,
                "that",
            )
        )
        if order in TABLED:
            told = f"more for P in {above}" if above else "no more"
            aims.append(Aim(f"simulated bubble, {order}", "<= torch's table", told, not above, "that"))
    lines = [
        "Unit costs: F = I = W = 1, B = 2 per chunk, no latency; schedules with several chunks have 2. Columns: bubble of the "
        "slowest rank, ours / that of torch's own table in the same simulator, by P and M.",
        "",
        *table(
            ("schedule", "bubble", "peak on rank s", *(f"P = {ranks}, M = {batches}" for ranks, batches in SIZES)),
            rows,
            left=3,
        ),
    ]
    return Section("Predicted", tuple(lines), tuple(aims))


def compared(order: str, ranks: int, micro_batches: int) -> tuple[bool, float, float | None]:
    """Whether bubble and peaks are what the formulas say; our bubble; that of torch's table, if it has one."""
    simulated = simulate(build_order(order, ranks, micro_batches))
    _, bubble, _, peak = FORMULAS[order]
    ours = simulated.step_time - min(simulated.busy)
    peaks = tuple(peak(ranks, micro_batches, rank) for rank in range(ranks))
    as_told = ours == bubble(ranks) and all(have <= may for have, may in zip(simulated.peak_memory, peaks, strict=True))
    as_told = as_told and max(simulated.peak_memory) == max(peaks)
    if order not in TABLED:
        return as_told, ours, None
    table_of_torch = simulate(torch_schedule(order, ranks, micro_batches))
    return as_told, ours, table_of_torch.step_time - min(table_of_torch.busy)
