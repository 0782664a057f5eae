"""`doctor wheel FILE`: which part of a wheel's name doesn't fit this interpreter, whether it would link, and what to do.

pip says that a wheel is not supported on this platform and stops there; a wheel whose name fits may still miss a
library or a symbol when it is imported.
"""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.finding import Finding, Report, failure, ok, skipped, warning
from hyper_parallel.doctor.judges import host
from hyper_parallel.doctor.judges.wheels import links, requirement
from hyper_parallel.doctor.probe import Outcome, run_probe
from hyper_parallel.doctor.tables import table
from hyper_parallel.doctor.tags import Interpreter, Misfit, WheelName, misfits, parse_wheel_name
from hyper_parallel.doctor.versions import allows, release
from hyper_parallel.doctor.world import World

__all__ = ["examine_wheel"]

# Distributions of this project, and the folder of each in the repository.
_FOLDERS = {"hyper-parallel": "packages/hp-meta"}


def examine_wheel(
    path: Path, *, here: Interpreter | None = None, environment: Mapping[str, str] | None = None, timeout: float = 60.0
) -> Report:
    """Compare a wheel with an interpreter.

    Args:
        path: the file.
        here: the interpreter; this one by default.
        environment: the environment variables under which libraries are looked for; those of this process by default.
        timeout: seconds that reading it may take.

    Returns:
        Findings for `host.python`, `host.glibc`, `host.libstdcxx`, `wheels.ranges`, `wheels.tag` and `wheels.symbols`.

    Raises:
        FileNotFoundError, IsADirectoryError: there is no such file.
        WheelNameError: its name is not that of a wheel.
    """
    if path.is_dir():
        raise IsADirectoryError(f"{path} is a folder; the file of a wheel is needed")
    if not path.is_file():
        raise FileNotFoundError(f"{path}: there is no such file")
    name = parse_wheel_name(path.name)
    start = time.perf_counter()
    here = here or Interpreter.current()
    variables = dict(os.environ if environment is None else environment)
    outcomes = {
        "wheel_file": run_probe("wheel_file", {"path": str(path)}, variables, timeout),
        "host": run_probe("host", {"root": "/"}, variables, timeout),
    }
    # The judges of the host look at the native parts of what is installed; here, at those of this wheel.
    native = outcomes["wheel_file"].facts.get("native", [])
    world = World("cpu", variables, {**outcomes, "wheels": Outcome({"native": native})})
    findings = [*_libraries(world, native), _python(world, here, name), _requirements(world, name)]
    findings += [_tag(world, name, here, path), _symbols(world, name, here)]
    report = Report(f"wheel {path.name}", f"for {here.tag}", tuple(sorted(findings, key=_order)))
    return replace(report, seconds=time.perf_counter() - start)


def _order(finding: Finding) -> int:
    # The tag first: it is what pip refuses.
    return ["wheels.tag", "wheels.ranges", "wheels.symbols", "host.python", "host.glibc", "host.libstdcxx"].index(
        finding.id
    )


def _libraries(world: World, native: list[Any]) -> list[Finding]:
    if not native:
        return [skipped(check, "the wheel has no native part") for check in ("host.glibc", "host.libstdcxx")]
    return [finding for finding in host.judge(world) if finding.id in ("host.glibc", "host.libstdcxx")]


def _python(world: World, here: Interpreter, name: WheelName) -> Finding:
    wanted = world.facts("wheel_file").get("requires-python")
    own = f"{here.version[0]}.{here.version[1]}"
    if not wanted:
        return skipped("host.python", "the wheel doesn't say which Python it requires")
    # The patch release is not part of a tag; one in the middle stands for all of them.
    if allows(wanted, f"{own}.9") is False:
        text = f"the wheel requires Python {wanted}, this is {own}"
        return failure(
            "host.python",
            text,
            ["python3.11 -m venv ~/hyper-parallel", f"~/hyper-parallel/bin/pip install {name.distribution}"],
        )
    return ok("host.python", f"Python {own} is in {wanted}")


