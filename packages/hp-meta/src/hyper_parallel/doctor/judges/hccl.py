"""Judges of the group `hccl`: HCCL's environment variables, each in its range, and none against another.

The table is `data/hccl_variables.json`. HCCL itself takes a value out of range without a word or ends the start of a
job, minutes later, with an error that doesn't name the variable.
"""

from __future__ import annotations

import difflib
import ipaddress
import json
from pathlib import Path
from typing import Any

from hyper_parallel.doctor.finding import Finding, failure, ok, skipped, warning
from hyper_parallel.doctor.interfaces import Pattern, chosen
from hyper_parallel.doctor.tables import table
from hyper_parallel.doctor.world import World

__all__ = ["judge"]

_CHECKS = (
    *("hccl.connect-timeout", "hccl.exec-timeout", "hccl.event-timeout", "hccl.whitelist", "hccl.if-ip"),
    *(
        "hccl.socket-ifname",
        "hccl.if-base-port",
        "hccl.buffsize",
        "hccl.deterministic",
        "hccl.expansion-mode",
        "hccl.names",
    ),
)
_AIV_LIMIT = 1091  # of HCCL_EXEC_TIMEOUT, with HCCL_OP_EXPANSION_MODE=AIV
_OLD_LIMIT, _OLD_STEP = 17340, 68  # of HCCL_EXEC_TIMEOUT on Atlas training products (910A)
_MUCH = 4096  # MB of HCCL_BUFFSIZE


def judge(world: World) -> list[Finding]:
    """The findings of the group."""
    if not (world.has_npu_software or any(name.startswith("HCCL_") for name in world.environment)):
        return [skipped(check, "nothing here uses HCCL") for check in _CHECKS]
    variables = _Variables(world)
    return [
        variables.plain("HCCL_CONNECT_TIMEOUT"),
        _exec_timeout(variables),
        _event_timeout(variables),
        _whitelist(variables),
        _address(variables),
        _interface(variables),
        variables.plain("HCCL_IF_BASE_PORT"),
        _buffer(variables),
        _deterministic(variables),
        variables.plain("HCCL_OP_EXPANSION_MODE"),
        _names(variables),
    ]


class _Variables:
    """The environment's values beside the table."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.table: dict[str, dict[str, Any]] = table("hccl_variables")["variables"]
        self.known = {*self.table, *table("hccl_variables")["others"]}

    def text(self, name: str) -> str | None:
        """The value in the environment; an empty one is none."""
        return self.world.environment.get(name, "").strip() or None

    def number(self, name: str) -> int:
        """The value, or its default where there is none or none that can be read."""
        text = self.text(name)
        return int(text) if text is not None and _is_integer(text) else int(self.table[name]["default"])

    def problem(self, name: str, text: str, *remedy: str) -> Finding:
        """A failure of a variable's check, where HCCL is used."""
        return failure(
            self.table[name]["check"], text, remedy, self.reference(name), required=self.world.has_npu_software
        )

    def reference(self, name: str) -> list[str]:
        """What the table says of a variable."""
        return [f"{name}: {self.table[name]['meaning']}", f"reference: {self.table[name]['source']}"]

    def wrong(self, name: str) -> Finding | None:
        """What is wrong with one value by itself."""
        entry, text = self.table[name], self.text(name)
        if text is None:
            return None
        if entry["kind"] == "choice" and text not in entry["choices"]:
            near = next(
                (choice for choice in entry["choices"] if choice.lower() == text.lower()),
                entry["default"] or entry["choices"][0],
            )
            return self.problem(
                name, f"{name}={text}: allowed are {', '.join(entry['choices'])}", f"export {name}={near}"
            )
        if entry["kind"] == "integer":
            unit = f" {entry['unit']}".rstrip()
            if not _is_integer(text):
                return self.problem(
                    name,
                    f"{name}={text} is not a whole number{' of' * bool(unit)}{unit}",
                    f"export {name}={entry['default']}",
                    f"# or leave it at its default, {entry['default']}{unit}:",
                    f"unset {name}",
                )
            low, high = entry["minimum"], entry["maximum"]
            if not low <= int(text) <= high:
                near = min(max(int(text), low), high)
                return self.problem(
                    name, f"{name}={text} is out of range: {low} to {high}{unit}", f"export {name}={near}"
                )
        return None

    def plain(self, name: str) -> Finding:
        """The finding of a variable that has no more to it than its range."""
        return self.wrong(name) or self.fine(name)

    def fine(self, name: str, more: str = "") -> Finding:
        """A variable that is right, or not set."""
        entry, text = self.table[name], self.text(name)
        unit = f" {entry.get('unit', '')}".rstrip()
        shown = (
            f"{name}={text}{unit}"
            if text
            else f"{name} is not set" + (f" ({entry['default']}{unit})" if entry["default"] != "" else "")
        )
        return ok(entry["check"], shown + more, self.reference(name))


