"""Judges of the group `cann`: the installation, its environment, its version against the frameworks, and the driver."""

from __future__ import annotations

from pathlib import Path

from hyper_parallel.doctor.finding import Finding, failure, ok, skipped, warning
from hyper_parallel.doctor.probe import Facts
from hyper_parallel.doctor.tables import table
from hyper_parallel.doctor.versions import release
from hyper_parallel.doctor.world import World

__all__ = ["judge"]

_CHECKS = ("cann.home", "cann.env", "cann.version", "cann.driver")


def judge(world: World) -> list[Finding]:
    """The findings of the group."""
    outcome = world.outcome("cann")
    nothing = not (outcome.facts.get("homes") or outcome.facts.get("stated"))
    if nothing and not outcome.end and not world.has_npu_software:
        return [skipped(check, "CANN is not installed") for check in _CHECKS]
    if outcome.end and "homes" not in outcome.facts:
        text = f"looking for CANN {outcome.story}"
        remedy = ["# is /usr/local/Ascend on a network disk that doesn't answer?", "df /usr/local/Ascend"]
        first = failure("cann.home", text, remedy, outcome.output, required=world.needs_npu)
        return [first, *(skipped(check, "not known") for check in _CHECKS[1:])]
    return [_home(world), _environment(world), _version(world), _driver(world)]


def _home(world: World) -> Finding:
    facts, home = world.facts("cann"), world.cann_home
    stated = facts.get("stated")
    if stated and not facts.get("stated-exists"):
        text = f"ASCEND_HOME_PATH is {stated}, which doesn't exist"
        if home is None:
            return failure(
                "cann.home", f"{text}, and CANN is in none of its usual places", _install(), required=world.needs_npu
            )
        return failure("cann.home", f"{text}; CANN is in {home['home']}", _source(home), required=world.needs_npu)
    if home is None:
        text = (
            "CANN is not installed: neither /usr/local/Ascend/cann nor /usr/local/Ascend/ascend-toolkit/latest exists"
        )
        return failure("cann.home", text, _install(), required=world.needs_npu)
    text = f"CANN {home['version'] or 'of unknown version'} in {home['home']}"
    details = [
        f"layout: {home['layout']}",
        *(f"also: {other['home']} ({other['version']})" for other in facts["homes"][1:]),
    ]
    missing = home["missing"]
    if missing:
        package = next(iter(missing.values()))
        lost = ", ".join(missing)
        remedy = _package(home, package)
        if set(missing.values()) == {"kernels"}:
            return warning("cann.home", f"{text}: the compiled operators are missing ({lost})", remedy, details)
        return failure("cann.home", f"{text} is not whole: {lost} missing", remedy, details, required=world.needs_npu)
    return ok("cann.home", text, details)


def _environment(world: World) -> Finding:
    """`set_env.sh` sets several variables; a shell that lost some of them half works."""
    facts, home = world.facts("cann"), world.cann_home
    if home is None:
        return skipped("cann.env", "CANN is not installed")
    needed = world.needs_npu
    remedy = _source(home)
    if not facts.get("stated"):
        text = "set_env.sh has not been sourced: ASCEND_HOME_PATH is not set"
        return failure("cann.env", text, remedy, required=needed)
    if not facts.get("stated-exists"):
        return failure("cann.env", "ASCEND_HOME_PATH names no folder (see cann.home)", remedy, required=needed)
    libraries = Path(home["home"], "lib64")
    lost = []
    if not _contains(world.environment.get("LD_LIBRARY_PATH", ""), libraries):
        lost.append(f"LD_LIBRARY_PATH lacks {libraries}")
    opp = world.environment.get("ASCEND_OPP_PATH")
    if not opp:
        lost.append("ASCEND_OPP_PATH is not set")
    elif not Path(opp).is_dir():
        lost.append(f"ASCEND_OPP_PATH is {opp}, which doesn't exist")
    if lost:
        return failure(
            "cann.env", f"set_env.sh has not been sourced in this shell: {lost[0]}", remedy, lost, required=needed
        )
    return ok("cann.env", f"{home['script'] or 'set_env.sh'} has been sourced")


