"""AdamW on flat storage: as many tensors as there are gapless runs of parameters, instead of one per parameter.

The arithmetic is torch's own kernel. Arguments, param groups, state names and state dicts are `torch.optim.AdamW`'s.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.optim.adamw import adamw

from hp_core.errors import PlanError
from hp_fsdp.platform.torch.optim.loading import fitted
from hp_fsdp.platform.torch.optim.runs import FlatGroup

__all__ = ["AdamW"]

_FUSED_DEVICES = frozenset({"cpu", "cuda"})
_FUSED_DTYPES = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16})


class AdamW(torch.optim.AdamW):
    """`torch.optim.AdamW` that updates parameters which are neighbours in memory as one tensor.

    Sharded parameters of a unit lie in one chunk, their gradients in another: all of them are then one tensor to the kernel.
    The states of neighbours are neighbours too, and they share the tensor that counts their steps. A parameter without a
    gradient, one of another param group and a gap end a run; parameters that lie alone are updated alone.

    A state dict of `torch.optim.AdamW` loads, and the other way round; one of whole tensors loads into sharded parameters.

    Args:
        params: parameters or param groups, as for torch; plain tensors and DTensors of any meshes.
        lr: learning rate, a number or a tensor.
        betas: decay of the running averages of the gradient and its square.
        eps: added to the denominator.
        weight_decay: decoupled weight decay.
        amsgrad: keep the maximum of the second average.
        maximize: ascend instead of descend.
        foreach: torch's kernel for lists of tensors.
        capturable: as for torch.
        differentiable: only False.
        fused: torch's kernel that is one pass over memory. With neither asked for, it is used where torch has it.

    Raises:
        PlanError: `differentiable` is set.
    """

    def __init__(
        self,
        params: Any,
        lr: float | torch.Tensor = 1e-3,
        betas: tuple[float | torch.Tensor, float | torch.Tensor] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        amsgrad: bool = False,
        *,
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
        fused: bool | None = None,
    ) -> None:
        if differentiable:
            raise PlanError(
                "hp_fsdp.optim.AdamW writes to flat storage, which autograd can't follow; leave differentiable=False, or use "
                "torch.optim.AdamW on plain tensors."
            )
        self._groups: dict[int, FlatGroup] = {}
        super().__init__(
            params,
            lr,
            betas,
            eps,
            weight_decay,
            amsgrad,
            maximize=maximize,
            foreach=foreach,
            capturable=capturable,
            fused=fused,
        )

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)  # type: ignore[no-untyped-call]
        self._groups = {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Take a state dict of this class or of torch's, of sharded or of whole tensors.

        Raises:
            LayoutError: a state has another shape than its parameter.
        """
        super().load_state_dict(fitted(state_dict, self.param_groups))

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update all parameters that have gradients.

        Args:
            closure: computes the loss and gradients anew; its result is returned.

        Raises:
            PlanError: a gradient is sparse.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for number, group in enumerate(self.param_groups):
            self._step_group(group, self._flat_group(number, group))
        return loss

    def _flat_group(self, number: int, group: dict[str, Any]) -> FlatGroup:
        keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if group["amsgrad"] else ())]
        known = self._groups.get(number)
        if known is None or known.keys != tuple(keys) or list(map(id, known.params)) != list(map(id, group["params"])):
            known = self._groups[number] = FlatGroup(group["params"], keys, counted=True)
        return known

    def _step_group(self, group: dict[str, Any], flat: FlatGroup) -> None:
        free = group["fused"] is None and group["foreach"] is None and not group["capturable"]
        fused = group["fused"] or (free and _has_fused(flat))
        grads = flat.gradients(self.state, counts_on_device=bool(fused or group["capturable"]))
        runs = flat.runs
        if not runs:
            flat.finish()
            return
        beta1, beta2 = group["betas"]
        adamw(
            [run.flat for run in runs],
            grads,
            [run.states["exp_avg"] for run in runs],
            [run.states["exp_avg_sq"] for run in runs],
            [run.states["max_exp_avg_sq"] for run in runs] if group["amsgrad"] else [],
            [run.step for run in runs],  # type: ignore[misc]
            foreach=False if fused else group["foreach"],
            fused=bool(fused),
            capturable=group["capturable"],
            grad_scale=getattr(self, "grad_scale", None),
            found_inf=getattr(self, "found_inf", None),
            has_complex=any(run.flat.is_complex() for run in runs),
            amsgrad=group["amsgrad"],
            beta1=beta1,
            beta2=beta2,
            lr=group["lr"],
            weight_decay=group["weight_decay"],
            eps=group["eps"],
            maximize=group["maximize"],
        )
        flat.finish()


def _has_fused(flat: FlatGroup) -> bool:
    """Whether torch's one-pass kernel takes these parameters."""
    return all(device in _FUSED_DEVICES and dtype in _FUSED_DTYPES for device, dtype in flat.kinds)
