"""hp-kernels: native kernels that link no framework, each with a portable twin that gives the same result.

Every public name is here, and is loaded when it is first used: `import hp_kernels` loads neither a framework nor `_native`.
`__init__.pyi` lists the same names for type checkers; `python build/stubs.py` writes it from `EXPORTS`.
"""

from __future__ import annotations

from importlib import import_module

# Public name -> module that defines it.
EXPORTS = {
    "KernelArgumentError": "errors",
    "Permuted": "permute",
    "build_info": "built",
    "cast_into": "packing",
    "fill_random": "philox",
    "lse_merge": "lse_merging",
    "lse_merge_": "lse_merging",
    "moe_permute": "permute",
    "moe_unpermute": "permute",
    "native": "loading",
    "pack": "packing",
    "pack_into": "packing",
    "unpack": "packing",
    "unpack_into": "packing",
    "why_not_native": "loading",
}

__all__ = sorted(EXPORTS)


def __getattr__(name: str) -> object:
    if name == "__version__":
        # importlib.metadata takes longer to import than the whole package, so only who asks for the version pays.
        from importlib.metadata import version

        value: object = version("hp-kernels")
    elif name in EXPORTS:
        value = getattr(import_module(f"{__name__}.{EXPORTS[name]}"), name)
    else:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *EXPORTS, "__version__"})
