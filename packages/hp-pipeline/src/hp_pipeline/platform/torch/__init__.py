"""hp-pipeline on PyTorch."""
