"""Lets the tests import the example's parts as its script does: from the folder `examples`.

The launcher gives the ranks the import path of this process, so they find the parts, too.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))
