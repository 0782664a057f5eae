"""Compares versions and ranges: `2.13.0+cpu`, `2.7.1.post2`, `8.3.RC1`, `>=0.1.0,<0.2`.

`packaging` does this fully; the doctor imports only the standard library, and needs the plain forms that wheels and
CANN use. What it doesn't understand it says, instead of guessing.
"""

from __future__ import annotations

import re

__all__ = ["allows", "key", "release"]

_RELEASE = re.compile(r"\s*v?(\d+(?:\.\d+)*)", re.I)
_SUFFIX = re.compile(r"[-_.]?(dev|alpha|beta|preview|pre|post|rev|rc|a|b|c|r)[-_.]?(\d*)", re.I)
_CLAUSE = re.compile(r"(===|~=|==|!=|<=|>=|<|>)\s*(.+)")
_RANKS = {"dev": -4, "a": -3, "alpha": -3, "b": -2, "beta": -2, "c": -1, "rc": -1, "pre": -1, "preview": -1}


def release(version: str) -> tuple[int, ...]:
    """The numbers that a version begins with, without zeros at the end; empty if it begins otherwise.

    >>> release("2.7.1.post2"), release("8.3.RC1"), release("9.0.0-beta.2")
    ((2, 7, 1), (8, 3), (9,))
    """
    match = _RELEASE.match(version)
    numbers = [int(part) for part in match[1].split(".")] if match else []
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def key(version: str) -> tuple[tuple[int, ...], tuple[tuple[int, int], ...]]:
    """A key to sort versions by: `1.0.dev1 < 1.0a1 < 1.0rc1 < 1.0 < 1.0.post1`; a local part (`+cpu`) is left away."""
    public = version.partition("+")[0]
    match = _RELEASE.match(public)
    rest = public[match.end() :] if match else public
    suffixes = [(_RANKS.get(word.lower(), 1), int(number or 0)) for word, number in _SUFFIX.findall(rest)]
    # The zero stands for the version itself, after those before it and before those after it.
    return release(public), (*suffixes, (0, 0))


def allows(specifier: str, version: str) -> bool | None:
    """Whether a range, `>=0.1.0,<0.2`, holds a version; None if it is written in a way that is not understood here."""
    for clause in filter(None, (part.strip() for part in specifier.split(","))):
        match = _CLAUSE.fullmatch(clause)
        if match is None:
            return None
        operator, wanted = match.groups()
        holds = _holds(operator, wanted.strip(), version)
        if not holds:
            return holds
    return True


def _holds(operator: str, wanted: str, version: str) -> bool | None:
    if operator == "===":
        return wanted == version
    if wanted.endswith(".*"):
        prefix = tuple(int(part) for part in wanted[:-2].split(".") if part.isdigit())
        same = (*release(version), *(0,) * len(prefix))[: len(prefix)] == prefix
        return {"==": same, "!=": not same}.get(operator)
    if not release(wanted) and not wanted.startswith("0"):
        return None
    have, want = key(version), key(wanted)
    if operator == "~=":
        parts = wanted.split(".")
        return have >= want and _holds("==", ".".join(parts[:-1]) + ".*", version)
    return {
        "==": have == want,
        "!=": have != want,
        "<=": have <= want,
        ">=": have >= want,
        # A range below 0.2 doesn't mean its pre-releases (PEP 440).
        "<": have < want and (have[0] != want[0]),
        ">": have > want and (have[0] != want[0] or "post" in wanted),
    }[operator]
