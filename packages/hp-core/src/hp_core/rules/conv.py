"""Convolution, pooling, padding and resampling: [batch, channels, spatial...], where the spatial dims are whole.

Batch and channels may be cut: an output channel needs one row of the weight, an input channel leaves a pending sum, and
grouped channels are cut along whole groups. Where a rank has no sample or channel at all, a local op gives its nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

from hp_core.errors import ShardingRuleError
from hp_core.rules.registry import rule
from hp_core.rules.rule import ADDEND, FACTOR, PLAIN, OpCall, Operand, Output, Strategy, solve
from hp_core.rules.spec import TensorSpec

__all__: list[str] = []

_POOL = "input kernel_size stride padding"

_SIZES_OF = "stride padding output_padding dilation"


@rule("conv1d conv2d conv3d", "input weight bias stride padding dilation groups")
@rule(
    "conv_transpose1d conv_transpose2d conv_transpose3d",
    "input weight bias stride padding output_padding groups dilation",
)
def _convolution(call: OpCall) -> Strategy:
    """Weight [out, in / groups, ...]; transposed [in, out / groups, ...]."""
    x, weight = call.spec("input"), call.spec("weight")
    space = weight.ndim - 2
    groups = call.get("groups", 1)
    transposed = "transpose" in call.name
    batch: tuple[Any, ...] = ("batch",) if x.ndim == weight.ndim else ()
    into, out = ("in", "out") if groups == 1 else ("group", "group")
    if groups == 1:
        kernel: tuple[Any, ...] = (into, out) if transposed else (out, into)
    else:
        kernel = ("group", None)
    channels = weight.shape[1] * groups if transposed else weight.shape[0]
    whole = (None,) * space
    operands = [Operand(x, (*batch, into, *whole), FACTOR), Operand(weight, (*kernel, *whole), FACTOR)]
    if isinstance(call.get("bias"), TensorSpec):
        operands.append(Operand(call.spec("bias"), (out,), ADDEND))

    strategy = solve(
        operands,
        [Output((*batch, out, *whole))],
        reduced={"in": "sum"} if groups == 1 else {},
        aligned=_even(x, {"group": groups}),
        unequal=frozenset({"group"} if groups > 1 else ()),
    )
    result = strategy.outputs[0][0]
    strategy.outputs = ((result, (*x.shape[: len(batch)], channels, *whole)),)
    parts = _parts(x, result.axes_of(len(batch))) if groups > 1 else 1
    if parts > 1 or _has_nothing(strategy, call.specs[:2]):
        strategy.local = "convolution"
        given = {name: call.get(name) for name in _SIZES_OF.split() if call.get(name) is not None}
        strategy.bound = {"op": call.name, "groups": groups // parts, "arguments": given}
    return strategy


def _channelwise(call: OpCall, space: int, role: str, *, outputs: int = 1) -> Strategy:
    """Each sample and channel for itself; all tensors have the same leading dims, and `space` spatial ones, whole."""
    ndim = call.specs[0].ndim
    labels = tuple(dim if dim < ndim - space else None for dim in range(ndim))
    strategy = solve([Operand(spec, labels, role) for spec in call.specs], [Output(labels)] * outputs)
    return _of_nothing(call, strategy)


@rule("avg_pool1d avg_pool2d avg_pool3d", f"{_POOL} ceil_mode count_include_pad divisor_override")
@rule("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d", "input output_size")
def _average_pool(call: OpCall) -> Strategy:
    return _channelwise(call, _dims_in_name(call), FACTOR)


@rule("max_pool1d max_pool2d max_pool3d", f"{_POOL} dilation ceil_mode return_indices")
@rule("adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d", "input output_size return_indices")
def _max_pool(call: OpCall) -> Strategy:
    return _channelwise(call, _dims_in_name(call), PLAIN)


@rule(
    "max_pool1d_with_indices max_pool2d_with_indices max_pool3d_with_indices",
    f"{_POOL} dilation ceil_mode return_indices",
)
@rule(
    "adaptive_max_pool1d_with_indices adaptive_max_pool2d_with_indices adaptive_max_pool3d_with_indices",
    "input output_size return_indices",
)
def _max_pool_with_indices(call: OpCall) -> Strategy:
    return _channelwise(call, _dims_in_name(call), PLAIN, outputs=2)


@rule("max_unpool1d max_unpool2d max_unpool3d", "input indices kernel_size stride padding output_size")
def _max_unpool(call: OpCall) -> Strategy:
    return _channelwise(call, _dims_in_name(call), PLAIN)


@rule("interpolate", "input size scale_factor mode align_corners recompute_scale_factor antialias", sees_floats=True)
def _interpolate(call: OpCall) -> Strategy:
    return _channelwise(call, call.specs[0].ndim - 2, FACTOR)


@rule("pad", "input pad mode value", sees_floats=True)
@rule("constant_pad_nd", "input pad value", sees_floats=True)
def _pad(call: OpCall) -> Strategy:
    """A padded dim must be whole. Zeros and the tensor's own values keep a pending sum; another constant would be added up."""
    spec = call.spec("input")
    widths: Sequence[int] = call.get("pad")
    padded = {spec.ndim - 1 - place // 2 for place, width in enumerate(widths) if width}
    constant = call.get("mode", "constant") == "constant" and call.get("value") not in (None, 0)
    labels = tuple(None if dim in padded else dim for dim in range(spec.ndim))
    return _of_nothing(call, solve([Operand(spec, labels, PLAIN if constant else FACTOR)], [Output(labels)]))


@rule("grid_sampler grid_sample", "input grid mode padding_mode align_corners")
def _grid_sample(call: OpCall) -> Strategy:
    """Image [batch, channels, ...] at the places of grid [batch, ..., dims]."""
    x, grid = call.spec("input"), call.spec("grid")
    labels = ("batch", "channels", *(None,) * (x.ndim - 2))
    operands = [Operand(x, labels, FACTOR), Operand(grid, ("batch", *(None,) * (grid.ndim - 1)), PLAIN)]
    return solve(operands, [Output(labels)])


@rule("affine_grid affine_grid_generator", "input size align_corners")
def _affine_grid(call: OpCall) -> Strategy:
    """Matrices [batch, dims, dims + 1] -> places [batch, ..., dims]."""
    theta, size = call.specs[0], tuple(call.arguments["size"])
    strategy = solve([Operand(theta, ("batch", None, None), FACTOR)], [Output(("batch", *(None,) * (len(size) - 1)))])
    start, stop = strategy.layouts[0].bounds(tuple(theta.shape))[0]
    strategy.local = "affine_grid"
    strategy.bound = {"size": (stop - start, *size[1:]), "align_corners": bool(call.get("align_corners"))}
    return strategy


@rule("pixel_shuffle", "input upscale_factor")
@rule("pixel_unshuffle", "input downscale_factor")
@rule("channel_shuffle", "input groups")
def _shuffle(call: OpCall) -> Strategy:
    """[..., channels, height, width]; channels are cut along whole blocks of those that mix."""
    spec = call.spec("input")
    factor = next(value for name, value in call.arguments.items() if name != "input")
    *leading, channels, height, width = tuple(spec.shape)
    if call.name == "pixel_shuffle":
        blocks = channels // factor**2
        shape = (*leading, blocks, height * factor, width * factor)
    elif call.name == "pixel_unshuffle":
        blocks = channels
        shape = (*leading, blocks * factor**2, height // factor, width // factor)
    else:
        blocks, shape = 1, tuple(spec.shape)
    return _of_nothing(call, _of_blocks(call, spec.ndim - 3, blocks, shape))


@rule("im2col", "input kernel_size dilation padding stride")
@rule("col2im", "input output_size kernel_size dilation padding stride")
def _columns(call: OpCall) -> Strategy:
    """[batch, channels, height, width] <-> [batch, channels x kernel, places], both also without batch."""
    spec = call.spec("input")
    patch = prod(_pair(call.get("kernel_size")))
    if call.name == "im2col":
        at = spec.ndim - 3
        return _of_blocks(call, at, spec.shape[at], (*spec.shape[:at], spec.shape[at] * patch, None))
    at = spec.ndim - 2
    height, width = _pair(call.get("output_size"))
    return _of_blocks(call, at, spec.shape[at] // patch, (*spec.shape[:at], spec.shape[at] // patch, height, width))


def _of_blocks(call: OpCall, at: int, blocks: int, shape: Sequence[int | None]) -> Strategy:
    """A linear op on whole blocks of channels (dim `at`), with all dims after it whole; the result has this shape."""
    spec = call.specs[0]
    leading = (*range(at), "channels")
    labels = (*leading, *(None,) * (spec.ndim - at - 1))
    result = (*leading, *(None,) * (len(shape) - at - 1))
    strategy = solve([Operand(spec, labels, FACTOR)], [Output(result)], aligned=_even(spec, {"channels": blocks}))
    layout = strategy.outputs[0][0]
    strategy.outputs = ((layout, tuple(size if layout.axes_of(d) else None for d, size in enumerate(shape))),)
    return strategy


def _even(spec: TensorSpec, blocks: dict[str, int]) -> Callable[[Any, tuple[int, ...]], bool]:
    """Condition on a cut: labels that count blocks are cut into equal numbers of them."""
    return lambda label, axes: label not in blocks or blocks[label] % _parts(spec, axes) == 0


def _parts(spec: TensorSpec, axes: Sequence[int]) -> int:
    return prod(spec.layout.mesh.shape[axis] for axis in axes)


def _of_nothing(call: OpCall, strategy: Strategy) -> Strategy:
    """The same, by a local op that takes empty parts, where this rank has one."""
    if _has_nothing(strategy, call.specs):
        tensors = [name for name, value in call.arguments.items() if isinstance(value, TensorSpec)]
        rest = {name: value for name, value in call.arguments.items() if name not in tensors}
        strategy.local = "channelwise"
        strategy.bound = {"op": call.name, "names": tensors, "arguments": rest}
    return strategy


def _has_nothing(strategy: Strategy, specs: Sequence[TensorSpec]) -> bool:
    """Whether this rank's part of some operand is empty, though the operand isn't."""
    return any(
        prod(layout.local_shape(tuple(spec.shape))) == 0 and prod(spec.shape) > 0
        for layout, spec in zip(strategy.layouts, specs, strict=False)
    )


def _dims_in_name(call: OpCall) -> int:
    """Spatial dims: the digit in the op's name."""
    return next(int(letter) for letter in call.name if letter.isdigit())


def _pair(value: int | Sequence[int]) -> tuple[int, int]:
    if isinstance(value, int):
        return value, value
    if len(value) not in (1, 2):
        raise ShardingRuleError(f"expected one size or two, got {value!r}.")
    return value[0], value[-1]
