"""`python -m hyper_parallel.cli`: the command where the script isn't on the path."""

from __future__ import annotations

from hyper_parallel.cli import main

main(prog_name="hyper-parallel")