def _is_integer(text: str) -> bool:
    return text.lstrip("-").isdigit() and text.isascii()


def _exec_timeout(variables: _Variables) -> Finding:
    name = "HCCL_EXEC_TIMEOUT"
    wrong = variables.wrong(name)
    text = variables.text(name)
    if wrong or text is None:
        return wrong or variables.fine(name)
    value, check = int(text), "hccl.exec-timeout"
    if variables.text("HCCL_OP_EXPANSION_MODE") == "AIV" and not 0 < value <= _AIV_LIMIT:
        return warning(
            check,
            f"{name}={value} with HCCL_OP_EXPANSION_MODE=AIV: HCCL takes {_AIV_LIMIT} s instead",
            [f"export {name}={_AIV_LIMIT}"],
            variables.reference(name),
        )
    if value == 0:
        return warning(
            check,
            f"{name}=0 waits for ever: a rank that died is never reported",
            [f"export {name}=1836"],
            variables.reference(name),
        )
    if value > _OLD_LIMIT:
        return warning(
            check,
            f"{name}={value}: Atlas training products (910A) allow at most {_OLD_LIMIT} s",
            [f"export {name}={_OLD_LIMIT}"],
            variables.reference(name),
        )
    if value < _OLD_STEP:
        return warning(
            check,
            f"{name}={value} s is short: one slow checkpoint ends the job",
            [f"export {name}=1836"],
            variables.reference(name),
        )
    return variables.fine(name)


def _event_timeout(variables: _Variables) -> Finding:
    """The event must outlive the collective, or every time-out is reported as an event's, without the rank."""
    name = "HCCL_EVENT_TIMEOUT"
    wrong = variables.wrong(name)
    if wrong:
        return wrong
    event, execution = variables.number(name), variables.number("HCCL_EXEC_TIMEOUT")
    if execution == 0 and event != 0:
        text = f"{name} is {event} s, but HCCL_EXEC_TIMEOUT=0 never ends: the event gives up first"
        remedy = [f"export {name}=0", "# or end both:", "export HCCL_EXEC_TIMEOUT=1836", f"export {name}=1868"]
    elif event != 0 and event <= execution:
        text = f"{name} is {event} s, which is not above HCCL_EXEC_TIMEOUT, {execution} s: the event gives up first"
        remedy = [f"export {name}={execution + 32}"]
    else:
        return variables.fine(name, f", above HCCL_EXEC_TIMEOUT ({execution} s)" if event else "")
    if variables.text(name) is None:
        return warning("hccl.event-timeout", text + " (by default)", remedy, variables.reference(name))
    return variables.problem(name, text, *remedy)


def _whitelist(variables: _Variables) -> Finding:
    name, other = "HCCL_WHITELIST_DISABLE", "HCCL_WHITELIST_FILE"
    wrong = variables.wrong(name)
    if wrong:
        return wrong
    switch, path = variables.text(name) or "1", variables.text(other)
    if switch == "1":
        if path:
            return warning(
                "hccl.whitelist",
                f"{other} is set, but {name}=1 (the default) switches the list off",
                [f"export {name}=0", "# or, to allow every host:", f"unset {other}"],
                variables.reference(name),
            )
        return variables.fine(name)
    if not path:
        return variables.problem(
            name,
            f"{name}=0 asks for a list of hosts, but {other} is not set",
            f"export {name}=1",
            "# or name the list:",
            f"export {other}=/etc/hccl_whitelist.json",
        )
    example = '{"host_ip": ["192.168.1.1", "192.168.1.2"], "device_ip": []}'
    write = [f"echo '{example}' > {path}"]
    try:
        content = json.loads(Path(path).read_text("utf-8"))
        hosts = [ipaddress.ip_address(host) for host in content["host_ip"]]
    except OSError as error:
        return variables.problem(other, f"{other}={path} can't be read: {error.strerror}", *write)
    except (ValueError, KeyError, TypeError) as error:
        return variables.problem(other, f"{path} is not a list of hosts ({error})", *write)
    here = {address for addresses in _interfaces(variables).values() for address in addresses}
    if here and not here & {str(host) for host in hosts}:
        return variables.problem(
            other, f"no address of this host is in {path}: HCCL will refuse its connections", "hostname -I", *write
        )
    return variables.fine(name, f"; {len(hosts)} hosts in {path}")


