"""hp-core beside bare torch, torch's DTensor and hand-written Megatron code: the table of the design of hp-core.

Each table has its own file; `sampling.py` is how all of them measure, `run.py` writes the page.
"""
