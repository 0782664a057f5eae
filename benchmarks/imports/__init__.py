"""Import times of the packages; see `run.py`, whose table is also part of the page of `benchmarks/core`."""