def _requirements(world: World, name: WheelName) -> Finding:
    facts = world.facts("wheel_file")
    wrong = []
    for text in facts.get("requires", ()):
        needed, wanted, conditional = requirement(text)
        version = facts.get("installed", {}).get(needed)
        if not conditional and version and allows(wanted, version) is False:
            wrong.append((needed, wanted, version))
    if wrong:
        needed, wanted, version = wrong[0]
        text = f"{name.distribution} {name.version} needs {needed} {wanted}; {version} is installed"
        return failure(
            "wheels.ranges",
            text,
            [f'pip install "{needed}{wanted}"'],
            [f"{n} {w}; {v} is installed" for n, w, v in wrong],
        )
    return ok("wheels.ranges", "what is installed fits what it requires")


def _tag(world: World, name: WheelName, here: Interpreter, path: Path) -> Finding:
    outcome = world.outcome("wheel_file")
    if outcome.end:
        text = f"the file can't be read: reading it {outcome.end}"
        remedy = [
            "# it was not downloaded or copied whole; fetch it again:",
            f"pip download --no-deps {name.distribution}=={name.version}",
        ]
        return failure("wheels.tag", text, remedy, outcome.output)
    own = outcome.facts.get("tags", [])
    said = {f"{python}-{abi}-{platform}" for python in name.python for abi in name.abi for platform in name.platform}
    found = misfits(name, here)
    details = [f"{misfit.part} tag {misfit.tag}: {misfit.reason}" for misfit in found]
    details += [f"this interpreter builds {here.tag}"]
    if own and not said & set(own):
        text = f"the file was renamed: its own record says {', '.join(own)}"
        true = f"{path.name.partition('-')[0]}-{name.version}-{own[0]}.whl"
        return failure(
            "wheels.tag",
            text,
            ["# a new name doesn't change what is inside:", f"mv {path} {path.with_name(true)}", *_build(name)],
            details,
        )
    if found:
        text = "; ".join(f"{misfit.part} tag {misfit.tag} doesn't fit: {misfit.reason}" for misfit in found)
        return failure("wheels.tag", text, _remedy(found, name, path, here), details)
    return ok("wheels.tag", f"{path.name} fits {here.tag}", details)


def _remedy(found: list[Misfit], name: WheelName, path: Path, here: Interpreter) -> list[str]:
    """How to use the wheel, where that is possible, and how to build one that fits."""
    lines = []
    version = next((tag[2:] for tag in reversed(name.python) if tag.startswith("cp") and tag[2:].isdigit()), "")
    platform = next((misfit for misfit in found if misfit.part == "platform"), None)
    if found[0].part == "Python" and platform is None and len(version) > 1:
        lines = ["# use the Python that it is for:", f"python{version[0]}.{version[1:]} -m pip install {path}"]
    if platform is not None and "glibc" in platform.reason and here.glibc:
        fitting = [target["name"] for target in table("targets")["targets"] if release(target["glibc"]) <= here.glibc]
        if fitting:
            lines = ["# in a checkout, build it in the image of a system as old as this one:"]
            lines.append(f"nox -s wheels -- --target {fitting[0]}")
    return [*lines, *_build(name)]


def _build(name: WheelName) -> list[str]:
    if name.distribution.startswith(("hp-", "hyper-parallel")):
        folder = _FOLDERS.get(name.distribution, f"packages/{name.distribution}")
        return [
            "# in a checkout, build one for this interpreter:",
            f"python -m pip wheel --no-deps --wheel-dir dist {folder}",
        ]
    build = f"python -m pip wheel --no-deps --no-binary {name.distribution} {name.distribution}=={name.version}"
    return ["# build one for this interpreter, from its source:", build]


def _symbols(world: World, name: WheelName, here: Interpreter) -> Finding:
    native = world.facts("wheel_file").get("native", [])
    if not native:
        shared = world.facts("wheel_file").get("shared")
        if shared or world.outcome("wheel_file").end:
            return warning("wheels.symbols", "the native parts could not be read", _build(name))
        return skipped("wheels.symbols", "the wheel has no native part")
    if name.platform == ("any",):
        text = f"the wheel says it fits any platform, and holds {native[0]['path']}"
        return failure("wheels.symbols", text, ["# its builder forgot the platform tag", *_build(name)])
    for part in native:
        problem = links(part, here.machine)
        if problem:
            # For another architecture there is nothing to install here.
            remedy = (*problem.remedy, *_build(name)) if part["machine"] == here.machine else _build(name)
            return failure("wheels.symbols", problem.text, remedy, problem.details)
    return ok(
        "wheels.symbols", f"all libraries and symbols of {len(native)} native file{'s' * (len(native) != 1)} are found"
    )
