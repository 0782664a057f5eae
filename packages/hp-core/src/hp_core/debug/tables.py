"""Tables of plain text, as debugging output is read in logs: aligned, without colours, no wider than what they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence

__all__ = ["aligned", "in_bytes", "number"]

_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


def aligned(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Lines of a table whose first row is the head.

    Args:
        rows: as many cells in each.
        right: the columns that are aligned on the right.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]

    def line(row: Sequence[str]) -> str:
        cells = (
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        return "  ".join(cells).rstrip()

    head, *body = rows
    return [
        line(head),
        line(["-" * width if head[index] else "" for index, width in enumerate(widths)]),
        *map(line, body),
    ]


def in_bytes(count: int) -> str:
    """A number of bytes for people: exact below 1 KiB, else to four digits."""
    if count < 1024:
        return f"{count} B"
    power = min((count.bit_length() - 1) // 10, len(_UNITS) - 1)
    return f"{count / 1024**power:.4g} {_UNITS[power]}"


def number(count: int, noun: str) -> str:
    """A number of things, with the noun in its right form."""
    return f"{count:,} {noun}{'' if count == 1 else 's'}"
