"""Saving and resuming by torch's distributed checkpoint, which takes our tensors through its documented protocol.

Each rank writes and reads its own shards, in one folder that all ranks must see. Tensors are stored by name and global
shape, so a run may resume on another mesh.
"""

from __future__ import annotations

import dataclasses
import json
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch.distributed.checkpoint.state_dict import StateDictOptions, get_state_dict, set_state_dict
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.state_dict_saver import save

from .config import ConfigError, RunConfig
from .trainer import Trainer

# Each parameter's optimizer state and settings under its own name: ranks of a pipeline have different parameters.
BY_NAME = StateDictOptions(flatten_optimizer_state_dict=True)
STEP_FOLDER = re.compile(r"step-(\d+)")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint on disk: the state after `step`."""

    step: int
    path: Path


def find_start(run_folder: Path, config: RunConfig, resume: bool) -> Checkpoint | None:
    """The checkpoint that a run starts from; None for a fresh start.

    Looks at the disk only, so every rank decides alike before it talks to another.

    Raises:
        ConfigError: To resume: there is no checkpoint, it is of another model, or of the last step or later. For a
            fresh start: there are checkpoints, which would mix with those of the new run.
    """
    latest = _latest(run_folder / "checkpoints")
    if not resume:
        if latest is not None:
            raise ConfigError(
                f"{run_folder} holds checkpoints up to step {latest.step}: add --resume to go on from there, "
                f"take another --name, or remove {run_folder / 'checkpoints'}"
            )
        return None
    if latest is None:
        raise ConfigError(
            f"--resume: no complete checkpoint in {run_folder / 'checkpoints'}; was this --name run with --save-every?"
        )
    if latest.step >= config.steps:
        raise ConfigError(f"--resume: {latest.path} already ends at --steps {config.steps}: raise --steps")
    saved = json.loads((run_folder / "config.json").read_text(encoding="utf-8"))["sizes"]
    wanted = dataclasses.asdict(config.sizes)
    if saved != wanted:
        different = ", ".join(
            f"{key} {saved.get(key)} not {value}" for key, value in wanted.items() if saved.get(key) != value
        )
        raise ConfigError(f"--resume: the run in {run_folder} has another model ({different}): give the same sizes")
    return latest


def save_checkpoint(run_folder: Path, trainer: Trainer, step: int) -> Checkpoint:
    """Writes the state after `step`. All ranks must call it."""
    path = run_folder / "checkpoints" / f"step-{step:06d}"
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=BY_NAME)
    with _quiet_in_one_process():
        save({"model": model, "optimizer": optimizer}, checkpoint_id=path)
    return Checkpoint(step, path)


def load_checkpoint(checkpoint: Checkpoint, trainer: Trainer) -> None:
    """Fills the trainer's model and optimizer. All ranks must call it."""
    model, optimizer = get_state_dict(trainer.model, trainer.optimizer, options=BY_NAME)
    state: dict[str, Any] = {"model": model, "optimizer": optimizer}
    with _quiet_in_one_process():
        load(state, checkpoint_id=checkpoint.path)
    set_state_dict(
        trainer.model,
        trainer.optimizer,
        model_state_dict=state["model"],
        optim_state_dict=state["optimizer"],
        options=BY_NAME,
    )


@contextmanager
def _quiet_in_one_process() -> Iterator[None]:
    """Without a process group the checkpoint warns that it works in one process, which is what a plain run wants."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled", UserWarning)
        yield


def _latest(folder: Path) -> Checkpoint | None:
    """The last complete checkpoint in a folder, if any."""
    # The metadata file is written last: a checkpoint that was cut short has none.
    complete = [
        Checkpoint(int(match.group(1)), path)
        for path in (folder.iterdir() if folder.is_dir() else ())
        if (match := STEP_FOLDER.fullmatch(path.name)) and (path / ".metadata").exists()
    ]
    return max(complete, key=lambda checkpoint: checkpoint.step, default=None)
