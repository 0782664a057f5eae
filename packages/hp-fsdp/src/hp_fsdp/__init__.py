"""hp-fsdp: fully sharded and hybrid sharded data parallelism on flat, copy-free units; optimizers; gradient clipping.

Every public name is here, and is loaded when it is first used: `import hp_fsdp` loads no framework.
`__init__.pyi` lists the same names for type checkers; `python build/stubs.py` writes it from `EXPORTS`.
"""

from __future__ import annotations

from hp_core.lazy_exports import lazy_exports

# Public name -> module that defines it.
EXPORTS = {
    "CPUOffloadPolicy": "policy",
    "HSDPModule": "hsdp_module",
    "MixedPrecisionPolicy": "policy",
    "OffloadPolicy": "policy",
    "clip_grad_norm_": "clip",
    "fully_shard": "sharding",
    "get_hyper_optimizer": "optim.hyper",
    "hsdp_sync_stream": "root",
    "total_grad_norm": "clip",
}

__getattr__, __dir__, __all__ = lazy_exports(__name__, "hp-fsdp", EXPORTS)
