"""The native kernels beside their twins and beside plain copies; `run.py` is the command."""
