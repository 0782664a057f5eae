"""What the judges look at: the profile, the environment variables, and what every probe found.

A judge is a function of a world and of nothing else, so a test can make one up.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from hyper_parallel.doctor.probe import Facts, Outcome

__all__ = ["PROFILES", "World"]

PROFILES = ("cpu", "cuda", "npu", "mindspore")

_NOTHING = Outcome()


@dataclass(frozen=True)
class World:
    """One machine, as the doctor sees it.

    Attributes:
        profile: what must be there, one of `PROFILES`.
        environment: the environment variables of the user's programs.
        outcomes: what each probe found, by its name.
    """

    profile: str
    environment: Mapping[str, str] = field(default_factory=dict)
    outcomes: Mapping[str, Outcome] = field(default_factory=dict)

    def outcome(self, probe: str) -> Outcome:
        """What a probe found and how it ended."""
        return self.outcomes.get(probe, _NOTHING)

    def facts(self, probe: str) -> Facts:
        """What a probe found."""
        return self.outcome(probe).facts

    def version(self, distribution: str) -> str | None:
        """The installed version of a distribution that the wheels' probe looks for."""
        record = self.facts("wheels").get("distributions", {}).get(distribution)
        return record["version"] if record else None

    def _present(self, probe: str) -> bool:
        """A framework is installed; or its probe died before it could say, which must not pass for absence."""
        outcome = self.outcome(probe)
        return outcome.facts.get("installed", "" if outcome.end else None) is not None

    @property
    def has_torch(self) -> bool:
        """PyTorch is installed, working or not."""
        return self._present("torch_itself")

    @property
    def has_mindspore(self) -> bool:
        """MindSpore is installed, working or not."""
        return self._present("mindspore_itself")

    @property
    def has_torch_npu(self) -> bool:
        """torch_npu is installed, working or not."""
        return self._present("torch_npu")

    @property
    def needs_torch(self) -> bool:
        """The profile doesn't do without PyTorch: on the CPU and on an NPU, MindSpore alone will do."""
        return self.profile == "cuda" or (self.profile in ("cpu", "npu") and not self.has_mindspore)

    @property
    def needs_mindspore(self) -> bool:
        """The profile doesn't do without MindSpore."""
        return self.profile == "mindspore" or (self.profile == "npu" and self.has_mindspore and not self.has_torch_npu)

    @property
    def needs_npu(self) -> bool:
        """The profile doesn't do without CANN and a device."""
        return self.profile == "npu"

    @property
    def cann_home(self) -> Facts | None:
        """The installation of CANN that is used: the one of ASCEND_HOME_PATH, or the first that was found."""
        homes = self.facts("cann").get("homes") or [None]
        return homes[0]  # type: ignore[no-any-return]

    @property
    def has_npu_software(self) -> bool:
        """There is CANN, or the profile needs it; only then do the checks of CANN and HCCL mean anything."""
        facts = self.facts("cann")
        return self.needs_npu or bool(facts.get("homes") or facts.get("stated"))
