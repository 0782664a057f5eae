"""Samples of convolution, pooling, padding and resampling."""

from __future__ import annotations

from hp_core.platform.protocol import OpSample
from hp_core.platform.torch.op_samples.calls import calls, each

__all__ = ["SAMPLES"]

SAMPLES: list[OpSample] = [
    *calls("conv1d", "F.conv1d(x, y)", "3x4x5 2x4x3; 1x3x5 5x3x2"),
    *calls("conv1d", "F.conv1d(x, y, z, stride=2, padding=1)", "3x4x5 3x4x3 3"),
    *calls("conv1d", "F.conv1d(x, y, z)", "4x5 3x4x2 3"),
    *calls("conv1d", "F.conv1d(x, y, z, groups=2)", "2x4x5 6x2x3 6"),
    *calls("conv1d", "F.conv1d(x, y, groups=4)", "2x8x5 4x2x3"),
    *calls("conv2d", "F.conv2d(x, y, padding='same', dilation=2)", "2x3x4x4 2x3x3x3"),
    *calls("conv2d", "F.conv2d(x, y, bias=z, padding=(1, 0)); torch.conv2d(x, y, z)", "2x3x3x4 4x3x3x3 4"),
    *calls("conv2d", "F.conv2d(x, y, z, groups=3, padding=1)", "2x3x3x3 6x1x3x3 6"),
    *calls("conv3d", "F.conv3d(x, y, z, padding=1)", "2x2x2x3x2 2x2x3x3x3 2"),
    *calls("conv_transpose1d", "F.conv_transpose1d(x, y, z, stride=2)", "3x4x3 4x3x2 3"),
    *calls("conv_transpose1d", "F.conv_transpose1d(x, y)", "4x3 4x3x2"),
    *calls(
        "conv_transpose2d",
        "F.conv_transpose2d(x, y, z, stride=2, padding=1, output_padding=1, dilation=2)",
        "2x3x3x2 3x2x3x3 2",
    ),
    *calls("conv_transpose2d", "F.conv_transpose2d(x, y, z, groups=2)", "2x4x2x2 4x3x2x2 6"),
    *calls("conv_transpose3d", "F.conv_transpose3d(x, y)", "1x2x2x2x2 2x2x2x1x2"),
    # pooling
    *calls("avg_pool1d", "F.avg_pool1d(x, 2)", "2x3x5; 3x5"),
    *calls("avg_pool2d", "F.avg_pool2d(x, 2, stride=1, padding=1, count_include_pad=False)", "2x3x4x4"),
    *calls("avg_pool3d", "F.avg_pool3d(x, (1, 2, 2))", "2x1x2x2x2"),
    *calls("max_pool1d", "F.max_pool1d(x, 2, stride=1)", "2x3x5; 3x5"),
    *calls("max_pool2d", "F.max_pool2d(x, 2, ceil_mode=True)", "2x3x3x5; 3x4x4"),
    *calls("max_pool3d", "F.max_pool3d(x, (1, 2, 1))", "2x1x2x2x2"),
    *calls("max_pool1d_with_indices", "F.max_pool1d(x, 2, return_indices=True)", "2x3x4"),
    *calls("max_pool2d_with_indices", "F.max_pool2d(x, 2, return_indices=True)", "2x3x4x4"),
    *calls("max_pool3d_with_indices", "F.max_pool3d(x, 2, return_indices=True)", "2x1x2x2x2"),
    *calls("adaptive_avg_pool1d", "F.adaptive_avg_pool1d(x, 2)", "2x3x5"),
    *calls("adaptive_avg_pool2d", "F.adaptive_avg_pool2d(x, (2, None))", "2x3x5x3"),
    *calls("adaptive_avg_pool3d", "F.adaptive_avg_pool3d(x, 1)", "2x3x2x3x2"),
    *calls("adaptive_max_pool1d", "F.adaptive_max_pool1d(x, 2)", "2x3x5"),
    *calls("adaptive_max_pool2d", "F.adaptive_max_pool2d(x, 2)", "2x3x5x4"),
    *calls("adaptive_max_pool3d", "F.adaptive_max_pool3d(x, 1)", "2x3x2x3x2"),
    *calls("adaptive_max_pool1d_with_indices", "F.adaptive_max_pool1d(x, 2, return_indices=True)", "2x3x5"),
    *calls("adaptive_max_pool2d_with_indices", "F.adaptive_max_pool2d(x, 2, return_indices=True)", "2x3x5x4"),
    *calls("adaptive_max_pool3d_with_indices", "F.adaptive_max_pool3d(x, 1, return_indices=True)", "2x3x2x3x2"),
    *calls("avg_pool1d", "F.lp_pool1d(x, 2.0, 2)", "p:2x3x4"),
    *calls("max_unpool1d", "F.max_unpool1d(*F.max_pool1d(x, 2, return_indices=True), 2)", "2x3x4"),
    *calls("max_unpool2d", "F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2)", "2x3x4x4"),
    *calls("max_unpool3d", "F.max_unpool3d(*F.max_pool3d(x, 2, return_indices=True), 2)", "2x1x2x2x2"),
    # padding, resampling, rearranging channels and patches
    *calls("pad", "F.pad(x, (1, 2))", "5x3; 3; 2x3x4"),
    *calls("pad", "F.pad(x, (0, 0, 1, 0, -1, 1))", "3x4x2"),
    *calls("pad", "F.pad(x, (1, 0), value=2.5)", "5x3"),
    *calls("pad", "F.pad(x, (1, 1), mode='reflect'); F.pad(x, (1, 2), mode='circular')", "2x3x4"),
    *calls("pad", "F.pad(x, (1, 1, 2, 0), mode='replicate')", "2x3x3x3"),
    *calls("constant_pad_nd", "torch.constant_pad_nd(x, (1, 0), 0.0)", "5x3"),
    *calls("interpolate", "F.interpolate(x, scale_factor=2)", "2x3x4"),
    *calls("interpolate", "F.interpolate(x, size=(3, 5), mode='bilinear', align_corners=True)", "2x3x4x4"),
    *calls("interpolate", "F.interpolate(x, scale_factor=(0.5, 1.5), mode='bicubic')", "1x3x4x4"),
    *calls("interpolate", "F.interpolate(x, size=2, mode='area')", "2x3x4x4"),
    *calls("grid_sample", "F.grid_sample(x, y, align_corners=True)", "3x2x4x4 3x2x3x2"),
    *calls("grid_sampler", "torch.grid_sampler(x, y, 0, 0, True)", "3x2x4x4 3x2x3x2"),
    *calls("affine_grid", "F.affine_grid(x, (3, 1, 2, 4), align_corners=False)", "3x2x3"),
    *calls("affine_grid_generator", "torch.affine_grid_generator(x, (3, 1, 2, 4), False)", "3x2x3"),
    *calls("pixel_shuffle", "F.pixel_shuffle(x, 2)", "2x8x2x3; 4x2x2"),
    *calls("pixel_unshuffle", "F.pixel_unshuffle(x, downscale_factor=2)", "2x2x2x4; 3x4x2"),
    *each("channel_shuffle", "F.OP(x, 2)", "2x4x2x3"),
    *calls("im2col", "F.unfold(x, 2, padding=1)", "2x4x3x2; 3x3x3"),
    *calls("col2im", "F.fold(x, (3, 3), 2)", "2x8x4; 4x4"),
]
