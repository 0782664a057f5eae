"""Joining the world on CPU: from msrun's variables, over torch's gloo, with clear refusals."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from hp_core.errors import ProcessGroupError
from hp_core.platform.mindspore import processes
from hp_core.process_group import init_process_group

_SCRIPT = """
import numpy as np
from mindspore import Tensor
from hp_core import DTensor, Partial, destroy_process_group, init_device_mesh, init_process_group
init_process_group()
mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
part = Tensor(np.full(2, 1.0 + mesh.get_local_rank("tp"), np.float32))
print("SUM", DTensor.from_local(part, mesh, [Partial()]).full_tensor().tolist(), flush=True)
destroy_process_group()
"""


def test_msrun_launches_ranks_and_its_scheduler_is_none(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(_SCRIPT)
    launcher = Path(sys.executable).parent / "msrun"
    port = 20000 + os.getpid() % 20000
    environment = dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path), PATH=f"{launcher.parent}:{os.environ['PATH']}")
    command = [str(launcher), "--worker_num=2", "--local_worker_num=2", f"--master_port={port}", "--join=True"]
    done = subprocess.run(
        [*command, f"--log_dir={tmp_path}", str(script)],
        env=environment, capture_output=True, text=True, timeout=150, check=False, cwd=tmp_path,
    )  # fmt: skip
    assert not done.returncode, done.stdout + done.stderr
    said = {path.name: path.read_text().count("SUM [3.0, 3.0]") for path in tmp_path.glob("*.log")}
    assert said == {"scheduler.log": 0, "worker_0.log": 1, "worker_1.log": 1}


def test_a_backend_that_cant_work_is_refused() -> None:
    with pytest.raises(ProcessGroupError, match="travel over gloo"):
        init_process_group("hccl")


def test_without_torch_only_a_single_process_works(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ProcessGroupError, match="pip install 'torch"):
        init_process_group()


def test_launchers_that_contradict_arguments_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK_ID", "0")
    monkeypatch.setenv("MS_WORKER_NUM", "2")
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    with pytest.raises(ProcessGroupError, match="world_size=3 contradicts"):
        init_process_group(world_size=3, rank=0, init_method="tcp://127.0.0.1:1")
