"""Judges of the group `wheels`: which components are installed, whether they fit each other, and whether they link."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.finding import Finding, failure, ok, skipped, warning
from hyper_parallel.doctor.linking import provider
from hyper_parallel.doctor.tags import Interpreter, misfits, parse_wheel_name
from hyper_parallel.doctor.versions import allows
from hyper_parallel.doctor.world import World

__all__ = ["OURS", "LinkProblem", "judge", "links", "requirement"]

OURS = r"hyper-parallel|hp-[a-z0-9-]+"

_CHECKS = ("wheels.installed", "wheels.ranges", "wheels.tag", "wheels.symbols")
_REQUIREMENT = re.compile(r"([A-Za-z0-9][A-Za-z0-9._-]*)\s*(?:\[[^\]]*\])?\s*\(?([^;()]*)\)?\s*(;.*)?")
_SHOWN = 5
_REBUILD = "pip install --force-reinstall --no-deps --no-build-isolation --no-binary hp-kernels hp-kernels"


def judge(world: World) -> list[Finding]:
    """The findings of the group."""
    outcome = world.outcome("wheels")
    if outcome.end and "distributions" not in outcome.facts:
        text = f"reading what is installed {outcome.story}"
        remedy = ["# look for damaged packages:", "pip check"]
        return [
            failure(_CHECKS[0], text, remedy, outcome.output),
            *(skipped(check, "not known") for check in _CHECKS[1:]),
        ]
    records = world.facts("wheels").get("distributions", {})
    ours = {name: record for name, record in records.items() if re.fullmatch(OURS, name)}
    return [_installed(world, ours), _ranges(ours, records), _tags(world, ours), _symbols(world)]


def _installed(world: World, ours: dict[str, Any]) -> Finding:
    if not ours:
        return warning(
            "wheels.installed",
            "no component is installed; this runs from a folder on the path",
            [
                "pip install hyper-parallel",
                "# or, from a checkout:",
                "pip install ./packages/hp-core ./packages/hp-meta",
            ],
        )
    names = ", ".join(f"{name} {record['version']}" for name, record in sorted(ours.items()))
    details = [
        f"{name}: {record['place']}{' (editable)' * record['editable']}" for name, record in sorted(ours.items())
    ]
    hidden = [(name, *other) for name, record in sorted(ours.items()) for other in record["hidden"]]
    if hidden:
        name, version, place = hidden[0]
        text = f"{name} is installed twice: {ours[name]['version']} in {ours[name]['place']} hides {version} in {place}"
        # The one that hides the other often comes from a path that was set for something else.
        listed = world.environment.get("PYTHONPATH", "").split(":")
        if any(part and Path(part) == Path(ours[name]["place"]) for part in listed):
            remedy = ["unset PYTHONPATH"]
        else:
            remedy = ["# remove both, then install the one that is wanted:", f"pip uninstall {name}"]
            remedy += [f"pip uninstall {name}", f"pip install {name}"]
        return warning("wheels.installed", text, remedy, details)
    return ok("wheels.installed", names, details)


def _ranges(ours: dict[str, Any], records: dict[str, Any]) -> Finding:
    """Each component states with which versions of the others it was tested."""
    if not ours:
        return skipped("wheels.ranges", "no component is installed")
    wrong, absent, checked = [], [], 0
    for owner, record in sorted(ours.items()):
        for text in record["requires"]:
            name, wanted, conditional = requirement(text)
            if conditional:
                continue
            if name in records:
                checked += 1
                if allows(wanted, records[name]["version"]) is False:
                    wrong.append((owner, name, wanted, records[name]["version"]))
            elif re.fullmatch(OURS, name):
                absent.append((owner, name, wanted))
    if wrong:
        owner, name, wanted, version = wrong[0]
        text = f"{owner} {ours[owner]['version']} needs {name} {wanted}; {version} is installed"
        remedy = [f'pip install "{name}{wanted}"', "# or bring all of them to their newest versions:"]
        remedy.append(f"pip install --upgrade {' '.join(sorted(ours))}")
        return failure("wheels.ranges", text, remedy, [f"{o} needs {n} {w}; {v} is installed" for o, n, w, v in wrong])
    if absent:
        text = f"not installed: {', '.join(f'{name} (needed by {owner})' for owner, name, _ in absent)}"
        remedy = ["pip install " + " ".join(f'"{name}{wanted}"' for _, name, wanted in absent)]
        return warning("wheels.ranges", text, remedy)
    return ok("wheels.ranges", f"all components fit each other ({checked} ranges)")


def requirement(text: str) -> tuple[str, str, bool]:
    """A requirement's distribution and range, and whether an extra or another condition stands behind it."""
    match = _REQUIREMENT.match(text)
    if match is None:
        return text, "", True
    return re.sub(r"[-_.]+", "-", match[1]).lower(), match[2].strip(), bool(match[3])


