"""`python -m hyper_parallel.doctor`: the doctor without click, with nothing but the standard library."""

from __future__ import annotations

import sys

from hyper_parallel.doctor.command import main

sys.exit(main())
