"""hp-pipeline measured beside torch.distributed.pipelining."""
