"""A little of what `nox -s fuzz` does, without the sanitizers: random calls of every kernel, right ones and wrong ones."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from hp_kernels.loading import require_native

RUN = Path(__file__).resolve().parents[1] / "fuzz" / "run.py"


def test_random_calls_do_their_work_or_are_refused() -> None:
    module = require_native().__file__
    command = [sys.executable, str(RUN), "--calls", "200", "--module", str(module)]
    # In a process of its own: a finding would end it.
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert result.returncode == 0, result.stderr
    for kernel in ("philox", "pack", "lse_merge", "permute"):
        counts = re.search(rf"^{kernel}: \{{(.*)\}} in", result.stdout, re.MULTILINE)
        assert counts is not None
        assert "'right'" in counts.group(1)
        assert "'refused'" in counts.group(1)
