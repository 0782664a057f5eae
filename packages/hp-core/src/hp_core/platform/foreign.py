"""The refusal of what isn't the process' own framework's: a tensor or a module of the other one, or no such thing at all."""

from __future__ import annotations

from typing import NoReturn

from hp_core.errors import PlatformError
from hp_core.platform.select import FRAMEWORKS, VARIABLE

__all__ = ["is_foreign", "refuse_foreign"]

_TITLES = {"torch": "PyTorch", "mindspore": "MindSpore"}


def is_foreign(value: object, own: str) -> bool:
    """Whether a value is a tensor of another framework than the one called `own`."""
    owner = type(value).__module__.partition(".")[0]
    return owner != own and owner in FRAMEWORKS and hasattr(value, "shape")


def refuse_foreign(value: object, wanted: str) -> NoReturn:
    """Refuse a value that is not of the type wanted.

    Args:
        value: what was given.
        wanted: the type that it should be of, with its framework: "torch.Tensor".

    Raises:
        PlatformError: always; it says which framework this process works with, and how to choose the other.
    """
    own = wanted.partition(".")[0]
    owners = [base.__module__.partition(".")[0] for base in type(value).__mro__]
    kind = f"{owners[0]}.{type(value).__qualname__}"
    other = next((name for name in FRAMEWORKS if name != own and name in owners), None)
    if other is None:
        raise PlatformError(f"a {kind} was given where a {wanted} is needed.")
    raise PlatformError(
        f"a {kind} was given, but this process works with {_TITLES[own]}: give a {wanted}; or, to work with {_TITLES[other]}, "
        f"set {VARIABLE}={other} before the first use of hp_core."
    )
