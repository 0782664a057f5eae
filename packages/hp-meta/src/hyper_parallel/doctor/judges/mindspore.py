"""Judges of the group `mindspore`: version, the NumPy it needs, and whether it computes."""

from __future__ import annotations

from hyper_parallel.doctor.finding import Finding, failure, ok, skipped, warning
from hyper_parallel.doctor.versions import release
from hyper_parallel.doctor.world import World

__all__ = ["judge"]

_OLDEST = (2, 8)
_INSTALL = 'pip install "mindspore>=2.8" "numpy<2"'


def judge(world: World) -> list[Finding]:
    """The findings of the group."""
    if not world.has_mindspore:
        text = "MindSpore is not installed"
        if world.needs_mindspore:
            first = failure("mindspore.version", f"{text}; the profile {world.profile} needs it", [_INSTALL])
        else:
            first = skipped("mindspore.version", text)
        return [first, skipped("mindspore.numpy", text), skipped("mindspore.run", text)]
    return [_version(world), _numpy(world), _run(world)]


def _version(world: World) -> Finding:
    outcome = world.outcome("mindspore_itself")
    facts = outcome.facts
    if outcome.end and "installed" not in facts:
        text = f"looking for MindSpore: the probe {outcome.story}"
        remedy = ["python -m pip show mindspore"]
        return failure("mindspore.version", text, remedy, outcome.output, required=world.needs_mindspore)
    installed = facts.get("version") or facts["installed"]
    if not installed:
        return warning(
            "mindspore.version", "there is a folder `mindspore` on the path, but no installed distribution", [_INSTALL]
        )
    if release(installed) < _OLDEST:
        text = f"MindSpore {installed} is too old: 2.8 or newer is needed"
        return failure(
            "mindspore.version", text, [f"pip install --upgrade {_INSTALL[12:]}"], required=world.needs_mindspore
        )
    return ok("mindspore.version", f"MindSpore {installed}")


def _numpy(world: World) -> Finding:
    facts = world.facts("mindspore_itself")
    if "numpy" not in facts:
        return skipped("mindspore.numpy", "not known")
    version, needed = facts["numpy"], world.needs_mindspore
    if version is None:
        return failure(
            "mindspore.numpy", "NumPy is not installed; MindSpore needs it", ['pip install "numpy<2"'], required=needed
        )
    if release(version) >= (2,):
        text = f"NumPy {version} is installed; MindSpore needs a version below 2"
        remedy = [
            'pip install "numpy<2"',
            "# if something else needs NumPy 2, give MindSpore an environment of its own:",
        ]
        remedy += ["python -m venv ~/mindspore", f"~/mindspore/bin/{_INSTALL}"]
        return failure("mindspore.numpy", text, remedy, required=needed)
    return ok("mindspore.numpy", f"NumPy {version}")


def _run(world: World) -> Finding:
    outcome = world.outcome("mindspore_itself")
    needed = world.needs_mindspore
    if outcome.end:
        remedy = ["# try it by hand:", 'python -X faulthandler -c "import mindspore; mindspore.run_check()"']
        numpy = outcome.facts.get("numpy") or ""
        if release(numpy) >= (2,):
            remedy = ["# NumPy 2 is the likely cause:", 'pip install "numpy<2"', *remedy]
        else:
            remedy += [f"# or install it anew:\npip install --force-reinstall {_INSTALL[12:]}"]
            remedy = [line for part in remedy for line in part.split("\n")]
        text = f"MindSpore can't be used: it {outcome.story}"
        return failure("mindspore.run", text, remedy, outcome.output, required=needed)
    if outcome.facts.get("sum") != [11.0, 22.0]:
        text = f"MindSpore adds [1, 2] and [10, 20] to {outcome.facts.get('sum')}"
        return failure("mindspore.run", text, [f"pip install --force-reinstall {_INSTALL[12:]}"], required=needed)
    return ok("mindspore.run", "imports, and computes on the CPU")