def _version(world: World) -> Finding:
    home = world.cann_home
    if home is None:
        return skipped("cann.version", "CANN is not installed")
    version = home["version"]
    if not version:
        remedy = [f"ls {home['home']}/*-linux/ascend_toolkit_install.info", f"ls {home['home']}/compiler/version.info"]
        return warning("cann.version", f"no file of {home['home']} says its version", remedy)
    versions = table("cann_versions")
    notes, unknown = [], []
    for name, wanted, matching in (_torch_npu(world), _mindspore(world)):
        if not name:
            continue
        if not wanted:
            unknown.append(f"{name} is not in the table of {versions['as_of']}; see its release notes")
        elif release(version)[:2] not in {_pair(entry) for entry in wanted}:
            text = f"CANN {version} is not what {name} is for: {' or '.join(wanted)}"
            remedy = [
                *_install(wanted[-1]),
                *([f"# or, for CANN {version}:", f"pip install {matching}"] if matching else []),
            ]
            return failure("cann.version", text, remedy, required=world.needs_npu)
        else:
            notes.append(f"{name} is for CANN {', '.join(wanted)}")
    if unknown:
        return warning(
            "cann.version",
            f"CANN {version}; {unknown[0]}",
            [f"cat {home['home']}/*-linux/ascend_toolkit_install.info"],
            notes,
        )
    return ok("cann.version", f"CANN {version}" + (f"; {'; '.join(notes)}" if notes else "; no framework needs it"))


def _pair(version: str) -> tuple[int, ...]:
    return release(version)[:2]


def _torch_npu(world: World) -> tuple[str, list[str], str]:
    """The installed torch_npu, the CANN it is for, and the release of it that is for the CANN that is here."""
    installed = world.facts("torch_npu").get("installed")
    if not installed:
        return "", [], ""
    known = table("cann_versions")["torch_npu"]["versions"]
    here = _pair((world.cann_home or {}).get("version") or "")
    fitting = [name for name, cann in known.items() if _pair(cann) == here and release(name) == release(installed)]
    fitting += [name for name, cann in known.items() if _pair(cann) == here]
    matching = f"torch-npu=={fitting[0]} torch=={fitting[0].partition('.post')[0]}" if fitting else ""
    return f"torch_npu {installed}", [known[installed]] if installed in known else [], matching


def _mindspore(world: World) -> tuple[str, list[str], str]:
    """The same for MindSpore, whose own list, read from its files, comes before the table."""
    facts = world.facts("mindspore_itself")
    installed = facts.get("installed")
    if not installed:
        return "", [], ""
    known = table("cann_versions")["mindspore"]["versions"]
    here = (world.cann_home or {}).get("version") or ""
    fitting = [
        name
        for name, cann in known.items()
        if _pair(here) in {_pair(entry) for entry in cann} and release(name) >= (2, 8)
    ]
    return (
        f"MindSpore {installed}",
        facts.get("cann") or known.get(installed, []),
        f"mindspore=={fitting[0]}" if fitting else "",
    )


