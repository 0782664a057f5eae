"""Judges of the group `host`: system, Python, and the C and C++ libraries that the native parts want."""

from __future__ import annotations

from hyper_parallel.doctor.finding import Finding, failure, ok, skipped, warning
from hyper_parallel.doctor.tables import table
from hyper_parallel.doctor.versions import release
from hyper_parallel.doctor.world import World

__all__ = ["judge"]

_OLDEST, _NEWEST = (3, 10), (3, 13)


def judge(world: World) -> list[Finding]:
    """The findings of the group."""
    outcome = world.outcome("host")
    if outcome.end:
        text = f"looking at this machine {outcome.story}"
        return [
            failure("host.os", text, ["# please report this, with:", "hyper-parallel doctor --json"], outcome.output),
            *(skipped(check, "not known") for check in ("host.python", "host.glibc", "host.libstdcxx")),
        ]
    return [
        _system(world),
        _python(world),
        _library(world, "host.glibc", "GLIBC_", "glibc", _text(world.facts("host").get("glibc"))),
        _library(world, "host.libstdcxx", "GLIBCXX_", "GLIBCXX", str(world.facts("host").get("glibcxx", ""))),
    ]


def _text(version: list[int] | None) -> str:
    return ".".join(map(str, version)) if version else ""


def _system(world: World) -> Finding:
    facts = world.facts("host")
    system, machine = facts["system"], facts["machine"]
    name = facts.get("os") or system
    if system == "linux" and machine in ("x86_64", "aarch64"):
        return ok("host.os", f"{name}, {machine}", [f"kernel {facts.get('kernel')}"])
    return failure(
        "host.os",
        f"{name} on {machine}: HyperParallel runs on Linux, x86_64 and aarch64",
        ["# work in a container:", 'docker run --rm -it --ipc=host -v "$PWD":/src -w /src python:3.11 bash'],
    )


def _python(world: World) -> Finding:
    facts = world.facts("host")
    text = f"Python {facts['python']} ({facts['tag']})"
    remedy = ["python3.11 -m venv ~/hyper-parallel", "~/hyper-parallel/bin/pip install hyper-parallel"]
    details = [str(facts["executable"])]
    version = release(facts["python"])[:2]
    if facts["implementation"] != "CPython":
        text = f"{facts['implementation']} {facts['python']}: the frameworks are built for CPython"
        return failure("host.python", text, remedy, details)
    if not _OLDEST <= (*version, 0)[:2] <= _NEWEST:
        return failure("host.python", f"{text}: 3.10 to 3.13 are supported", remedy, details)
    if facts.get("threaded"):
        text = f"{text}: a build without the global lock; neither framework supports it fully"
        return warning("host.python", text, remedy, details)
    return ok("host.python", text, details)


def _library(world: World, check: str, prefix: str, name: str, here: str) -> Finding:
    """One of the two libraries against the newest version of it that a native part asks for."""
    wanted = [
        (release(version[len(prefix) :]), version, part["path"])
        for part in world.facts("wheels").get("native", ())
        for _, version in part["wanted"]
        if version.startswith(prefix) and release(version[len(prefix) :])
    ]
    if not here:
        text = f"{name} was not found: native parts can't be used; everything works without them, only slower"
        return warning(check, text, ["# on a system with glibc:", "pip install hp-kernels"])
    if not wanted:
        return ok(check, f"{name} {here}; no native part needs it")
    newest, version, path = max(wanted)
    if newest <= release(here):
        return ok(check, f"{name} {here}; the native parts need {version[len(prefix) :]}")
    fitting = [
        target["name"] for target in table("targets")["targets"] if release(target[name.lower()]) <= release(here)
    ]
    remedy = [
        "# build it on this machine:",
        "pip install --force-reinstall --no-deps --no-binary hp-kernels hp-kernels",
    ]
    if fitting:
        remedy += [
            "# or, in a checkout, build it for a system as old as this one:",
            f"nox -s wheels -- --target {fitting[0]}",
        ]
    return failure(check, f"{name} {here} is too old: {version} is needed by {path}", remedy)
