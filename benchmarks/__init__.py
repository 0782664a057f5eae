"""Side-by-side measurements against peers; every folder with a `run.py` is one benchmark with dated result pages.

A regular package, so that the launcher's processes find its functions by name.
"""