def _driver(world: World) -> Finding:
    facts, outcome = world.facts("cann"), world.outcome("cann")
    needed = world.needs_npu
    tool, driver = facts.get("npu-smi"), facts.get("driver")
    if outcome.end:
        text = f"npu-smi info {outcome.end}: the driver doesn't answer"
        return failure(
            "cann.driver",
            text,
            ["dmesg | grep -i davinci | tail", "# then, if it stays so:", "reboot"],
            outcome.output,
            required=needed,
        )
    if not tool:
        if driver is None and not facts.get("nodes"):
            text = "no NPU driver: /usr/local/Ascend/driver, /dev/davinci* and npu-smi are missing"
            remedy = [
                "# on the host, install the driver and firmware packages of the device:",
                "./Ascend-hdk-*-npu-driver_*.run --full --install-for-all",
                "# in a container, hand the devices and the driver in:",
                "docker run --device /dev/davinci0 --device /dev/davinci_manager --device /dev/devmm_svm --device /dev/hisi_hdc "
                "-v /usr/local/Ascend/driver:/usr/local/Ascend/driver -v /usr/local/bin/npu-smi:/usr/local/bin/npu-smi ...",
            ]
            return failure("cann.driver", text, remedy, required=needed)
        return warning(
            "cann.driver",
            f"driver {driver}; npu-smi is not on the path",
            ['export PATH="$PATH:/usr/local/sbin:/usr/local/bin"'],
        )
    if facts.get("npu-smi.error") or facts.get("npu-smi.status"):
        said = facts.get("npu-smi.error") or " ".join(facts.get("npu-smi.output", [])[-1:])
        text = f"npu-smi info fails: {said or 'exit status ' + str(facts['npu-smi.status'])}"
        remedy = ["# the driver's libraries must be on the path:", "source /usr/local/Ascend/driver/bin/setenv.bash"]
        remedy += ["# and the user in the group of the devices:", "ls -l /dev/davinci*", "id"]
        return failure("cann.driver", text, remedy, facts.get("npu-smi.output", ()), required=needed)
    devices = facts.get("devices") or []
    ill = [device for device in devices if device[2] != "OK"]
    listed = [" ".join(device) for device in devices]
    if ill:
        text = f"NPU {ill[0][0]} ({ill[0][1]}) is in health state {ill[0][2]}"
        return failure("cann.driver", text, [f"npu-smi info -t health -i {ill[0][0]}"], listed, required=needed)
    if not devices:
        return failure(
            "cann.driver",
            "npu-smi info lists no NPU",
            ["lspci | grep -i accelerators", "npu-smi info"],
            facts.get("npu-smi.output", ()),
            required=needed,
        )
    return ok("cann.driver", f"driver {driver or 'of unknown version'}, {len(devices)} x {devices[0][1]}", listed)


def _contains(paths: str, folder: Path) -> bool:
    """Whether a search path holds a folder, under whatever name."""
    return any(
        Path(path) == folder or (Path(path).is_dir() and folder.is_dir() and Path(path).samefile(folder))
        for path in paths.split(":")
        if path
    )


def _source(home: Facts) -> list[str]:
    if home["script"]:
        return [f"source {home['script']}"]
    return [f"# {home['home']} has no set_env.sh: the installation is not whole", *_package(home, "toolkit")]


def _install(version: str = "9.0.0") -> list[str]:
    """How CANN is installed; from 8.5 on the operators are a package of their own."""
    whole = version if version.count(".") > 1 or "RC" in version else f"{version}.0"
    if _pair(version) < (8, 5):
        return [
            f"bash Ascend-cann-toolkit_{whole}_linux-$(uname -m).run --install",
            f"bash Ascend-cann-kernels-*_{whole}_linux-$(uname -m).run --install",
            "source /usr/local/Ascend/ascend-toolkit/set_env.sh",
        ]
    return [
        f"bash Ascend-cann-toolkit_{whole}_linux-$(uname -m).run --install",
        f"bash Ascend-cann-*-ops_{whole}_linux-$(uname -m).run --install",
        "source /usr/local/Ascend/cann/set_env.sh",
    ]


def _package(home: Facts, package: str) -> list[str]:
    """The command that brings a piece that is missing."""
    version = home["version"] or "<version>"
    kernels = "kernels-*" if home["layout"] == "ascend-toolkit" else "*-ops"
    name = f"cann-{kernels}" if package == "kernels" else "cann-toolkit"
    return [f"bash Ascend-{name}_{version}_linux-$(uname -m).run --install"]
