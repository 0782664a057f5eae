"""`torch.autograd.backward` and `torch.autograd.grad` on DTensors: the same on their local tensors."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hp_core.errors import LayoutError, ShardingRuleError
from hp_core.platform.torch.wrapper import new_dtensor

__all__ = ["autograd_backward", "autograd_grad", "settled"]


def autograd_backward(
    tensors: Sequence[Any],
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """`torch.autograd.backward` on DTensors: the same on their local tensors."""
    tensors = settled((tensors,) if isinstance(tensors, torch.Tensor) else tuple(tensors))
    given = grad_tensors if grad_tensors is not None else grad_variables
    gradients = (given,) * len(tensors) if given is None or isinstance(given, torch.Tensor) else tuple(given)
    if inputs is not None:
        inputs = [_graph_input(tensor) for tensor in ((inputs,) if isinstance(inputs, torch.Tensor) else inputs)]
    torch.autograd.backward(
        [getattr(tensor, "_local", tensor) for tensor in tensors],
        [_root_gradient(tensor, gradient) for tensor, gradient in zip(tensors, gradients, strict=True)],
        retain_graph,
        create_graph,
        inputs=inputs,
    )


def autograd_grad(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> tuple[Any, ...]:
    """`torch.autograd.grad` on DTensors: the same on their local tensors, the results laid out by the law."""
    outputs = settled((outputs,) if isinstance(outputs, torch.Tensor) else tuple(outputs))
    inputs = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    given = (
        (grad_outputs,) * len(outputs)
        if grad_outputs is None or isinstance(grad_outputs, torch.Tensor)
        else grad_outputs
    )
    results = torch.autograd.grad(
        [getattr(tensor, "_local", tensor) for tensor in outputs],
        [_graph_input(tensor) for tensor in inputs],
        [_root_gradient(tensor, gradient) for tensor, gradient in zip(outputs, given, strict=True)],
        *args,
        **kwargs,
    )
    return tuple(
        new_dtensor(type(tensor), result, tensor._spec.gradient)
        if result is not None and _is_distributed(tensor)
        else result
        for tensor, result in zip(inputs, results, strict=True)
    )


def settled(roots: tuple[Any, ...]) -> tuple[Any, ...]:
    """Roots whose pending reductions are sums only, to which every rank's addend has the dense gradient.

    Of a pending maximum the gradient belongs to the ranks that hold it, of an average each rank has its share: those
    reductions are done first, since that is where gradients are dealt out.
    """
    for root in roots:
        if _is_distributed(root) and root._spec.layout.partials and root._spec.layout.partials[0][1] != "sum":
            break
    else:
        return roots
    with torch.enable_grad():
        return tuple(
            root.reduce_partial()
            if _is_distributed(root) and any(reduce_op != "sum" for _, reduce_op in root._spec.layout.partials)
            else root
            for root in roots
        )


def _root_gradient(tensor: Any, gradient: Any) -> torch.Tensor | None:
    """The gradient to start from, on the local tensor; a lone element starts from one, whatever its layout.

    On a rank outside of the mesh there is nothing to give: its backward takes part in the way back to another mesh.
    """
    if not _is_distributed(tensor):
        return gradient  # type: ignore[no-any-return]
    if gradient is None:
        if tensor.numel() != 1 and tensor.device_mesh.get_coordinate() is not None:
            raise RuntimeError(
                f"grad can be implicitly created only for scalar outputs, not for a DTensor of shape {tuple(tensor.shape)}."
            )
        return torch.ones_like(tensor._local)
    if not _is_distributed(gradient):
        if gradient.numel() == 1 and tensor.numel() == 1:
            return gradient.expand(tensor._local.shape)  # type: ignore[no-any-return]
        raise LayoutError(
            f"the gradient of a DTensor must be a DTensor, got {type(gradient).__name__}; distribute_tensor() it."
        )
    return gradient.redistribute(tensor._spec.gradient.layout)._local  # type: ignore[no-any-return]


def _graph_input(tensor: Any) -> torch.Tensor:
    if _is_distributed(tensor):
        if tensor._has_tied_use():
            raise ShardingRuleError(
                "the gradient of this gathered DTensor was tied to its sharded source when it was used, so it can't be asked "
                "for afterwards; call .retain_grad() right after redistribute(), or ask for the source's gradient."
            )
        return tensor._local  # type: ignore[no-any-return]
    return tensor  # type: ignore[no-any-return]


def _is_distributed(value: Any) -> bool:
    return hasattr(value, "_has_tied_use")  # ours; torch's own DTensor has a `_spec`, too
