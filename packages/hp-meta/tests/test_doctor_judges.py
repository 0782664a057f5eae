"""Judges on made-up facts: environment variables out of range and in conflict, launchers that contradict each other."""

from __future__ import annotations

import re

import pytest

from hyper_parallel.doctor import CHECKS, Finding, Status
from hyper_parallel.doctor.checks import GROUPS
from hyper_parallel.doctor.examine import judge
from hyper_parallel.doctor.probe import Outcome
from hyper_parallel.doctor.tables import table
from hyper_parallel.doctor.world import PROFILES

NPU = {"torch_npu": Outcome({"installed": "2.9.0", "version": "2.9.0", "autoload": True, "devices": 8, "missing": {}})}


@pytest.fixture
def found(healthy):
    """A function from environment variables to the finding of one check, on an NPU machine."""

    def find(
        check: str, *, profile: str = "npu", facts: dict[str, Outcome] | None = None, **environment: str
    ) -> Finding:
        return judge({**healthy, **NPU, **(facts or {})}, environment, profile)[check]

    return find


FAILURE, WARNING, OK = Status.FAILURE, Status.WARNING, Status.OK


@pytest.mark.parametrize(
    ("environment", "text"),
    [
        ({"RANK": "0", "WORLD_SIZE": "4"}, None),
        ({"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4", "RANK_ID": "5"}, None),
        ({"RANK": "4", "WORLD_SIZE": "4"}, "RANK=4 is not below WORLD_SIZE=4: ranks are 0 to 3"),
        ({"RANK": "-1", "WORLD_SIZE": "4"}, "RANK=-1 is not below"),
        ({"RANK": "0", "WORLD_SIZE": "0"}, "WORLD_SIZE=0 should be 1 or more"),
        ({"RANK": "0"}, "RANK=0 is set, but WORLD_SIZE is not"),
        ({"WORLD_SIZE": "4"}, "every process would take itself for rank 0"),
        ({"RANK": "first", "WORLD_SIZE": "4"}, "RANK=first is not a whole number"),
        ({"RANK": "0", "WORLD_SIZE": "4", "RANK_ID": "1"}, "contradict each other: RANK=0, RANK_ID=1"),
        ({"RANK": "0", "WORLD_SIZE": "4", "OMPI_COMM_WORLD_SIZE": "8"}, "WORLD_SIZE=4, OMPI_COMM_WORLD_SIZE=8"),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "2"}, "LOCAL_RANK=2 is above RANK=1"),
        (
            {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "3", "LOCAL_WORLD_SIZE": "2"},
            "LOCAL_RANK=3 is not below LOCAL_WORLD_SIZE=2",
        ),
        ({"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "8"}, "LOCAL_WORLD_SIZE=8 is above WORLD_SIZE=4"),
    ],
)
def test_ranks_that_contradict_each_other(found, environment, text):
    finding = found("launch.ranks", profile="cpu", **environment)
    assert finding.status is (OK if text is None else FAILURE), finding
    if text is not None:
        assert text in finding.text
        assert any(line.startswith("unset ") for line in finding.remedy)
        assert any(line.startswith("torchrun ") for line in finding.remedy)


