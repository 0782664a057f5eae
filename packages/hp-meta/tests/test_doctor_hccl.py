"""HCCL's environment variables: out of range, misspelt, against each other, and against the interfaces of the host."""

from __future__ import annotations

import json

import pytest

from hyper_parallel.doctor import Finding, Status
from hyper_parallel.doctor.examine import judge
from hyper_parallel.doctor.interfaces import Pattern, chosen
from hyper_parallel.doctor.probe import Outcome

FAILURE, WARNING, OK = Status.FAILURE, Status.WARNING, Status.OK
NPU = {"torch_npu": Outcome({"installed": "2.9.0", "version": "2.9.0", "autoload": True, "devices": 8, "missing": {}})}


@pytest.fixture
def found(healthy):
    """A function from environment variables to the finding of one check, on an NPU machine."""

    def find(
        check: str, *, profile: str = "npu", facts: dict[str, Outcome] | None = None, **environment: str
    ) -> Finding:
        return judge({**healthy, **NPU, **(facts or {})}, environment, profile)[check]

    return find


@pytest.mark.parametrize(
    ("check", "environment", "status", "text", "command"),
    [
        ("hccl.connect-timeout", {}, OK, "HCCL_CONNECT_TIMEOUT is not set (120 s)", ""),
        ("hccl.connect-timeout", {"HCCL_CONNECT_TIMEOUT": "600"}, OK, "HCCL_CONNECT_TIMEOUT=600 s", ""),
        (
            "hccl.connect-timeout",
            {"HCCL_CONNECT_TIMEOUT": "60"},
            FAILURE,
            "=60 is out of range: 120 to 7200 s",
            "export HCCL_CONNECT_TIMEOUT=120",
        ),
        (
            "hccl.connect-timeout",
            {"HCCL_CONNECT_TIMEOUT": "7201"},
            FAILURE,
            "120 to 7200 s",
            "export HCCL_CONNECT_TIMEOUT=7200",
        ),
        (
            "hccl.connect-timeout",
            {"HCCL_CONNECT_TIMEOUT": "10min"},
            FAILURE,
            "10min is not a whole number of s",
            "export HCCL_CONNECT_TIMEOUT=120",
        ),
        ("hccl.exec-timeout", {}, OK, "(1836 s)", ""),
        ("hccl.exec-timeout", {"HCCL_EXEC_TIMEOUT": "-1"}, FAILURE, "out of range", "export HCCL_EXEC_TIMEOUT=0"),
        ("hccl.exec-timeout", {"HCCL_EXEC_TIMEOUT": "0"}, WARNING, "waits for ever", "export HCCL_EXEC_TIMEOUT=1836"),
        ("hccl.exec-timeout", {"HCCL_EXEC_TIMEOUT": "20000"}, WARNING, "910A", "export HCCL_EXEC_TIMEOUT=17340"),
        ("hccl.exec-timeout", {"HCCL_EXEC_TIMEOUT": "30"}, WARNING, "is short", "export HCCL_EXEC_TIMEOUT=1836"),
        (
            "hccl.exec-timeout",
            {"HCCL_EXEC_TIMEOUT": "1836", "HCCL_OP_EXPANSION_MODE": "AIV"},
            WARNING,
            "HCCL takes 1091 s",
            "export HCCL_EXEC_TIMEOUT=1091",
        ),
        ("hccl.event-timeout", {}, OK, "above HCCL_EXEC_TIMEOUT (1836 s)", ""),
        (
            "hccl.event-timeout",
            {"HCCL_EVENT_TIMEOUT": "1800"},
            FAILURE,
            "1800 s, which is not above HCCL_EXEC_TIMEOUT, 1836 s",
            "export HCCL_EVENT_TIMEOUT=1868",
        ),
        (
            "hccl.event-timeout",
            {"HCCL_EVENT_TIMEOUT": "3600", "HCCL_EXEC_TIMEOUT": "3600"},
            FAILURE,
            "not above",
            "export HCCL_EVENT_TIMEOUT=3632",
        ),
        (
            "hccl.event-timeout",
            {"HCCL_EXEC_TIMEOUT": "3600"},
            WARNING,
            "1868 s, which is not above HCCL_EXEC_TIMEOUT, 3600 s",
            "export HCCL_EVENT_TIMEOUT=3632",
        ),
        (
            "hccl.event-timeout",
            {"HCCL_EVENT_TIMEOUT": "9", "HCCL_EXEC_TIMEOUT": "0"},
            FAILURE,
            "never ends",
            "export HCCL_EVENT_TIMEOUT=0",
        ),
        (
            "hccl.event-timeout",
            {"HCCL_EVENT_TIMEOUT": "0", "HCCL_EXEC_TIMEOUT": "3600"},
            OK,
            "HCCL_EVENT_TIMEOUT=0",
            "",
        ),
        ("hccl.whitelist", {"HCCL_WHITELIST_DISABLE": "1"}, OK, "=1", ""),
        (
            "hccl.whitelist",
            {"HCCL_WHITELIST_DISABLE": "true"},
            FAILURE,
            "allowed are 0, 1",
            "export HCCL_WHITELIST_DISABLE=1",
        ),
        (
            "hccl.whitelist",
            {"HCCL_WHITELIST_DISABLE": "0"},
            FAILURE,
            "HCCL_WHITELIST_FILE is not set",
            "export HCCL_WHITELIST_DISABLE=1",
        ),
        (
            "hccl.whitelist",
            {"HCCL_WHITELIST_DISABLE": "0", "HCCL_WHITELIST_FILE": "/no/list"},
            FAILURE,
            "can't be read: No such file",
            "echo",
        ),
        (
            "hccl.whitelist",
            {"HCCL_WHITELIST_FILE": "/no/list"},
            WARNING,
            "switches the list off",
            "export HCCL_WHITELIST_DISABLE=0",
        ),
        ("hccl.if-ip", {"HCCL_IF_IP": "192.168.1.5"}, OK, "on eth0", ""),
        ("hccl.if-ip", {"HCCL_IF_IP": "fe80:0::1"}, OK, "on enp3s0", ""),
        (
            "hccl.if-ip",
            {"HCCL_IF_IP": "192.168.1.6"},
            FAILURE,
            "is no address of this host",
            "export HCCL_IF_IP=10.0.0.5",
        ),
        ("hccl.if-ip", {"HCCL_IF_IP": "eth0"}, FAILURE, "is no IP address", "unset HCCL_IF_IP"),
        (
            "hccl.if-ip",
            {"HCCL_IF_IP": "10.0.0.5", "HCCL_SOCKET_IFNAME": "eth"},
            WARNING,
            "HCCL_IF_IP (10.0.0.5, enp3s0) wins",
            "unset HCCL_IF_IP",
        ),
        ("hccl.socket-ifname", {"HCCL_SOCKET_IFNAME": "eth,enp"}, OK, "enp3s0 is used", ""),
        ("hccl.socket-ifname", {"HCCL_SOCKET_IFNAME": "=eth0"}, OK, "eth0 is used", ""),
        (
            "hccl.socket-ifname",
            {"HCCL_SOCKET_IFNAME": "=eth"},
            FAILURE,
            "fits no interface of this host (enp3s0, eth0, lo)",
            "export HCCL_SOCKET_IFNAME==enp3s0",
        ),
        (
            "hccl.socket-ifname",
            {"HCCL_SOCKET_IFNAME": "bond0"},
            FAILURE,
            "fits no interface",
            "export HCCL_SOCKET_IFNAME==",
        ),
        (
            "hccl.socket-ifname",
            {"HCCL_SOCKET_IFNAME": "^eth,enp,lo"},
            FAILURE,
            "leaves no interface",
            "export HCCL_SOCKET_IFNAME==",
        ),
        ("hccl.socket-ifname", {"HCCL_SOCKET_IFNAME": "^=lo,enp3s0"}, OK, "eth0 is used", ""),
        (
            "hccl.socket-ifname",
            {"HCCL_SOCKET_FAMILY": "ipv6"},
            FAILURE,
            "allowed are AF_INET, AF_INET6",
            "export HCCL_SOCKET_FAMILY=AF_INET",
        ),
        (
            "hccl.socket-ifname",
            {"HCCL_SOCKET_FAMILY": "AF_INET6", "HCCL_SOCKET_IFNAME": "eth0"},
            FAILURE,
            "eth0 has no IPv6 address",
            "export HCCL_SOCKET_FAMILY=AF_INET",
        ),
        (
            "hccl.if-base-port",
            {"HCCL_IF_BASE_PORT": "65530"},
            FAILURE,
            "1024 to 65520",
            "export HCCL_IF_BASE_PORT=65520",
        ),
        ("hccl.buffsize", {"HCCL_BUFFSIZE": "0"}, FAILURE, "out of range", "export HCCL_BUFFSIZE=1"),
        ("hccl.buffsize", {"HCCL_BUFFSIZE": "8192"}, WARNING, "16 GB of device memory", "export HCCL_BUFFSIZE=200"),
        ("hccl.deterministic", {"HCCL_DETERMINISTIC": "strict"}, OK, "=strict", ""),
        (
            "hccl.deterministic",
            {"HCCL_DETERMINISTIC": "True"},
            FAILURE,
            "allowed are false, true, strict",
            "export HCCL_DETERMINISTIC=true",
        ),
        (
            "hccl.deterministic",
            {"HCCL_DETERMINISTIC": "false", "HYPER_PARALLEL_DETERMINISTIC": "1"},
            FAILURE,
            "asks for HCCL_DETERMINISTIC=true, and false is set",
            "export HCCL_DETERMINISTIC=true",
        ),
        (
            "hccl.deterministic",
            {"HCCL_DETERMINISTIC": "true", "HYPER_PARALLEL_DETERMINISTIC": "3"},
            FAILURE,
            "asks for HCCL_DETERMINISTIC=strict, and true is set",
            "export HCCL_DETERMINISTIC=strict",
        ),
        (
            "hccl.deterministic",
            {"HCCL_DETERMINISTIC": "strict", "HYPER_PARALLEL_DETERMINISTIC": "1"},
            OK,
            "HCCL_DETERMINISTIC=strict",
            "",
        ),
        (
            "hccl.expansion-mode",
            {"HCCL_OP_EXPANSION_MODE": "aicpu"},
            FAILURE,
            "AI_CPU, AIV, HOST, HOST_TS",
            "export HCCL_OP_EXPANSION_MODE=AI_CPU",
        ),
        ("hccl.names", {"HCCL_BUFFERSIZE": "400"}, WARNING, "is HCCL_BUFFSIZE meant?", "unset HCCL_BUFFERSIZE"),
        ("hccl.names", {"HCCL_ALGO": "x", "HCCL_SOMETHING_ELSE_ENTIRELY": "1"}, OK, "2 variable(s)", ""),
    ],
)
def test_variables_of_hccl(found, check, environment, status, text, command):
    finding = found(check, **environment)
    assert finding.status is status, finding
    assert text in finding.text
    assert any(line.startswith(command) for line in finding.remedy) if command else finding.remedy == ()
    if check != "hccl.names":  # the reference is one of the details of every variable
        assert any("https://" in detail for detail in finding.details)


