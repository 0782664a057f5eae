"""The loss curve of a run as a picture: training loss, validation loss and the unigram entropy it must fall below."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

SMOOTHED_SHARE = 0.04
TRAINING, VALIDATION, ENTROPY = "#2a6f97", "#d1495b", "#555555"


def draw_loss_curve(path: Path, metrics: Sequence[dict[str, float]], unigram_entropy: float, title: str) -> None:
    """Draws the lines of a `metrics.jsonl` to a PNG.

    Args:
        path: The picture.
        metrics: One dictionary a line: `step` with `loss` or `validation_loss`.
        unigram_entropy: Drawn as a dashed line, in nats per byte.
        title: Shown above.
    """
    training = [(line["step"], line["loss"]) for line in metrics if "loss" in line]
    validation = [(line["step"], line["validation_loss"]) for line in metrics if "validation_loss" in line]
    # A figure with its own canvas: pyplot would choose a window system and keep the figure in a global list.
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    entropy_label = f"unigram entropy {unigram_entropy:.2f}"
    axes.axhline(unigram_entropy, linestyle="--", color=ENTROPY, linewidth=1, label=entropy_label)
    if training:
        steps, losses = zip(*training, strict=True)
        axes.plot(steps, losses, color=TRAINING, alpha=0.35, linewidth=1)
        axes.plot(steps, _smooth(losses), color=TRAINING, linewidth=1.8, label=f"training, last {losses[-1]:.2f}")
    if validation:
        steps, losses = zip(*validation, strict=True)
        validation_label = f"validation, last {losses[-1]:.2f}"
        axes.plot(steps, losses, color=VALIDATION, marker="o", markersize=4, linewidth=1, label=validation_label)
    axes.set(xlabel="step", ylabel="loss, nats per byte", title=title)
    axes.set_xlim(left=0)
    axes.set_ylim(bottom=0)
    axes.spines[["top", "right"]].set_visible(False)
    axes.grid(alpha=0.25)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=140)


def _smooth(losses: Sequence[float]) -> list[float]:
    """Mean over a window centred on each step, so that it does not lag; narrow at the steep start."""
    widest = max(1, int(len(losses) * SMOOTHED_SHARE))
    smoothed = []
    for index in range(len(losses)):
        reach = min(widest, index)
        window = losses[index - reach : index + reach + 1]
        smoothed.append(sum(window) / len(window))
    return smoothed
