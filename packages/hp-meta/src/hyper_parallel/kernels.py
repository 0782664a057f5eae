"""The native kernels and their portable twins: attention partials, mixtures of experts, packing; provided by hp-kernels."""

from __future__ import annotations

from hyper_parallel.exports import lazy_names

__getattr__, __dir__ = lazy_names(__name__)
