"""The checks: the first steps again on one dense process, and the torch example's first losses with the same weights."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from lm.compare import Trace
from lm.config import RunConfig
from lm.parallel import dense
from lm.report import watched
from lm.text import Text

from hp_core.process_group import get_rank

from .trainer import Trainer

if TYPE_CHECKING:
    from hp_core import DeviceMesh

EXAMPLES = Path(__file__).resolve().parents[1]
LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RANK_ID", "MS_WORKER_NUM", "MS_ROLE")


def trace_run(config: RunConfig, text: Text, steps: int, mesh: DeviceMesh | None = None) -> Trace:
    """Runs the first steps of a run from its seed. All ranks of the mesh must call it; each gets the whole trace."""
    trainer = Trainer(config, text, mesh)
    names = {id(parameter): name for name, parameter in trainer.model.parameters_and_names()}
    _, local = trainer.compute_gradients(1)
    gradients = {
        names[id(parameter)]: _whole(gradient)
        for parameter, gradient in zip(trainer.optimizer.parameters, trainer.distributed(local), strict=True)
    }
    where = config.mesh_text if mesh is not None else "one process"
    numbers = watched(range(1, steps + 1), f"            {where}", shown=get_rank() == 0)
    losses = [trainer.train_step(step).loss for step in numbers]
    return Trace(losses, gradients, {name: _whole(parameter) for name, parameter in trainer.named_parameters()})


def torch_losses(config: RunConfig, steps: int) -> list[float]:
    """The first losses of the same run in one process of its own on PyTorch, which starts from the same weights.

    Raises:
        RuntimeError: It failed; the message is what it said.
    """
    environment = {name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES}
    environment["HYPER_PARALLEL_PLATFORM"] = "torch"
    environment["PYTHONPATH"] = os.pathsep.join([str(EXAMPLES), *filter(None, sys.path)])
    done = subprocess.run(
        [sys.executable, "-m", "lm.first_losses", str(steps)],
        input=dataclasses.replace(config, mesh=(), sequence_parallel=False).to_json(),
        env=environment,
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"the run on PyTorch failed:\n{done.stdout}{done.stderr}")
    losses: list[float] = json.loads(done.stdout)
    return losses


def _whole(tensor: Any) -> Any:
    values: Any = dense(tensor).asnumpy()
    return values.astype(np.float64)