def _interfaces(variables: _Variables) -> dict[str, list[str]]:
    return dict(variables.world.facts("host").get("interfaces", {}))


def _address(variables: _Variables) -> Finding:
    name = "HCCL_IF_IP"
    text, interfaces = variables.text(name), _interfaces(variables)
    if text is None:
        return variables.fine(name)
    try:
        address = str(ipaddress.ip_address(text))
    except ValueError:
        return variables.problem(name, f"{name}={text} is no IP address", "hostname -I", f"unset {name}")
    owner = next((interface for interface, addresses in interfaces.items() if address in addresses), None)
    if interfaces and owner is None:
        first = _outward(interfaces)
        return variables.problem(
            name,
            f"{name}={text} is no address of this host",
            "hostname -I",
            f"export {name}={first}" if first else f"unset {name}",
        )
    if variables.text("HCCL_SOCKET_IFNAME"):
        return warning(
            "hccl.if-ip",
            f"{name} and HCCL_SOCKET_IFNAME are both set: {name} ({text}, {owner}) wins",
            [f"unset {name}", "# or:", "unset HCCL_SOCKET_IFNAME"],
            variables.reference(name),
        )
    return variables.fine(name, f", on {owner}" if owner else "")


def _outward(interfaces: dict[str, list[str]]) -> str | None:
    return next((addresses[0] for name, addresses in sorted(interfaces.items()) if name != "lo" and addresses), None)


def _interface(variables: _Variables) -> Finding:
    name = "HCCL_SOCKET_IFNAME"
    wrong = variables.wrong("HCCL_SOCKET_FAMILY")
    text, interfaces = variables.text(name), _interfaces(variables)
    if wrong:
        return wrong
    if text is None or not interfaces:
        return variables.fine(name)
    pattern = Pattern.parse(text)
    left = chosen(pattern, interfaces)
    if not left:
        what = "leaves no interface of this host" if pattern.excluded else "fits no interface of this host"
        usable = [interface for interface in sorted(interfaces) if interface != "lo"] or ["lo"]
        return variables.problem(
            name, f"{name}={text} {what} ({', '.join(sorted(interfaces))})", f"export {name}=={usable[0]}"
        )
    if variables.text("HCCL_SOCKET_FAMILY") == "AF_INET6" and not any(
        ":" in address for address in interfaces[left[0]]
    ):
        return variables.problem(
            name, f"HCCL_SOCKET_FAMILY=AF_INET6, but {left[0]} has no IPv6 address", "export HCCL_SOCKET_FAMILY=AF_INET"
        )
    return variables.fine(name, f", {left[0]} is used")


def _buffer(variables: _Variables) -> Finding:
    name = "HCCL_BUFFSIZE"
    wrong = variables.wrong(name)
    value = variables.number(name)
    if not wrong and value > _MUCH:
        text = f"{name}={value}: each communicator takes {2 * value / 1024:.0f} GB of device memory"
        return warning("hccl.buffsize", text, [f"export {name}=200"], variables.reference(name))
    return wrong or variables.fine(name)


def _deterministic(variables: _Variables) -> Finding:
    """Against the level that `hyper_parallel.deterministic` is asked for from outside: 1 and 2 need true, 3 strict."""
    name, own = "HCCL_DETERMINISTIC", "HYPER_PARALLEL_DETERMINISTIC"
    level, text = variables.world.environment.get(own, "").strip(), variables.text(name)
    wrong = variables.wrong(name)
    fitting = {"1": ("true", "strict"), "2": ("true", "strict"), "3": ("strict",)}.get(level, ())
    if not wrong and text is not None and fitting and text not in fitting:
        said = f"{own}={level} asks for {name}={fitting[0]}, and {text} is set"
        return variables.problem(name, said, f"export {name}={fitting[0]}", "# or:", f"unset {own}")
    return wrong or variables.fine(name)


def _names(variables: _Variables) -> Finding:
    set_ = sorted(name for name in variables.world.environment if name.startswith("HCCL_"))
    strange = [name for name in set_ if name not in variables.known]
    for name in strange:
        near = difflib.get_close_matches(name, variables.known, n=1, cutoff=0.85)
        if near:
            value = variables.world.environment[name]
            return warning(
                "hccl.names", f"{name} is unknown; is {near[0]} meant?", [f"unset {name}", f"export {near[0]}={value}"]
            )
    return ok(
        "hccl.names",
        f"{len(set_)} variable(s) of HCCL are set",
        [f"{name}={variables.world.environment[name]}" for name in set_],
    )
