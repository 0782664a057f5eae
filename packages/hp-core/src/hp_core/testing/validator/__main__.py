"""`python -m hp_core.testing.validator`: the tool."""

from __future__ import annotations

import sys

from hp_core.testing.validator.main import main

if __name__ == "__main__":
    sys.exit(main())
