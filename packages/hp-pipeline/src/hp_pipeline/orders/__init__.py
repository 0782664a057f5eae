"""Compute orders: each a short function from numbers of ranks, chunks and micro-batches to a schedule of F, B, I and W only."""

from __future__ import annotations

from hp_pipeline.orders.registry import ORDERS, Order, build_order

__all__ = ["ORDERS", "Order", "build_order"]
