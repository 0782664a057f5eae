"""What a person sees of a run: a progress bar (plain lines where there is no terminal) and the files in `runs/<name>/`.

Only rank 0 reports. `metrics.jsonl` gets a line per step as it happens, so that a run can be watched and an interrupted
one keeps what it had; the loss curve is drawn from that file at the end, over all parts of a resumed run.
"""

from __future__ import annotations

import dataclasses
import json
import resource
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import IO

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    SpinnerColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    track,
)

from .config import RunConfig
from .curve import draw_loss_curve
from .step import StepResult
from .text import Text

LINE_EVERY = 10
SPEED_WINDOW = 20


def watched(steps: range, what: str, shown: bool = True) -> Iterable[int]:
    """The steps, with a bar on a terminal while they run that is gone afterwards.

    Args:
        steps: Their numbers.
        what: Runs them.
        shown: False on ranks that don't report.
    """
    console = Console()
    return track(steps, what, console=console, transient=True, disable=not (shown and console.is_terminal))


def peak_resident_bytes() -> int:
    """Highest resident memory of this process so far."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


@dataclass(frozen=True)
class Machinery:
    """What a report says of the framework that runs the steps.

    Attributes:
        versions: Of the framework, by name.
        peak_memory_bytes: Highest memory of this process so far: resident memory on `cpu`, allocated device memory elsewhere.
    """

    versions: Mapping[str, str]
    peak_memory_bytes: Callable[[], int] = peak_resident_bytes


class Report:
    """Writes and shows one run; a context manager around its steps.

    Args:
        folder: Where the files go.
        config: The run.
        text: What it learns from.
        parameters: Size of the model.
        machinery: What runs it.
        done: Steps already done by the run that this one resumes; later lines of its metrics are dropped.
        console: Where to show it.
    """

    def __init__(
        self,
        folder: Path,
        config: RunConfig,
        text: Text,
        parameters: int,
        machinery: Machinery,
        done: int = 0,
        console: Console | None = None,
    ) -> None:
        self.folder, self.config, self.done = folder, config, done
        self._peak_memory_bytes = machinery.peak_memory_bytes
        self.console = console or Console(highlight=False)
        self.entropy = text.unigram_entropy()
        self.metrics_path, self.curve_path = folder / "metrics.jsonl", folder / "loss.png"
        self._times: deque[float] = deque(maxlen=SPEED_WINDOW + 1)
        self._result: StepResult | None = None
        self._validation: float | None = None
        folder.mkdir(parents=True, exist_ok=True)
        _write_config(folder / "config.json", config, text, self.entropy, parameters, machinery.versions)
        kept = [line for line in read_metrics(self.metrics_path) if int(line["step"]) <= done]
        self.metrics_path.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
        self._say(
            f"text        {text.files} files of the standard library: {len(text.train):,} bytes to train on, "
            f"{len(text.validation):,} to validate on"
        )
        self._say(f"            unigram entropy {self.entropy:.3f} nats per byte: what byte frequencies alone give")
        self._say(
            f"model       {parameters:,} parameters in {config.dtype}, "
            f"{config.sizes.layers} layers of width {config.sizes.d_model}"
        )
        sequence_parallel = ", sequence parallel" if config.sequence_parallel else ""
        self._say(
            f"mesh        {config.mesh_text}{sequence_parallel}; each step {config.batch} x {config.sizes.sequence} "
            f"= {config.batch * config.sizes.sequence:,} bytes"
        )
        if done:
            self._say(f"resumed     after step {done}")

    def __enter__(self) -> Report:
        self._metrics: IO[str] = self.metrics_path.open("a", encoding="utf-8", buffering=1)
        self._progress: Progress | None = None
        self._times.append(time.perf_counter())
        if self.console.is_terminal:
            self._progress = Progress(
                SpinnerColumn(),
                MofNCompleteColumn(),
                BarColumn(bar_width=None),
                TextColumn("{task.fields[status]}"),
                TimeRemainingColumn(compact=True),
                console=self.console,
            )
            self._task: TaskID = self._progress.add_task(
                "train", total=self.config.steps, completed=self.done, status="planning the first step"
            )
            self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._progress is not None:
            self._progress.stop()
        self._metrics.close()
        lines = read_metrics(self.metrics_path)
        if lines:
            draw_loss_curve(self.curve_path, lines, self.entropy, f"{self.folder.name}: {self.config.mesh_text}")
        if kind is None:
            self._summarise()

    def step(self, step: int, result: StepResult) -> None:
        """Records a step that has just ended."""
        self._times.append(time.perf_counter())
        self._result = result
        speed, memory = self._tokens_per_second(), self._peak_memory_bytes()
        self._write(
            step=step,
            loss=result.loss,
            lr=result.lr,
            gradient_norm=result.gradient_norm,
            tokens_per_second=round(speed, 1),
            memory_bytes=memory,
        )
        status = f"loss {result.loss:.3f}  {speed:,.0f} tokens/s  {memory / 2**20:,.0f} MiB"
        if self._progress is not None:
            self._progress.update(self._task, completed=step, status=status)
        elif step % LINE_EVERY == 0 or step in (self.done + 1, self.config.steps):
            self._say(f"step {step:>5}/{self.config.steps}  {status}")

    def validation(self, step: int, loss: float) -> None:
        """Records a validation after `step`; its time does not count as training."""
        self._validation = loss
        self._write(step=step, validation_loss=loss)
        side = "below" if loss < self.entropy else "above"
        distance = f"{abs(self.entropy - loss):.3f} {side} the unigram entropy"
        self._say(f"step {step:>5}/{self.config.steps}  validation {loss:.3f}, {distance}")
        self._times.clear()
        self._times.append(time.perf_counter())

    def _say(self, line: str) -> None:
        self.console.print(line, soft_wrap=True)

    def _write(self, **values: float | int | None) -> None:
        self._metrics.write(json.dumps(values) + "\n")

    def _tokens_per_second(self) -> float:
        seconds = self._times[-1] - self._times[0]
        return (len(self._times) - 1) * self.config.batch * self.config.sizes.sequence / max(seconds, 1e-9)

    def _summarise(self) -> None:
        if self._result is not None:
            self._say(f"loss        {self._result.loss:.3f} nats per byte")
        if self._validation is not None:
            self._say(f"validation  {self._validation:.3f} nats per byte, unigram entropy {self.entropy:.3f}")
        self._say(f"memory      {self._peak_memory_bytes() / 2**20:,.0f} MiB at most, on rank 0")
        self._say(f"written     {self.folder}/: config.json, metrics.jsonl, loss.png")


class SilentReport:
    """The report of every rank but the first: the same calls, nothing shown or written."""

    def __enter__(self) -> SilentReport:
        return self

    def __exit__(self, *_: object) -> None:
        return None

    def step(self, step: int, result: StepResult) -> None:
        """Ignores a step."""

    def validation(self, step: int, loss: float) -> None:
        """Ignores a validation."""


def read_metrics(path: Path) -> list[dict[str, float]]:
    """The lines of a `metrics.jsonl`; none if there is no such file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def _write_config(
    path: Path, config: RunConfig, text: Text, entropy: float, parameters: int, versions: Mapping[str, str]
) -> None:
    """Writes the run's configuration with what it depends on outside of the flags."""
    values = dataclasses.asdict(config) | {
        "mesh": dict(config.mesh),
        "parameters": parameters,
        "text": {"files": text.files, "bytes": len(text.train) + len(text.validation), "digest": text.digest},
        "unigram_entropy": entropy,
        **versions,
        "python": sys.version.split()[0],
    }
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