def _tags(world: World, ours: dict[str, Any]) -> Finding:
    """An installed wheel of another interpreter comes from a copied or shared folder of packages."""
    here = Interpreter.current()
    for name, record in sorted(ours.items()):
        if record["editable"] or not record["tags"]:
            continue
        wheels = [parse_wheel_name(f"{name.replace('-', '_')}-0-{tag}.whl") for tag in record["tags"]]
        if all(misfits(wheel, here) for wheel in wheels):
            misfit = misfits(wheels[-1], here)[0]
            text = f"{name} in {record['place']} is not for this interpreter: {misfit.part} tag {misfit.tag}: {misfit.reason}"
            remedy = ["# the folder belongs to another Python; install into this one:"]
            return failure("wheels.tag", text, [*remedy, f"python -m pip install --force-reinstall --no-deps {name}"])
    tags = sorted({tag for record in ours.values() for tag in record["tags"]})
    if not tags:
        return skipped("wheels.tag", "no component is installed as a wheel")
    return ok("wheels.tag", f"{', '.join(tags)} on {world.facts('host').get('tag', here.tag)}")


def _symbols(world: World) -> Finding:
    parts = world.facts("wheels").get("native", [])
    if not parts:
        return skipped("wheels.symbols", "no native part is installed; the portable paths are used")
    problems = [problem for part in parts if (problem := links(part, str(world.facts("host").get("machine", ""))))]
    # An optional part for a framework that isn't used here is left alone by hp-kernels itself.
    used = {"torch": world.has_torch, "mindspore": world.has_mindspore, "CANN": world.has_npu_software}
    for needed in (True, False):
        for problem in problems:
            if used.get(problem.owner, True) is needed:
                return failure("wheels.symbols", problem.text, problem.remedy, problem.details, required=needed)
    text = f"all libraries and symbols of {len(parts)} native file{'s' * (len(parts) != 1)} are found"
    return ok("wheels.symbols", text, [part["path"] for part in parts])


@dataclass(frozen=True)
class LinkProblem:
    """What is wrong with how a native part is linked, and who installs the library that it is about."""

    text: str
    remedy: tuple[str, ...]
    details: tuple[str, ...] = ()
    owner: str = ""


def links(part: dict[str, Any], machine: str) -> LinkProblem | None:
    """What is wrong with how a native part is linked; None if nothing is.

    Args:
        part: as `probes.wheels.link_facts` gives it.
        machine: this machine's architecture.
    """
    name = part["path"].rpartition("/")[2]
    again = "pip install --force-reinstall --no-deps hp-kernels"
    if part.get("error"):
        return LinkProblem(part["error"], ("# it was not copied whole; install it again:", again))
    if machine and part["machine"] != machine:
        return LinkProblem(f"{name} is built for {part['machine']}, this is {machine}", (again,), (part["path"],))
    if part["missing"]:
        library = part["missing"][0]
        owner = provider(library, file=True)[1]
        more = f" (and {len(part['missing']) - 1} more)" if len(part["missing"]) > 1 else ""
        text = f"{name} needs {library}{more}, which was not found" + (f"; it is part of {owner}" if owner else "")
        details = [f"not found: {lost}" for lost in part["missing"]]
        return LinkProblem(text, tuple(_install(owner, library)), tuple(details), owner)
    if part["unresolved"]:
        symbol, version, library = part["unresolved"][0]
        expected, owner = provider(symbol)
        if library:
            expected, owner = provider(library, file=True)
        place = part.get("found", {}).get(expected)
        text = f"{name}: undefined symbol {symbol}" + (f" ({version})" if version else "")
        text += f"; {expected or 'no known library'} should have it"
        text += f", and {place} doesn't" if place else ""
        return LinkProblem(text, tuple(_newer(owner, version)), tuple(_list(part["unresolved"])), owner)
    return None


def _install(owner: str, library: str) -> list[str]:
    """Commands that bring a library."""
    return {
        "torch": ['pip install "torch>=2.7"'],
        "mindspore": ['pip install "mindspore>=2.8" "numpy<2"'],
        "CANN": ["# CANN's libraries are on the path only after:", "source /usr/local/Ascend/cann/set_env.sh"],
        "libstdc++": ["apt-get install libstdc++6", "# or, on openEuler:", "dnf install libstdc++"],
        "libgomp": ["apt-get install libgomp1", "# or, on openEuler:", "dnf install libgomp"],
    }.get(
        owner,
        [
            "# find the package that has it:",
            f"apt-file search {library}",
            "# or, on openEuler:",
            f"dnf provides '*/{library}'",
        ],
    )


def _newer(owner: str, version: str) -> list[str]:
    """Commands for a library that is there, but of another version."""
    build = ["# build the native part here, against what is installed here:", _REBUILD]
    if owner == "torch":
        return ["# it was built for another release, or another C++ ABI, of torch", *build]
    if owner == "Python":
        return ["# it was built for another Python than this one", *build]
    if owner == "CANN":
        return ["# it was built for another CANN", "source /usr/local/Ascend/cann/set_env.sh", *build]
    if version.startswith(("GLIBC", "CXXABI")):
        return [f"# it was built on a newer system, which has {version}", *build]
    return build


def _list(symbols: Sequence[Sequence[str]]) -> list[str]:
    lines = []
    for name, version, library in symbols[:_SHOWN]:
        expected = library or provider(name)[0]
        lines.append(
            f"undefined: {name}{f' ({version})' * bool(version)}{f', expected in {expected}' * bool(expected)}"
        )
    return lines + [f"... and {len(symbols) - _SHOWN} more"] * (len(symbols) > _SHOWN)
