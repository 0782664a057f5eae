"""hp-fsdp on PyTorch."""
