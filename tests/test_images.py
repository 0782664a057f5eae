"""The images as text, since no engine runs here; the script that they run is run, in a clean copy, as they would run it.

`nox -s lint` has hadolint and shellcheck on the same files. What is left for a machine with an engine is that the systems' own
packages and Pythons install.
"""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from dockerfile_parse import DockerfileParser

import images
from targets import read_floors
from workspace import ROOT

TARGETS = list(read_floors().targets)
SYSTEMS = {
    "openeuler-22.03": ("openeuler/openeuler:22.03-lts-sp4", "openeuler/openeuler:22.03-lts-sp4"),
    "openeuler-24.03": ("openeuler/openeuler:24.03-lts", "openeuler/openeuler:24.03-lts"),
    "ubuntu-22.04": ("ubuntu:22.04", "ubuntu:22.04"),
    "manylinux-2.28": ("quay.io/pypa/manylinux_2_28:2026.10.03-1", "almalinux:8"),
}
COMPILERS = re.compile(r"(?<![\w+-])(?:gcc|gcc-c\+\+|g\+\+|clang|build-essential|cmake|make)(?![\w+-])")


@pytest.fixture(params=TARGETS)
def target(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def stages(target: str) -> dict[str, list[tuple[str, str]]]:
    """The instructions of each stage, in order, and under "" those before the first."""
    parser = DockerfileParser(str(ROOT / "docker" / target / "Dockerfile"))
    found: dict[str, list[tuple[str, str]]] = {"": []}
    name = ""
    for instruction in parser.structure:
        kind, value = instruction["instruction"], instruction["value"]
        if kind == "FROM":
            name = value.rpartition(" AS ")[2]
            found[name] = [(kind, value.partition(" AS ")[0])]
        elif kind != "COMMENT":
            found[name].append((kind, value))
    return found


def test_every_target_has_an_image_and_every_image_a_target() -> None:
    assert {path.parent.name for path in ROOT.glob("docker/*/Dockerfile")} == set(TARGETS) == set(SYSTEMS)


def test_base_images_and_the_order_of_stages(target: str) -> None:
    found = stages(target)
    assert list(found) == ["", "build", "test", "wheels"]
    build, run = SYSTEMS[target]
    assert found[""] == [("ARG", f"BUILD_IMAGE={build}"), ("ARG", f"RUN_IMAGE={run}")]
    assert [found[name][0] for name in ("build", "test", "wheels")] == [
        ("FROM", "${BUILD_IMAGE}"),
        ("FROM", "${RUN_IMAGE}"),
        ("FROM", "scratch"),
    ]


def test_the_build_stage_ends_with_the_script_that_everyone_runs(target: str) -> None:
    build = stages(target)["build"]
    assert build[-1] == ("RUN", f"docker/build.sh {target} ${{PYTHONS}}")
    # Tools and Pythons come before the sources, so that a change of these doesn't install those anew.
    order = [value for kind, value in build if kind in ("COPY", "RUN")]
    assert order.index(". .") == len(order) - 2
    assert ("COPY", "docker/pythons.sh docker/cann.sh docker/") in build


def test_the_test_stage_has_no_compiler_and_takes_only_what_was_built(target: str) -> None:
    test = stages(target)["test"]
    assert not [value for kind, value in test if kind == "RUN" and COMPILERS.search(value)]
    copied = [value for kind, value in test if kind == "COPY"]
    assert [value for value in copied if "--from" in value] == [
        "--from=build /opt/pythons /opt/pythons",
        "--from=build /hyper-parallel/dist /wheels",
    ]
    assert test[-1] == ("RUN", f"docker/test.sh {target} /wheels ${{PYTHONS}}")
    # What comes out has passed.
    assert stages(target)["wheels"][1:] == [("COPY", "--from=test /wheels/ /")]


def test_cann_and_the_pythons_are_arguments(target: str) -> None:
    found = stages(target)
    arguments = dict(value.partition("=")[::2] for kind, value in found["build"] if kind == "ARG")
    assert arguments["CANN_INSTALLER"] == arguments["HP_KERNELS_SOC"] == ""
    assert arguments["PYTHONS"].strip('"').split() == ["python3.10", "python3.11", "python3.12", "python3.13"]
    assert ("ARG", f"PYTHONS={arguments['PYTHONS']}") in found["test"]
    assert any(value.endswith('docker/cann.sh "${CANN_INSTALLER}"') for kind, value in found["build"] if kind == "RUN")


def test_the_shell_of_every_step_parses(target: str) -> None:
    steps = [value for found in stages(target).values() for kind, value in found if kind == "RUN"]
    assert len(steps) >= 5
    for step in steps:
        checked = subprocess.run(["bash", "-n", "-c", step], capture_output=True, text=True, check=False, timeout=20)
        assert checked.returncode == 0, f"{step}\n{checked.stderr}"


def test_the_scripts_parse_are_executable_and_say_how_they_are_used() -> None:
    scripts = sorted((ROOT / "docker").glob("*.sh"))
    assert [path.name for path in scripts] == ["build.sh", "cann.sh", "pythons.sh", "test.sh"]
    for path in scripts:
        assert os.access(path, os.X_OK), path
        subprocess.run(["bash", "-n", str(path)], check=True, timeout=20)
    for name in ("build.sh", "pythons.sh", "test.sh"):
        result = subprocess.run([ROOT / "docker" / name], capture_output=True, text=True, check=False, timeout=20)
        assert result.returncode == 2
        assert f"usage: docker/{name}" in result.stderr
    without = subprocess.run([ROOT / "docker" / "cann.sh", ""], capture_output=True, text=True, check=True, timeout=20)
    assert "left out" in without.stdout


def test_the_cann_installer_is_fetched_and_run_as_its_makers_say(tmp_path: Path) -> None:
    """By curl from wherever it is, without questions, into the folder where its set_env.sh is looked for."""
    installer = tmp_path / "toolkit.run"
    installer.write_text(f'echo "$@" > {tmp_path}/arguments\n', "utf-8")
    subprocess.run([ROOT / "docker" / "cann.sh", installer.as_uri()], check=True, timeout=60)
    assert (tmp_path / "arguments").read_text() == "--quiet --install --install-path=/usr/local/Ascend\n"


@pytest.mark.parametrize("path", [".git", ".nox", "dist", "runs", "site"])
def test_what_a_checkout_gathers_stays_out_of_the_images(path: str) -> None:
    assert path in (ROOT / ".dockerignore").read_text("utf-8").splitlines()


def fake_engine(folder: Path, name: str, info: str) -> None:
    """An engine that answers `info` as told, and writes down everything else that it is asked for."""
    folder.mkdir(exist_ok=True)
    engine = folder / name
    engine.write_text(
        f'#!/bin/sh\n[ "$1" = info ] && {{ {info}; exit; }}\necho "{name} $*" >> {folder}/asked\n', "utf-8"
    )
    engine.chmod(0o755)


def drive(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment: Mapping[str, str] = {**os.environ, "PATH": str(folder)}
    command = [sys.executable, str(ROOT / "build" / "images.py"), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=60, env=environment)


def test_an_engine_is_driven_through_the_stages(tmp_path: Path, target: str) -> None:
    fake_engine(tmp_path, "podman", "true")
    result = drive(tmp_path, target, "--arch", "aarch64", "--build-arg", "CANN_INSTALLER=https://example.org/cann.run")
    assert result.returncode == 0, result.stderr
    assert (tmp_path / "asked").read_text() == (
        f"podman build --file {ROOT}/docker/{target}/Dockerfile --target wheels --platform linux/arm64 "
        f"--build-arg CANN_INSTALLER=https://example.org/cann.run "
        f"--output type=local,dest={ROOT}/dist/{target}-aarch64 {ROOT}\n"
    )


def test_an_engine_that_does_not_answer_is_passed_over(tmp_path: Path) -> None:
    fake_engine(tmp_path, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    fake_engine(tmp_path, "podman", "true")
    assert drive(tmp_path, "ubuntu-22.04").returncode == 0
    arch = {"x86_64": "amd64", "aarch64": "arm64"}[platform.machine()]
    assert (tmp_path / "asked").read_text().startswith(f"podman build --file {ROOT}/docker/ubuntu-22.04/Dockerfile")
    assert f"linux/{arch}" in (tmp_path / "asked").read_text()


def test_without_an_engine_it_is_said_what_was_found_and_what_to_do(tmp_path: Path) -> None:
    fake_engine(tmp_path, "docker", "echo 'Cannot connect to the Docker daemon' >&2; exit 1")
    result = drive(tmp_path, "openeuler-22.03")
    assert result.returncode == 1
    assert "docker is installed and doesn't work: Cannot connect to the Docker daemon" in result.stderr
    assert "podman is not installed" in result.stderr
    assert "nox -s wheels -- --host" in result.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["solaris"], "no target 'solaris'"),
        (["ubuntu-22.04", "--arch", "mips"], "no architecture 'mips'"),
        (["ubuntu-22.04", "--build-arg", "CANN"], "NAME=VALUE, not 'CANN'"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        images.main(arguments)
    assert stopped.value.code == 2
    assert message in capsys.readouterr().err