@pytest.mark.parametrize(
    ("environment", "outcome", "status", "text"),
    [
        ({}, Outcome(), Status.SKIPPED, "are not set"),
        ({"RANK": "1", "WORLD_SIZE": "4"}, Outcome(), FAILURE, "the ranks can't find each other"),
        ({"MASTER_ADDR": "node0"}, Outcome(), FAILURE, "MASTER_PORT is not"),
        ({"MASTER_PORT": "29500"}, Outcome(), FAILURE, "MASTER_ADDR is not"),
        ({"MASTER_ADDR": "node0", "MASTER_PORT": "66000"}, Outcome(), FAILURE, "is no port"),
        (
            {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
            Outcome({"lookup.error": "Name or service not known"}),
            FAILURE,
            "can't be looked up: Name",
        ),
        (
            {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
            Outcome({}, "hung: no answer within 60 s"),
            FAILURE,
            "can't be looked up: hung",
        ),
        (
            {"MASTER_ADDR": "node0", "MASTER_PORT": "29500"},
            Outcome({"addresses": ["10.0.0.1"]}),
            OK,
            "node0:29500 (10.0.0.1)",
        ),
        (
            {
                "MASTER_ADDR": "localhost",
                "MASTER_PORT": "29500",
                "RANK": "0",
                "WORLD_SIZE": "16",
                "LOCAL_WORLD_SIZE": "8",
            },
            Outcome(),
            FAILURE,
            "only 8 of 16 ranks",
        ),
    ],
)
def test_the_place_where_ranks_meet(found, environment, outcome, status, text):
    finding = found("launch.master", profile="cpu", facts={"network": outcome}, **environment)
    assert (finding.status, text in finding.text) == (status, True), finding


def test_inside_a_job_the_port_is_the_launchers_own(found):
    network = Outcome(
        {"addresses": ["127.0.0.1"], "bind.error": [98, "Address already in use"], "free": 1, "holder": None}
    )
    master = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500"}
    assert found("launch.port", facts={"network": network}, **master).status is FAILURE
    assert found("launch.port", facts={"network": network}, **master, TORCHELASTIC_RUN_ID="x").status is Status.SKIPPED


@pytest.mark.parametrize(
    ("facts", "check", "status", "text"),
    [
        ({"open-files": [200, None]}, "launch.open-files", FAILURE, "200 files"),
        ({"open-files": [512, 4096]}, "launch.open-files", WARNING, "512 files"),
        ({"open-files": [None, None]}, "launch.open-files", OK, "no limit"),
        ({"shared-memory": [64 << 20, 60 << 20]}, "launch.shared-memory", WARNING, "docker's default"),
        ({"shared-memory": [8 << 30, 1 << 20]}, "launch.shared-memory", WARNING, "left by dead processes"),
        ({"system": "darwin", "machine": "arm64"}, "host.os", FAILURE, "runs on Linux"),
        ({"python": "3.9.18"}, "host.python", FAILURE, "3.10 to 3.13"),
        ({"python": "3.14.0"}, "host.python", FAILURE, "3.10 to 3.13"),
        ({"implementation": "PyPy"}, "host.python", FAILURE, "built for CPython"),
        ({"threaded": True}, "host.python", WARNING, "without the global lock"),
        ({"glibc": None}, "host.glibc", WARNING, "glibc was not found"),
    ],
)
def test_hosts_that_do_not_do(healthy, facts, check, status, text):
    world = {**healthy, "host": Outcome({**healthy["host"].facts, **facts})}
    finding = judge(world, {}, "cpu")[check]
    assert (finding.status, text in finding.text) == (status, True), finding
    assert finding.remedy or status is OK


def test_a_folder_of_packages_of_another_python(healthy):
    """As when site-packages was copied, or PYTHONPATH names that of another environment."""
    record = {"version": "0.1.0", "place": "/copied", "hidden": [], "requires": [], "editable": False}
    distributions = {"hp-kernels": {**record, "tags": ["cp39-cp39-manylinux_2_28_x86_64", "cp39-cp39-linux_x86_64"]}}
    finding = judge({**healthy, "wheels": Outcome({"distributions": distributions, "native": []})}, {}, "cpu")[
        "wheels.tag"
    ]
    assert finding.status is FAILURE
    assert "hp-kernels in /copied is not for this interpreter: Python tag cp39" in finding.text
    assert "python -m pip install --force-reinstall --no-deps hp-kernels" in finding.remedy
    distributions["hp-kernels"]["editable"] = True  # built where it is used
    world = {**healthy, "wheels": Outcome({"distributions": distributions, "native": []})}
    assert judge(world, {}, "cpu")["wheels.tag"].status is OK


def test_a_machine_with_cuda(healthy):
    facts = healthy["torch_itself"].facts
    found = {"cuda.build": "12.8", "cuda.devices": ["NVIDIA H200"], "cuda.nccl": "2.27.3", "backends": ["gloo", "nccl"]}

    def cuda(**changes: object) -> Finding:
        world = {**healthy, "torch_itself": Outcome({**facts, **found, **changes})}
        return judge(world, {}, "cuda")["torch.cuda"]

    assert cuda().text == "1 x NVIDIA H200, CUDA 12.8, NCCL 2.27.3"
    hidden = cuda(**{"cuda.devices": []})
    assert (hidden.status, "nvidia-smi" in hidden.remedy) == (FAILURE, True)
    assert "without NCCL" in cuda(**{"cuda.nccl": None}).text


def test_without_a_framework_the_cpu_profile_warns_and_the_others_fail(healthy):
    world = {**healthy, "torch_itself": Outcome({"installed": None})}
    assert judge(world, {}, "cpu")["torch.version"].status is WARNING
    assert judge(world, {}, "cpu").exit_code() == 0
    for profile in ("cuda", "npu"):
        assert judge(world, {}, profile)["torch.version"].status is FAILURE
    assert judge(world, {}, "mindspore")["mindspore.version"].status is FAILURE


@pytest.mark.parametrize("profile", PROFILES)
def test_whatever_dies_every_check_has_a_finding(healthy, profile):
    """Also when every probe died at its first step; and a remedy never is empty."""
    dead = {name: Outcome({}, "was killed by SIGKILL", "something") for name in healthy}
    for outcomes in (healthy, dead):
        report = judge(outcomes, {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "HCCL_BUFFSIZE": "x"}, profile)
        assert [finding.id for finding in report.findings] == [check for check in CHECKS if check != "run.collectives"]
        for finding in report.findings:
            assert bool(finding.remedy) is (finding.status in (WARNING, FAILURE)), finding
            assert "\n" not in finding.text
    for check in ("torch.version", "mindspore.version"):  # death is no absence
        assert "was killed by SIGKILL (during: something)" in judge(dead, {}, profile)[check].text


def test_ids_are_in_the_order_of_their_groups_and_name_faq_entries():
    groups = [check.group for check in CHECKS.values()]
    assert [group for group in GROUPS if group in groups] == list(dict.fromkeys(groups))
    assert all(re.fullmatch(r"[a-z]+\.[a-z-]+", check) for check in CHECKS)
    assert all(check.faq is None or 1 <= check.faq <= 16 for check in CHECKS.values())


def test_tables_say_where_their_numbers_come_from():
    assert {entry["check"] for entry in table("hccl_variables")["variables"].values()} <= set(CHECKS)
    assert all(entry["source"].startswith("https://") for entry in table("hccl_variables")["variables"].values())
    for framework in ("torch_npu", "mindspore"):
        assert table("cann_versions")[framework]["sources"]
