"""The doctor's command line: forms of its report, exit status, `doctor run` with real processes, and what it imports."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner

from hyper_parallel.cli import main as umbrella
from hyper_parallel.doctor import CHECKS, Report, Status, diagnose, run_collectives
from hyper_parallel.doctor import command as command_line
from hyper_parallel.doctor.collectives import _judge
from hyper_parallel.doctor.examine import judge
from hyper_parallel.doctor.finding import failure, ok, skipped, warning
from hyper_parallel.doctor.probe import Outcome, Running, run_probe
from hyper_parallel.doctor.render import as_json, as_markdown, as_text

REPORT = Report(
    "profile cpu",
    "by hand",
    (
        ok("host.os", "a system", ["a kernel"]),
        failure("wheels.symbols", "no <symbol> | here", ["# first:", "pip install x"], ["more"]),
        warning("torch.abi", "an old one", ["pip install y"]),
        skipped("cann.home", "not here"),
        skipped("cann.env", "not here"),
        skipped("hccl.if-ip", "one reason"),
        skipped("hccl.names", "another"),
    ),
    1.25,
)


def test_text_has_a_line_for_each_check_and_the_remedy_below():
    assert as_text(REPORT).splitlines() == [
        "HyperParallel doctor: profile cpu (by hand)",
        "",
        "✓ host.os         a system",
        "✗ wheels.symbols  no <symbol> | here",
        "      # first:",
        "      $ pip install x",
        "      see docs/faq.md#faq-2",
        "! torch.abi       an old one",
        "      $ pip install y",
        "      see docs/faq.md#faq-4",
        "- cann            not here (2 checks)",
        "- hccl.if-ip      one reason",
        "- hccl.names      another",
        "",
        "1 ok, 1 warning, 1 failure, 4 skipped; 1.2 s",
    ]
    verbose = as_text(REPORT, verbose=True, unicode=False).splitlines()
    assert verbose[2:4] == ["ok host.os         a system", "      | a kernel"]
    assert "-- cann.env        not here" in verbose
    assert all(line.isascii() for line in verbose)
    assert "\033[31m✗\033[0m wheels.symbols" in as_text(REPORT, color=True)


def test_markdown_is_a_table_and_the_remedies():
    text = as_markdown(REPORT)
    assert "| ✗ | `wheels.symbols` | no &lt;symbol> \\| here |" in text
    assert "```bash\n# first:\npip install x\n```" in text
    assert text.count("```") % 2 == 0


def test_json_has_everything():
    content = json.loads(as_json(REPORT))
    assert content["schema"] == 1
    assert content["summary"] == {"skipped": 4, "ok": 1, "warning": 1, "failure": 1}
    assert content["checks"][1] == {
        "id": "wheels.symbols",
        "group": "wheels",
        "title": CHECKS["wheels.symbols"].title,
        "status": "failure",
        "finding": "no <symbol> | here",
        "remedy": ["# first:", "pip install x"],
        "details": ["more"],
        "page": "docs/faq.md#faq-2",
    }


def test_exit_status(monkeypatch, capsys):
    for findings, status, strict in (((0,), 0, 0), ((0, 2), 0, 1), ((0, 1), 1, 1), ((3,), 0, 0)):
        report = Report("profile cpu", "", tuple(REPORT.findings[index] for index in findings))
        monkeypatch.setattr(command_line, "diagnose", lambda *_, report=report, **__: report)
        assert command_line.main([]) == status
        assert command_line.main(["--strict"]) == strict
    capsys.readouterr()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--profile", "tpu"], "invalid choice: 'tpu'"),
        (["--json", "--markdown"], "not allowed with argument"),
        (["wheel"], "the following arguments are required: FILE.whl"),
        (["wheel", "missing-1-py3-none-any.whl"], "there is no such file"),
        (["wheel", __file__], "is not the name of a wheel"),
        (["run", "-n", "0"], "should be 1 to 256 processes"),
        (["--timeout", "0"], "should be more than 0 seconds"),
        (["cure"], "invalid choice: 'cure'"),
    ],
)
def test_wrong_usage_exits_with_2(capsys, arguments, message):
    with pytest.raises(SystemExit) as caught:
        command_line.main(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_options_count_before_and_after_a_subcommand(monkeypatch, capsys, make_wheel):
    path = make_wheel("hp_core-0.1.0-py3-none-any.whl")
    for arguments in (["--json", "wheel", str(path)], ["wheel", str(path), "--json"]):
        assert command_line.main(arguments) == 0
        content = json.loads(capsys.readouterr().out)
        assert content["subject"] == f"wheel {path.name}"


def test_the_list_has_every_check(capsys):
    assert command_line.main(["--list"]) == 0
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == list(CHECKS)


def test_the_umbrella_hands_everything_through(make_wheel):
    result = CliRunner().invoke(umbrella, ["doctor", "--help"])
    assert (result.exit_code, result.output[:34]) == (0, "usage: hyper-parallel doctor [-h] ")
    result = CliRunner().invoke(umbrella, ["doctor", "wheel", str(make_wheel("hp_core-0.1.0-py2-none-any.whl")), "-v"])
    assert result.exit_code == 1
    assert "wheels.tag" in result.output
    assert CliRunner().invoke(umbrella, ["doctor", "--profile", "tpu"]).exit_code == 2


def test_only_the_standard_library_is_imported_and_click_is_not_needed():
    program = (
        "import sys; sys.modules['click'] = None\n"
        "from hyper_parallel.doctor.command import main\n"
        "import hyper_parallel.doctor.probes.host, hyper_parallel.doctor.probes.collective_rank\n"
        "main(['--list'])\n"
        "tops = {name.partition('.')[0] for name, module in sys.modules.items() if module is not None}\n"
        "tops -= {name for name in tops if name.startswith('__editable__') or name.startswith('_distutils')}\n"
        "print(sorted(tops - set(sys.stdlib_module_names)))"
    )
    done = subprocess.run(
        [sys.executable, "-S", "-c", program], capture_output=True, text=True, check=True, env=_source()
    )
    assert done.stdout.splitlines()[-1] == "['__main__', 'hyper_parallel']"


def _source() -> dict[str, str]:
    """An environment in which the umbrella is found without any installed package."""
    import hyper_parallel

    return {"PYTHONPATH": str(Path(hyper_parallel.__file__).parents[1]), "PATH": "/usr/bin:/bin"}


def test_it_runs_as_a_module_where_output_is_not_unicode():
    command = [sys.executable, "-m", "hyper_parallel.doctor", "wheel", "--help"]
    done = subprocess.run(command, capture_output=True, check=True, env={**_source(), "PYTHONIOENCODING": "ascii"})
    assert done.stdout.startswith(b"usage: python -m hyper_parallel.doctor wheel")


def test_collectives_between_four_real_processes():
    report = run_collectives(4, backend="gloo", timeout=150)
    finding = report["run.collectives"]
    assert finding.status is Status.OK, finding
    assert finding.text == "4 processes, gloo: all values right"
    names = [line.split("  ")[0] for line in finding.details]
    assert names[1:8] == [
        "barrier",
        "broadcast",
        "all_reduce",
        "all_gather",
        "reduce_scatter",
        "all_to_all",
        "send and receive",
    ]
    assert len(names) == 1 + 7 + 6 + 1


def test_a_rank_that_dies_ends_the_others_at_once(bare_machine):
    source = """
        import os, signal, time
        if os.environ["RANK"] == "1":
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(600)
    """
    bare_machine.torch(source=source)
    report = run_collectives(3, backend="gloo", environment=bare_machine.environment, timeout=600)
    finding = report["run.collectives"]
    assert finding.text == "rank 1 of 3 was killed by SIGKILL (during: import torch)"
    assert finding.details[:3] == (
        "rank 0: was ended, since rank 1 had failed (during: import torch)",
        "rank 1: was killed by SIGKILL (during: import torch)",
        "rank 2: was ended, since rank 1 had failed (during: import torch)",
    )
    assert "hyper-parallel doctor -v" in finding.remedy


def test_ranks_that_do_not_meet_and_devices_that_are_not_there(bare_machine):
    bare_machine.torch(source="import time\ntime.sleep(600)")
    report = run_collectives(1, backend="gloo", environment=bare_machine.environment, timeout=1)
    assert report["run.collectives"].text == "rank 0 of 1 hung: not at its end within 1 s (during: import torch)"


def test_devices_that_are_not_there(bare_machine):
    bare_machine.torch(
        source="from types import SimpleNamespace\n__version__ = '2.9.0'\ncuda = SimpleNamespace(device_count=lambda: 1)"
    )
    report = run_collectives(2, profile="cuda", environment=bare_machine.environment)
    assert (report.subject, report.reason) == ("run of 2 processes on nccl", "for the profile cuda")
    assert "2 processes need a device each, and torch 2.9.0 finds 1 (cuda)" in report["run.collectives"].text
    assert "hyper-parallel doctor run -n 1" in report["run.collectives"].remedy


def test_wrong_values_and_operations_that_a_backend_lacks():
    right = Outcome(
        {"results": [["all_reduce", 4096, True, 0.001], ["all_to_all", 4096, None, "not supported"]], "seconds": 0.1}
    )
    wrong = Outcome(
        {"results": [["all_reduce", 4096, False, 0.002], ["all_to_all", 4096, None, "not supported"]], "seconds": 0.1}
    )
    finding = _judge([right, right], "gloo", 60)
    assert finding.text == "2 processes, gloo: all values right; gloo lacks all_to_all"
    assert [line.split() for line in finding.details[1:3]] == [
        ["all_reduce", "4096", "1.00", "4"],
        ["all_to_all", "4096", "not", "supported"],
    ]
    finding = _judge([right, wrong], "hccl", 60)
    assert finding.text == "all_reduce of 4096 bytes gives wrong values on rank 1 of 2"
    assert "hyper-parallel doctor run -n 2 --backend gloo" in finding.remedy


def test_a_probe_keeps_what_it_knew_and_takes_its_children_with_it(bare_machine, tmp_path):
    """What hangs may have started others: they go with it."""
    smi = f"#!/bin/sh\n(sleep 600 & echo $! > {tmp_path}/child; wait)\n"
    bare_machine.driver(smi=smi)
    request = {"root": str(bare_machine.root)}
    outcome = run_probe("cann", request, bare_machine.environment, timeout=3)
    assert (outcome.end, outcome.during) == ("hung: no answer within 3 s", "npu-smi info")
    assert outcome.facts["driver"] == "25.5.0"
    child = int((tmp_path / "child").read_text())
    assert _ends(child)


def _ends(process):
    """Whether it does, if not at once: one that was killed may take a moment."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        try:
            if Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0] in "ZX":
                return True
        except (FileNotFoundError, ProcessLookupError):
            return True
        time.sleep(0.01)
    return False


