"""Lets the tests import the package `benchmarks`, as its scripts do: from the root of the workspace.

The launcher gives the ranks the import path of this process, so they find it, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))
