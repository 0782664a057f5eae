"""Draw the pictures of docs/guide/pipeline-schedules.md: every built-in schedule, simulated. Run it after a change of an order.

Usage: python build/schedule_pictures.py (with hp-core, hp-pipeline and matplotlib installed).
"""

from __future__ import annotations

from pathlib import Path

from hp_pipeline import ORDERS, Costs, build_order, plot, simulate

FOLDER = Path(__file__).resolve().parent.parent / "docs" / "pictures"
RANKS, MICRO_BATCHES = 4, 8


def main() -> None:
    """One picture per schedule. The model is the same in all: with two chunks per rank each takes half the time and memory."""
    FOLDER.mkdir(exist_ok=True)
    for name in ORDERS:
        schedule = build_order(name, RANKS, MICRO_BATCHES)
        part = RANKS / schedule.stages
        costs = Costs(forward=part, input_gradient=part, weight_gradient=part, activation=part)
        plot(simulate(schedule, costs), path=FOLDER / f"schedule-{name}.png", width=9, dpi=85)


if __name__ == "__main__":
    main()
