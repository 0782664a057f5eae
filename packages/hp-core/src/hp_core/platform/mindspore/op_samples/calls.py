"""What the calls in MindSpore's tables of samples may use: MindSpore's modules."""

from __future__ import annotations

import mindspore as ms
from mindspore import mint, nn, ops

from hp_core.platform.sample_table import SampleTable

__all__ = ["calls", "each"]

_TABLE = SampleTable({"ms": ms, "mint": mint, "ops": ops, "nn": nn, "F": mint.nn.functional})
calls, each = _TABLE.calls, _TABLE.each
"""Samples of one op, of several; calls may use `ms`, `mint`, `ops`, `nn`, and `F` for `mint.nn.functional`."""
