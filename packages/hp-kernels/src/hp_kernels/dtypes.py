"""The codes of element types, as `src/native/arguments.h` has them too."""

from __future__ import annotations

__all__ = ["DTYPE_CODES", "ITEM_SIZES"]

DTYPE_CODES = {"float32": 0, "float64": 1, "float16": 2, "bfloat16": 3, "int32": 4, "int64": 5, "uint8": 6}
"""Code of each element type that a kernel takes; a bool goes as uint8."""

ITEM_SIZES = {"float32": 4, "float64": 8, "float16": 2, "bfloat16": 2, "int32": 4, "int64": 8, "uint8": 1}
"""Bytes of an element."""
