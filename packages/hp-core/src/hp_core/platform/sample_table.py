"""How tables of op samples are written: an op, its calls as Python text, and operands; all combinations become samples.

The text of a call is what reports and the golden record show, so a sample needs no other name.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from hp_core.platform.protocol import OpSample

__all__ = ["SampleTable"]

OPERANDS = "x y z w v u t s".split()
"""Names of the operands in the text of a call, in order."""


class SampleTable:
    """Writes samples whose calls may use the names of a namespace: a framework's modules, and functions."""

    def __init__(self, namespace: dict[str, Any]) -> None:
        self._namespace = namespace

    def calls(
        self, op: str, texts: str, operands: str, *, inplace: bool = False, draws: bool = False
    ) -> list[OpSample]:
        """Samples of one op.

        Args:
            op: canonical name.
            texts: calls, separated by ";", in which the operands are called x, y, z, w, v, u, t, s.
            operands: what the operands are (see `OpSample`), alternatives separated by ";".
            inplace: whether the calls write in place.
            draws: whether the calls draw random numbers.
        """
        return [
            OpSample(op, text, self._function(text, len(given.split())), given, inplace, draws)
            for text in _pieces(texts)
            for given in _pieces(operands)
        ]

    def each(
        self, ops: str, texts: str, operands: str, *, inplace: bool = False, draws: bool = False
    ) -> list[OpSample]:
        """The same samples of several ops (separated by blanks), whose name stands for OP in the text of the calls."""
        return [
            sample
            for op in ops.split()
            for sample in self.calls(op, texts.replace("OP", op), operands, inplace=inplace, draws=draws)
        ]

    def _function(self, text: str, count: int) -> Callable[..., Any]:
        # The text is a constant of this package; written once, it is both the call and its name.
        function: Callable[..., Any] = eval(f"lambda {', '.join(OPERANDS[:count])}: {text}", self._namespace)
        return function


def _pieces(text: str) -> list[str]:
    return [" ".join(piece.split()) for piece in text.split(";") if piece.strip()]
