"""What the tests of this folder need of a framework, in two small classes: arrays in and out, gradients, spellings of ops.

Everything else in these tests is the public API of hp_core, so what passes here means the same on both frameworks.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable
from typing import Any

import cloudpickle
import numpy as np

__all__ = ["INSTALLED", "MindSporeFramework", "TorchFramework"]

Array = np.ndarray[Any, Any]


class TorchFramework:
    """PyTorch."""

    name = "torch"

    @property
    def ops(self) -> Any:
        """Functions of tensors."""
        import torch

        return torch

    @property
    def functional(self) -> Any:
        """Functions that layers are made of."""
        return self.ops.nn.functional

    def dtype(self, name: str) -> Any:
        """The element type called so."""
        return getattr(self.ops, name)

    def tensor(self, array: Any) -> Any:
        """A new tensor of these values."""
        return self.ops.from_numpy(np.array(array))

    def array(self, tensor: Any) -> Array:
        """The values of a plain tensor."""
        values: Array = tensor.detach().numpy()
        return values

    def differentiate(self, function: Callable[..., Any], *arrays: Any) -> tuple[float, list[Array]]:
        """The value of a function that gives a number, and its gradient by each of its tensors."""
        tensors = [self.tensor(array).requires_grad_() for array in arrays]
        value = function(*tensors)
        value.backward()
        return value.item(), [self.array(tensor.grad) for tensor in tensors]

    def differentiate_module(self, function: Callable[[], Any], module: Any) -> tuple[float, list[Array]]:
        """The value of a function that calls the module, and its gradient by this rank's part of each parameter."""
        value = function()
        value.backward()
        gradients = [parameter.grad for parameter in module.parameters()]
        return value.item(), [self.array(getattr(gradient, "_local", gradient)) for gradient in gradients]

    def linear(self, weight: Array, bias: Array) -> Any:
        """A linear layer with these parameters."""
        layer = self.ops.nn.Linear(*reversed(weight.shape))
        layer.weight.data, layer.bias.data = self.tensor(weight), self.tensor(bias)
        return layer

    def sequential(self, *layers: Any) -> Any:
        """Layers one after the other."""
        return self.ops.nn.Sequential(*layers)

    def activation(self) -> Any:
        """A layer that applies relu."""
        return self.ops.nn.ReLU()

    def gelu(self, x: Any) -> Any:
        """GELU by its tanh approximation."""
        return self.functional.gelu(x, approximate="tanh")

    def log_softmax(self, x: Any, dim: int) -> Any:
        """Logarithm of softmax."""
        return self.functional.log_softmax(x, dim)

    def layer_norm(self, x: Any, weight: Any, bias: Any) -> Any:
        """Layer normalisation of the last dim."""
        return self.functional.layer_norm(x, (x.shape[-1],), weight, bias)

    def embedding(self, ids: Any, weight: Any) -> Any:
        """Rows of a table."""
        return self.functional.embedding(ids, weight)


class MindSporeFramework:
    """MindSpore; on a CPU some ops of `mint` have no kernel, and another spelling is used. Methods are those of the other."""

    name = "mindspore"

    @property
    def ops(self) -> Any:
        from mindspore import mint

        return mint

    @property
    def functional(self) -> Any:
        return self.ops.nn.functional

    def dtype(self, name: str) -> Any:
        import mindspore

        return getattr(mindspore, name)

    def tensor(self, array: Any) -> Any:
        import mindspore

        return mindspore.Tensor.from_numpy(np.array(array))

    def array(self, tensor: Any) -> Array:
        values: Array = tensor.asnumpy()
        return values

    def differentiate(self, function: Callable[..., Any], *arrays: Any) -> tuple[float, list[Array]]:
        import mindspore

        places = tuple(range(len(arrays)))
        value, gradients = mindspore.value_and_grad(function, places)(*map(self.tensor, arrays))
        gradients = gradients if isinstance(gradients, tuple) else (gradients,)
        return value.item(), [self.array(gradient) for gradient in gradients]

    def differentiate_module(self, function: Callable[[], Any], module: Any) -> tuple[float, list[Array]]:
        import mindspore

        value, gradients = mindspore.value_and_grad(function, None, weights=module.trainable_params())()
        return value.item(), [self.array(gradient) for gradient in gradients]

    def linear(self, weight: Array, bias: Array) -> Any:
        layer = self.ops.nn.Linear(*reversed(weight.shape))
        layer.weight.set_data(self.tensor(weight))
        layer.bias.set_data(self.tensor(bias))
        return layer

    def sequential(self, *layers: Any) -> Any:
        from mindspore import nn

        return nn.SequentialCell(*layers)

    def activation(self) -> Any:
        return self.ops.nn.ReLU()

    def gelu(self, x: Any) -> Any:
        from mindspore import ops

        return ops.gelu(x)

    def log_softmax(self, x: Any, dim: int) -> Any:
        from mindspore import ops

        return ops.log_softmax(x, dim)

    def layer_norm(self, x: Any, weight: Any, bias: Any) -> Any:
        from mindspore import ops

        return ops.LayerNorm(begin_norm_axis=-1, begin_params_axis=-1, epsilon=1e-5)(x, weight, bias)[0]

    def embedding(self, ids: Any, weight: Any) -> Any:
        from mindspore import ops

        return ops.gather(weight, ids, 0)


INSTALLED = [
    framework()
    for framework in (TorchFramework, MindSporeFramework)
    if importlib.util.find_spec(framework.name) is not None
]

# Ranks can't import this folder: whatever of it a test names is sent to them whole.
cloudpickle.register_pickle_by_value(sys.modules[__name__])
