"""Several optimizers as one: schedulers, checkpoints and training loops see an ordinary `torch.optim.Optimizer`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hp_core.errors import PlanError

__all__ = ["ChainedOptimizer"]


class ChainedOptimizer(torch.optim.Optimizer):
    """Optimizers that step one after another.

    The param groups are theirs, in order: what a scheduler writes to a group reaches the optimizer that owns it. The state
    dict has torch's form, parameters numbered through, so torch.distributed.checkpoint treats it as any other. Hooks of this
    one run around all steps; the optimizers keep their own.

    Args:
        *optimizers: at least one; no parameter in two of them.

    Raises:
        PlanError: none was given, something else was, or a parameter is in two of them.
    """

    def __init__(self, *optimizers: torch.optim.Optimizer) -> None:
        if not optimizers:
            raise PlanError("ChainedOptimizer() needs at least one optimizer.")
        for place, optimizer in enumerate(optimizers):
            if not isinstance(optimizer, torch.optim.Optimizer):
                raise PlanError(
                    f"ChainedOptimizer takes optimizers, but argument {place} is a {type(optimizer).__name__}; give them one by "
                    f"one: ChainedOptimizer(muon, adamw)."
                )
        _refuse_shared(optimizers)
        # Only what all have is a default of the whole: a scheduler asks here whether groups have "betas" or "momentum".
        shared = set.intersection(*(set(optimizer.defaults) for optimizer in optimizers))
        defaults = {name: value for name, value in optimizers[0].defaults.items() if name in shared}
        self.__setstate__({"optimizers": tuple(optimizers), "defaults": defaults})

    optimizers: tuple[torch.optim.Optimizer, ...]

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The groups of all optimizers, in order; the very dicts that they use."""
        return [group for optimizer in self.optimizers for group in optimizer.param_groups]

    @property
    def state(self) -> dict[Any, Any]:  # type: ignore[override]
        """The states of all parameters; the very dicts that the optimizers use."""
        return {param: table for optimizer in self.optimizers for param, table in optimizer.state.items()}

    def __getstate__(self) -> dict[str, Any]:
        return {"optimizers": self.optimizers, "defaults": self.defaults}

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Let each optimizer step.

        Args:
            closure: computes the loss and gradients anew, once, before the first; its result is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for optimizer in self.optimizers:
            optimizer.step()
        return loss

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Reset the gradients of all parameters."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: it must be said which optimizer is to have the parameters.

        Raises:
            PlanError: always.
        """
        names = ", ".join(
            f"optimizers[{place}] is {type(optimizer).__name__}" for place, optimizer in enumerate(self.optimizers)
        )
        raise PlanError(
            f"a ChainedOptimizer can't know which optimizer is to have new parameters; call add_param_group() of one: {names}."
        )

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take what `state_dict()` gave.

        Raises:
            PlanError: it has another number of param groups.
        """
        state_dict = state_dict.copy()
        for before in self._optimizer_load_state_dict_pre_hooks.values():
            state_dict = before(self, state_dict) or state_dict
        groups, states = state_dict["param_groups"], state_dict["state"]
        if len(groups) != len(self.param_groups):
            raise PlanError(
                f"the state dict has {len(groups)} param groups, these optimizers {len(self.param_groups)}; load one that was "
                f"saved from the same optimizers."
            )
        first = 0
        for optimizer in self.optimizers:
            own = groups[first : first + len(optimizer.param_groups)]
            first += len(own)
            numbers = {number for group in own for number in group["params"]}
            kept = {number: table for number, table in states.items() if number in numbers}
            optimizer.load_state_dict({"state": kept, "param_groups": own})
        for after in self._optimizer_load_state_dict_post_hooks.values():
            after(self)


def _refuse_shared(optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Raise if a parameter is in two optimizers."""
    owner: dict[int, int] = {}
    for place, optimizer in enumerate(optimizers):
        for param in (param for group in optimizer.param_groups for param in group["params"]):
            other = owner.setdefault(id(param), place)
            if other != place:
                names = [f"{number} ({type(optimizers[number]).__name__})" for number in (other, place)]
                raise PlanError(
                    f"a parameter of shape {tuple(param.shape)} is in optimizers {names[0]} and {names[1]} of a ChainedOptimizer; "
                    f"it would be updated twice. Give it to one."
                )