def test_an_interrupt_ends_the_probes(bare_machine, tmp_path):
    source = f"""
        import os, time
        with open({str(tmp_path / "written")!r}, "w") as file:
            file.write(str(os.getpid()))
        os.rename({str(tmp_path / "written")!r}, {str(tmp_path / "probe")!r})
        time.sleep(600)
    """
    bare_machine.torch(source=source)
    environment = {**bare_machine.environment, "PYTHONPATH": f"{bare_machine.packages}:{_source()['PYTHONPATH']}"}
    command = [sys.executable, "-m", "hyper_parallel.doctor"]
    doctor = subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        while not (tmp_path / "probe").exists():
            assert doctor.poll() is None
            time.sleep(0.05)
        doctor.send_signal(signal.SIGINT)
        output = doctor.communicate(timeout=60)
    finally:
        doctor.kill()
    assert (doctor.returncode, *output) == (130, b"", b"")
    assert _ends((tmp_path / "probe").read_text())


def test_a_probe_that_is_not_there_is_an_error_like_any_other(bare_machine):
    running = Running("no_such_probe", {}, bare_machine.environment)
    assert running.wait(60)
    assert running.finish("").end.startswith("raised ModuleNotFoundError: No module named")


def test_the_profile_follows_the_devices(healthy):
    def profile(environment: dict[str, str] | None = None, **facts: Outcome) -> str:
        return judge({**healthy, **facts}, environment or {}).subject

    host = Outcome({**healthy["host"].facts, "nvidia": ["nvidia0"]})
    assert profile() == "profile cpu"
    assert profile(cann=Outcome({"nodes": ["davinci0"], "homes": []})) == "profile npu"
    assert profile(host=host) == "profile cuda"
    assert profile({"HYPER_PARALLEL_PLATFORM": "mindspore"}) == "profile mindspore"
    only = {"torch_itself": Outcome({"installed": None}), "mindspore_itself": Outcome({"installed": "2.10.0"})}
    assert profile(**only) == "profile mindspore"
    with pytest.raises(ValueError, match="there is no profile 'tpu'; there are cpu, cuda, npu, mindspore"):
        diagnose("tpu")