def test_a_list_of_hosts_is_read(found, tmp_path):
    path = tmp_path / "hosts.json"
    environment = {"HCCL_WHITELIST_DISABLE": "0", "HCCL_WHITELIST_FILE": str(path)}
    path.write_text(json.dumps({"host_ip": ["192.168.1.5", "192.168.1.9"], "device_ip": []}), encoding="utf-8")
    assert f"2 hosts in {path}" in found("hccl.whitelist", **environment).text
    path.write_text(json.dumps({"host_ip": ["192.168.1.9"]}), encoding="utf-8")
    assert "no address of this host" in found("hccl.whitelist", **environment).text
    for broken in ("not JSON", "[]", "{}", '{"host_ip": ["eth0"]}', '{"host_ip": 1}'):
        path.write_text(broken, encoding="utf-8")
        finding = found("hccl.whitelist", **environment)
        assert (finding.status, "is not a list of hosts" in finding.text) == (FAILURE, True), finding


def test_without_npu_software_variables_are_only_warned_about(healthy):
    report = judge(healthy, {"HCCL_CONNECT_TIMEOUT": "1"}, "cpu")
    assert report["hccl.connect-timeout"].status is WARNING
    report = judge(healthy, {}, "cpu")
    assert {finding.status for finding in report.findings if finding.check.group == "hccl"} == {Status.SKIPPED}


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("eth", ["eth0", "eth1"]),
        ("=eth", []),
        ("=eth1,lo", ["eth1", "lo"]),
        ("^eth", ["docker0", "lo"]),
        ("^=eth0", ["docker0", "eth1", "lo"]),
    ],
)
def test_patterns_of_interfaces(text, left):
    assert chosen(Pattern.parse(text), ["lo", "eth1", "docker0", "eth0"]) == left
