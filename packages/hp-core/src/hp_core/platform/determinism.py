"""What framework and communication need for equal results in equal runs, by levels, and how it is set before they start.

Environment variables are a table here, framework-neutral; a framework's own switches are behind the protocol
`DeterministicSwitches`. Users call `hp_core.deterministic`, or set `HYPER_PARALLEL_DETERMINISTIC`.
"""

from __future__ import annotations

import logging
import os
from dataclasses import dataclass
from types import TracebackType

from hp_core.errors import PlatformError
from hp_core.platform.protocol import DeterministicSwitches, Platform

__all__ = ["LEVELS", "VARIABLE", "Determinism", "Setting", "apply_environment", "apply_level", "level_asked"]

LEVELS = {
    0: "as the framework comes",
    1: "deterministic algorithms where there are any; an op that has none warns (PyTorch)",
    2: "an op that has none is an error, and fresh memory is filled, so that reading it is seen (PyTorch)",
    3: "reductions over HCCL also keep the order of their addends, bit for bit (Atlas A2; slower)",
}
VARIABLE = "HYPER_PARALLEL_DETERMINISTIC"
"""The environment variable that asks for a level from outside."""
_logger = logging.getLogger("hp_core")


@dataclass(frozen=True, slots=True)
class _Variable:
    """An environment variable that a library reads when it starts.

    Attributes:
        values: what is set, by level.
        accepted: other values that will do, by level.
        reader: what reads it: "world" (communicators), or "device".
    """

    values: dict[int, str]
    accepted: dict[int, tuple[str, ...]]
    reader: str


# Sources: for HCCL the page "HCCL_DETERMINISTIC" of CANN's list of environment variables (8.5: false, true, strict; before, no
# strict); for LCCL the list of environment variables of MindSpore Transformers; for cuBLAS "Results reproducibility" in its
# guide, and PyTorch's note on reproducibility.
_TRUE = {1: "true", 2: "true", 3: "strict"}
_VARIABLES = {
    "HCCL_DETERMINISTIC": _Variable(_TRUE, {1: ("strict",), 2: ("strict",), 3: ()}, "world"),
    "LCCL_DETERMINISTIC": _Variable(dict.fromkeys((1, 2, 3), "1"), {}, "world"),
    "CUBLAS_WORKSPACE_CONFIG": _Variable(
        dict.fromkeys((1, 2, 3), ":4096:8"), dict.fromkeys((1, 2, 3), (":16:8", ":4096:2")), "device"
    ),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One thing that `deterministic` looks after.

    Attributes:
        name: an environment variable, or the framework's own name of a switch.
        value: what it is now.
        before: what it was; None for a variable that wasn't set.
    """

    name: str
    value: str
    before: str | None

    @property
    def changed(self) -> bool:
        """Whether it is another value than before."""
        return self.value != self.before

    def __str__(self) -> str:
        was = "" if not self.changed else f"  (was {'not set' if self.before is None else self.before})"
        return f"{self.name} = {self.value}{was}"


class Determinism:
    """What `hp_core.deterministic` has set; as a context manager it restores that in the end.

    Attributes:
        level: the level.
        settings: all that the level needs, changed or not.
    """

    def __init__(
        self, level: int, settings: tuple[Setting, ...], switches: DeterministicSwitches, before: dict[str, str]
    ) -> None:
        self.level = level
        self.settings = settings
        self._switches = switches
        self._before = before

    def restore(self) -> None:
        """Put back what was changed.

        Raises:
            PlatformError: the framework can't (MindSpore).
        """
        if any(setting.changed for setting in self.settings):
            self._require_restorable()
        for setting in self.settings:
            if setting.name in _VARIABLES and setting.changed:
                _set_variable(setting.name, setting.before)
        self._switches.restore(self._before)

    def _require_restorable(self) -> None:
        if not self._switches.can_restore:
            raise PlatformError(
                "MindSpore's deterministic setting can be set once in a process, and not be taken back: call deterministic(level) "
                "once, at the start of the program."
            )

    def __enter__(self) -> Determinism:
        self._require_restorable()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.restore()

    def __str__(self) -> str:
        lines = [f"deterministic level {self.level}: {LEVELS[self.level]}"]
        return "\n".join([*lines, *(f"  {setting}" for setting in self.settings)])

    def __repr__(self) -> str:
        return f"<Determinism of level {self.level}, {sum(one.changed for one in self.settings)} settings changed>"


_ours: dict[str, str] = {}
"""Variables that were set here, with their values: what they say isn't the user's word."""


def apply_environment(platform: Platform) -> None:
    """Set what the environment asks for; called when the platform is first used."""
    asked = level_asked()
    if asked:
        apply_level(asked, platform)


def level_asked() -> int | None:
    """The level that the environment asks for, or None.

    Raises:
        PlatformError: it says something else.
    """
    said = os.environ.get(VARIABLE, "").strip()
    if not said:
        return None
    if said not in map(str, LEVELS):
        raise PlatformError(f"{VARIABLE}={said!r} is none of the levels {', '.join(map(str, LEVELS))}.")
    return int(said)


def apply_level(level: int, platform: Platform) -> Determinism:
    """Set what a level needs.

    Raises:
        PlatformError: the environment says otherwise, or it comes too late; nothing has been changed then.
    """
    switches = platform.deterministic_switches
    names = [name for name in _VARIABLES if name in switches.variables] if level else list(_ours)
    wanted = {name: _wanted(name, level) for name in names}
    changing = {name: value for name, value in wanted.items() if os.environ.get(name) != value}
    _require_not_started(level, changing, platform)
    before = switches.state()
    switches.require_settable(level)
    settings = []
    for name, value in wanted.items():
        settings.append(Setting(name, "not set" if value is None else value, os.environ.get(name)))
        if name in changing:
            _set_variable(name, value)
            if value is not None:
                _ours[name] = value
    switches.set(level)
    after = switches.state()
    settings += [Setting(name, after[name], before[name]) for name in after]
    result = Determinism(level, tuple(settings), switches, before)
    if level or any(setting.changed for setting in settings):
        _logger.info("%s", result)
    return result


def _wanted(name: str, level: int) -> str | None:
    """What a variable must be: what it is, if that will do.

    Raises:
        PlatformError: the user has set it to something that won't.
    """
    if not level:
        return None
    variable, present = _VARIABLES[name], os.environ.get(name)
    good = (variable.values[level], *variable.accepted.get(level, ()))
    if present is None or present == _ours.get(name):
        return variable.values[level] if present not in good else present
    if present not in good:
        raise PlatformError(
            f"deterministic({level}) needs {name}={' or '.join(good)}, but the environment says {name}={present}: "
            f"`unset {name}`, or `export {name}={good[0]}`, and start again."
        )
    return present


def _require_not_started(level: int, changing: dict[str, str | None], platform: Platform) -> None:
    started = platform.deterministic_switches.started()
    for name, value in changing.items():
        reason = started.get(_VARIABLES[name].reader)
        if reason:
            now = os.environ.get(name)
            export = f"export {VARIABLE}={level}" if level else f"start without {VARIABLE}"
            raise PlatformError(
                f"deterministic({level}) comes too late: {reason}, which has read {name} as "
                f"{'not set' if now is None else now}; it should be {'not set' if value is None else value}. "
                f"Call deterministic() first of all, or `{export}` before the program starts."
            )


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name, None)
        _ours.pop(name, None)
    else:
        os.environ[name] = value
        if name in _ours:
            _ours[name] = value
