"""`python -m hp_core.rules.validate [op ...]`: check rules against dense ops; see `--help`.

Only the door: the tool starts ranks, so it stands on the floor of `hp_core.testing.validator`, which this one can't import.
"""

from __future__ import annotations

import runpy

if __name__ == "__main__":
    runpy.run_module("hp_core.testing.validator", run_name="__main__", alter_sys=True)
