"""Convolution, pooling, padding and resampling in every layout, against dense.

See `conftest.py` for how a case is read and what is compared.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F

from hp_core import Replicate, Shard, distribute_tensor, init_device_mesh
from hp_core.testing import record_collectives, run_ranks

RANKS = pytest.mark.parametrize("ranks", [2, 4])


@RANKS
def test_convolution(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("conv1d", lambda x, w: F.conv1d(x, w), "3x4x5 2x4x3;1x3x5 5x3x2;2x1x4 1x1x3"),
            ("conv1d bias", lambda x, w, b: F.conv1d(x, w, b, stride=2, padding=1), "3x4x5 3x4x3 3;1x1x4 1x1x3 1"),
            ("conv1d of one sample", lambda x, w, b: F.conv1d(x, w, b), "4x5 3x4x2 3"),
            ("conv2d", lambda x, w: F.conv2d(x, w, padding="same", dilation=2), "2x3x4x4 2x3x3x3"),
            ("conv2d keywords", lambda x, w, b: F.conv2d(x, w, bias=b, padding=(1, 0)), "2x3x3x4 4x3x3x3 4"),
            ("conv3d", lambda x, w, b: F.conv3d(x, w, b, padding=1), "2x2x2x3x2 2x2x3x3x3 2"),
            ("torch.conv2d", lambda x, w: torch.conv2d(x, w), "2x2x3x3 2x2x2x2"),
            ("grouped", lambda x, w, b: F.conv1d(x, w, b, groups=2), "2x4x5 6x2x3 6"),
            ("four groups", lambda x, w: F.conv1d(x, w, groups=4), "2x8x5 4x2x3"),
            ("depthwise", lambda x, w, b: F.conv2d(x, w, b, groups=3, padding=1), "2x3x3x3 6x1x3x3 6"),
            ("grouped of one sample", lambda x, w: F.conv1d(x, w, groups=2), "4x5 2x2x2"),
        ],
        most=40 if ranks == 2 else 16,
    )


@RANKS
def test_transposed_convolution(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("transposed", lambda x, w, b: F.conv_transpose1d(x, w, b, stride=2), "3x4x3 4x3x2 3;1x1x3 1x1x2 1"),
            ("of one sample", lambda x, w: F.conv_transpose1d(x, w), "4x3 4x3x2"),
            (
                "2d",
                lambda x, w, b: F.conv_transpose2d(x, w, b, stride=2, padding=1, output_padding=1, dilation=2),
                "2x3x3x2 3x2x3x3 2",
            ),
            ("grouped", lambda x, w, b: F.conv_transpose2d(x, w, b, groups=2), "2x4x2x2 4x3x2x2 6"),
            ("3d", lambda x, w: F.conv_transpose3d(x, w), "1x2x2x2x2 2x2x2x1x2"),
        ],
        most=32 if ranks == 2 else 12,
    )


@RANKS
def test_pooling(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("avg_pool1d", lambda x: F.avg_pool1d(x, 2), "2x3x5;3x5;1x1x4"),
            ("avg_pool2d", lambda x: F.avg_pool2d(x, 2, stride=1, padding=1, count_include_pad=False), "2x3x4x4"),
            ("avg_pool3d", lambda x: F.avg_pool3d(x, (1, 2, 2)), "2x1x2x2x2"),
            ("max_pool1d", lambda x: F.max_pool1d(x, 2, stride=1), "2x3x5;3x5;1x1x4"),
            ("max_pool2d", lambda x: F.max_pool2d(x, 2, ceil_mode=True), "2x3x3x5;3x4x4"),
            ("max_pool2d indices", lambda x: F.max_pool2d(x, 2, return_indices=True), "2x3x4x4;1x1x4x4"),
            ("max_pool3d", lambda x: F.max_pool3d(x, (1, 2, 1)), "2x1x2x2x2"),
            ("adaptive_avg_pool1d", lambda x: F.adaptive_avg_pool1d(x, 2), "2x3x5;1x1x5"),
            ("adaptive_avg_pool2d", lambda x: F.adaptive_avg_pool2d(x, (2, None)), "2x3x5x3"),
            ("adaptive_avg_pool3d", lambda x: F.adaptive_avg_pool3d(x, 1), "2x3x2x3x2"),
            ("adaptive_max_pool1d", lambda x: F.adaptive_max_pool1d(x, 2), "2x3x5;1x1x4"),
            ("adaptive_max_pool2d", lambda x: F.adaptive_max_pool2d(x, 2, return_indices=True), "2x3x5x4"),
            ("adaptive_max_pool3d", lambda x: F.adaptive_max_pool3d(x, 1), "2x3x2x3x2"),
            ("lp_pool1d", lambda x: F.lp_pool1d(x, 2.0, 2), "p:2x3x4"),
            ("lp_pool2d", lambda x: F.lp_pool2d(x, 3.0, 2), "p:2x3x4x4"),
            ("max_unpool2d", lambda x: F.max_unpool2d(*F.max_pool2d(x, 2, return_indices=True), 2), "2x3x4x4;1x1x4x4"),
        ],
        most=16 if ranks == 2 else 10,
    )


@RANKS
def test_padding_and_resampling(check_ops: Callable[..., None], ranks: int) -> None:
    check_ops(
        ranks,
        [
            ("pad zeros", lambda x: F.pad(x, (1, 2)), "5x3;3;2x3x4"),
            ("pad several", lambda x: F.pad(x, (0, 0, 1, 0, -1, 1)), "3x4x2;2x3x4x2"),
            ("pad a constant", lambda x: F.pad(x, (1, 0), value=2.5), "5x3"),
            ("pad reflect", lambda x: F.pad(x, (1, 1), mode="reflect"), "2x3x4;3x4"),
            ("pad replicate", lambda x: F.pad(x, (1, 1, 2, 0), mode="replicate"), "2x3x3x3"),
            ("pad circular", lambda x: F.pad(x, (1, 2), mode="circular"), "2x3x4"),
            ("constant_pad_nd", lambda x: torch.constant_pad_nd(x, (1, 0), 0.0), "5x3"),
            ("nearest", lambda x: F.interpolate(x, scale_factor=2), "2x3x4;1x1x3"),
            ("bilinear", lambda x: F.interpolate(x, size=(3, 5), mode="bilinear", align_corners=True), "2x3x4x4"),
            ("bicubic", lambda x: F.interpolate(x, scale_factor=(0.5, 1.5), mode="bicubic"), "1x3x4x4"),
            ("area", lambda x: F.interpolate(x, size=2, mode="area"), "2x3x4x4"),
            ("grid_sample", lambda x, g: F.grid_sample(x, g, align_corners=True), "3x2x4x4 3x2x3x2;1x3x4x4 1x2x2x2"),
            ("affine_grid", lambda t: F.affine_grid(t, (3, 1, 2, 4), align_corners=False), "3x2x3"),
            ("pixel_shuffle", lambda x: F.pixel_shuffle(x, 2), "2x8x2x3;4x2x2;1x4x1x1"),
            ("pixel_unshuffle", lambda x: F.pixel_unshuffle(x, downscale_factor=2), "2x2x2x4;3x4x2"),
            ("channel_shuffle", lambda x: F.channel_shuffle(x, 2), "2x4x2x3"),
            ("unfold", lambda x: F.unfold(x, 2, padding=1), "2x4x3x2;3x3x3"),
            ("fold", lambda x: F.fold(x, (3, 3), 2), "2x8x4;4x4"),
            ("local_response_norm", lambda x: F.local_response_norm(x, 2), "2x4x3"),
        ],
        most=20 if ranks == 2 else 10,
    )


def test_cut_channels_move_what_they_must() -> None:
    """Column then row, as with linear layers: one all-reduce forward, one backward."""

    def collectives() -> tuple[list[str], list[str]]:
        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))

        def place(shape: tuple[int, ...], placement: object) -> object:
            return distribute_tensor(torch.ones(shape), mesh, [placement]).requires_grad_()

        x = place((2, 3, 8), Replicate())
        wide, bias, narrow = place((4, 3, 3), Shard(0)), place((4,), Shard(0)), place((3, 4, 3), Shard(1))
        with record_collectives() as forward:
            hidden = F.relu(F.conv1d(x, wide, bias, padding=1))
            out = F.conv1d(F.max_pool1d(hidden, 2), narrow).reduce_partial()
        with record_collectives() as backward:
            out.sum().backward()
        return [entry.kind for entry in forward], [entry.kind for entry in backward]

    assert run_ranks(2, collectives) == [(["all_reduce"], ["all_reduce"])] * 2
