"""hp-fsdp measured beside torch's FSDP2."""
