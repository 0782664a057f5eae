"""The doctor on made-up machines: each finding names the cause, and the command that mends it."""

from __future__ import annotations

import os
import socket

import pytest

from hyper_parallel.doctor import CHECKS, Finding, Report, Status


def problem(report: Report, check: str, *texts: str, command: str, status: Status = Status.FAILURE) -> Finding:
    """A finding that is a problem, says all the texts, and has a command that begins so among its remedies."""
    finding = report[check]
    assert finding.status is status, finding
    for text in texts:
        assert text in finding.text, finding
    assert any(line.startswith(command) for line in finding.remedy), finding
    return finding


def problems(report: Report) -> list[str]:
    """Checks that failed; what is installed beside these tests is no part of the made-up machine."""
    failed = [finding.id for finding in report.findings if finding.status is Status.FAILURE]
    return [check for check in failed if not check.startswith("wheels.")]


def test_a_healthy_machine_without_devices_is_green(machine):
    report = machine.examine()
    assert report.subject == "profile cpu"
    assert [finding.id for finding in report.findings] == [check for check in CHECKS if check != "run.collectives"]
    assert problems(report) == []
    assert report["host.os"].text.startswith("openEuler 22.03")
    for check in ("torch.version", "torch.import", "torch.abi", "torch.gloo"):
        assert report[check].status is Status.OK
    for check in ("torch.npu", "mindspore.run", "cann.home", "hccl.connect-timeout"):
        assert report[check].status is Status.SKIPPED


@pytest.mark.parametrize(
    ("layout", "version", "torch_npu"), [("ascend-toolkit", "8.3.RC1", "2.7.1"), ("cann", "8.5.0", "2.9.0")]
)
def test_a_healthy_npu_machine_of_either_layout_is_green(bare_machine, layout, version, torch_npu):
    bare_machine.torch(torch_npu)
    bare_machine.torch_npu(torch_npu)
    home = bare_machine.cann(layout, version)
    bare_machine.source_script(home)
    bare_machine.driver()
    report = bare_machine.examine()
    assert (report.subject, report.reason) == ("profile npu", "/dev/davinci0 is here")
    assert problems(report) == []
    assert report["cann.home"].text == f"CANN {version} in {home}"
    assert f"layout: {layout}" in report["cann.home"].details
    assert report["cann.env"].text.startswith(str(home.parent))
    assert f"torch_npu {torch_npu} is for CANN {version}" in report["cann.version"].text
    assert report["cann.driver"].text == "driver 25.5.0, 2 x 910B1"
    assert report["torch.npu"].text == f"torch_npu {torch_npu}, 2 NPU(s)"


@pytest.mark.parametrize("layout", ["ascend-toolkit", "cann"])
def test_set_env_that_was_not_sourced_is_named_with_the_script_of_that_layout(machine, layout):
    home = machine.cann(layout, "8.5.0")
    script = home.parent / "set_env.sh" if layout == "ascend-toolkit" else home / "set_env.sh"
    problem(machine.examine("npu", "cann"), "cann.env", "ASCEND_HOME_PATH is not set", command=f"source {script}")


def test_a_home_that_does_not_exist_is_corrected_to_the_one_that_does(machine):
    home = machine.cann("ascend-toolkit", "8.3.RC1")
    machine.environment["ASCEND_HOME_PATH"] = "/opt/removed/cann"
    report = machine.examine("npu", "cann")
    found = problem(report, "cann.home", "/opt/removed/cann, which doesn't exist", str(home), command="source ")
    assert found.remedy == (f"source {home.parent}/set_env.sh",)


def test_a_shell_that_lost_half_of_the_environment_is_found(machine):
    home = machine.cann()
    machine.source_script(home)
    machine.environment["LD_LIBRARY_PATH"] = "/usr/lib"
    report = machine.examine("npu", "cann")
    problem(report, "cann.env", f"LD_LIBRARY_PATH lacks {home}/lib64", command=f"source {home}/set_env.sh")


@pytest.mark.parametrize(
    ("layout", "version", "without", "status", "package"),
    [
        ("cann", "8.5.0", ("lib64/libhccl.so",), Status.FAILURE, "Ascend-cann-toolkit_8.5.0"),
        ("ascend-toolkit", "8.3.RC1", ("opp", "lib64"), Status.FAILURE, "Ascend-cann-toolkit_8.3.RC1"),
        ("cann", "8.5.0", ("opp/built-in/op_impl",), Status.WARNING, "Ascend-cann-*-ops_8.5.0"),
        ("ascend-toolkit", "8.3.RC1", ("opp/built-in/op_impl",), Status.WARNING, "Ascend-cann-kernels-*_8.3.RC1"),
    ],
)
def test_missing_pieces_are_named_with_the_package_that_has_them(machine, layout, version, without, status, package):
    # The folder above a missing piece is there all the same.
    home = machine.cann(layout, version, without)
    (home / "opp").mkdir(exist_ok=True) if "opp" not in without else None
    machine.source_script(home)
    piece = without[0] if "." in without[0] or without[0] == "opp" else "opp/built-in/op_impl/ai_core/tbe/kernel"
    problem(machine.examine("npu", "cann"), "cann.home", piece, command=f"bash {package}", status=status)


def test_a_cann_of_another_version_is_named_with_what_fits(bare_machine):
    bare_machine.torch("2.7.1")
    bare_machine.torch_npu("2.7.1")
    bare_machine.source_script(bare_machine.cann("cann", "8.5.0"))
    report = bare_machine.examine("npu", "cann", "torch_npu")
    found = problem(
        report,
        "cann.version",
        "CANN 8.5.0 is not what torch_npu 2.7.1 is for: 8.3.RC1",
        command="bash Ascend-cann-toolkit_8.3.RC1",
    )
    assert "pip install torch-npu==2.7.1.post2 torch==2.7.1" in found.remedy


def test_mindspore_brings_its_own_list_of_cann_versions(bare_machine):
    bare_machine.mindspore("2.11.0")
    place = bare_machine.packages / "mindspore" / "run_check"
    place.mkdir()
    source = 'class GPUEnvChecker:\n    self.version = ["12.0"]\nclass AscendEnvChecker:\n    self.version = ["9.0", "9.1"]\n'
    (place / "_check_version.py").write_text(source, encoding="utf-8")
    bare_machine.source_script(bare_machine.cann("cann", "8.5.0"))
    report = bare_machine.examine("mindspore", "cann", "mindspore_itself")
    problem(
        report,
        "cann.version",
        "MindSpore 2.11.0 is for: 9.0 or 9.1",
        command="bash Ascend-cann-toolkit_9.1.0",
        status=Status.WARNING,
    )


@pytest.mark.parametrize(
    ("smi", "text", "command"),
    [
        ({"health": "Alarm"}, "NPU 0 (910B1) is in health state Alarm", "npu-smi info -t health -i 0"),
        (
            {"smi": "#!/bin/sh\necho dcmi module initialize failed >&2\nexit 1\n"},
            "dcmi module initialize failed",
            "source ",
        ),
        ({"smi": "#!/bin/sh\necho nothing\n"}, "lists no NPU", "lspci"),
        ({"smi": "\x7fnot a program"}, "npu-smi info fails", "source "),
    ],
)
def test_a_driver_that_complains_is_quoted(machine, smi, text, command):
    machine.cann()
    machine.driver(**smi)
    problem(machine.examine(None, "cann"), "cann.driver", text, command=command)


def test_a_driver_that_does_not_answer_is_a_result(machine):
    machine.cann()
    machine.driver(smi="#!/bin/sh\nsleep 600\n")
    report = machine.examine(None, "cann", timeout=3)
    problem(report, "cann.driver", "hung: no answer within 3 s", command="dmesg")
    assert report["cann.home"].status is Status.OK  # what was known before is kept


def test_no_driver_at_all(machine):
    machine.cann()
    found = problem(machine.examine("npu", "cann"), "cann.driver", "no NPU driver", command="./Ascend-hdk")
    assert any("--device /dev/davinci0" in line for line in found.remedy)


DEATHS = {
    "killed": ("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n", "was killed by SIGSEGV"),
    "ended": ("import os\nos._exit(0)\n", "ended the interpreter with exit status 0"),
    "raised": (
        "raise ImportError('libhccl.so: cannot open shared object file: No such file or directory')\n",
        "ImportError: libhccl.so: cannot open shared object file",
    ),
    "hung": ("import time\ntime.sleep(600)\n", "hung: no answer within 4 s"),
}


@pytest.mark.parametrize("death", DEATHS)
def test_a_torch_npu_that_takes_torch_down_with_it(machine, shared_objects, death):
    """Each way to die is a result: who died, of which missing library, and how torch works without it."""
    source, end = DEATHS[death]
    package = machine.torch_npu(source=source)
    (package / "_C.so").write_bytes(shared_objects["needs-hccl"].read_bytes())
    report = machine.examine(None, "torch_npu", "torch_itself", timeout=4)
    assert report.subject == "profile cpu"
    found = problem(
        report,
        "torch.import",
        "import torch fails, since it loads torch_npu by itself",
        end,
        command="source /usr/local/Ascend",
    )
    assert "export TORCH_DEVICE_BACKEND_AUTOLOAD=0" in found.remedy
    # A missing library is said once; a signal, or no answer, beside it.
    texts = ["libhccl.so can't be found: CANN is not installed", *([end] if death != "raised" else [])]
    found = problem(report, "torch.npu", *texts, command="source ")
    assert "pip uninstall torch-npu" in found.remedy
    assert found.details[0].startswith("libhccl.so is needed by ")
    # Torch itself was looked at without it.
    assert report["torch.version"].text == "PyTorch 2.9.0"
    assert report["torch.gloo"].status is Status.OK


def test_packages_on_the_path_are_found_whatever_python_puts_first(machine):
    machine.environment["PYTHONSAFEPATH"] = "1"
    assert machine.examine("cpu", "torch_itself")["torch.version"].text == "PyTorch 2.9.0"


def test_a_torch_npu_that_is_not_loaded_is_only_warned_about(machine):
    machine.torch_npu(source=DEATHS["killed"][0])
    machine.environment["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    report = machine.examine("cpu", "torch_npu")
    assert report["torch.import"].status is Status.OK
    assert report["torch.npu"].status is Status.WARNING
    assert report.exit_code() == 0
    assert report.exit_code(strict=True) == 1


def test_with_cann_sourced_the_library_is_found(machine, shared_objects):
    package = machine.torch_npu()
    (package / "_C.so").write_bytes(shared_objects["needs-hccl"].read_bytes())
    home = machine.cann()
    (home / "lib64" / "libhccl.so").write_bytes(shared_objects["hccl"].read_bytes())
    machine.source_script(home)
    machine.driver()
    assert problems(machine.examine()) == []


def test_torch_npu_for_another_torch(machine):
    machine.torch_npu("2.7.1.post2")
    problem(
        machine.examine("npu", "torch_npu", "torch_itself"),
        "torch.npu",
        "it is for PyTorch 2.7.1, and 2.9.0 is installed",
        command="pip install torch==2.7.1",
    )


@pytest.mark.parametrize(
    ("torch", "check", "text", "command", "status"),
    [
        (
            {"version": "2.5.1"},
            "torch.version",
            "2.5.1 is too old",
            'pip install --upgrade "torch>=2.7"',
            Status.FAILURE,
        ),
        ({"abi": False}, "torch.abi", "from before C++11", "pip install --force-reinstall", Status.WARNING),
        ({"backends": ()}, "torch.gloo", "without gloo", "pip install --force-reinstall", Status.FAILURE),
        (
            {"source": "import no_such_module"},
            "torch.import",
            "No module named 'no_such_module'",
            "TORCH_DEVICE",
            Status.FAILURE,
        ),
        (
            {"source": DEATHS["killed"][0]},
            "torch.import",
            "was killed by SIGSEGV (during: import torch)",
            "TORCH_DEVICE",
            Status.FAILURE,
        ),
    ],
)
def test_a_torch_that_does_not_do(bare_machine, torch, check, text, command, status):
    bare_machine.torch(**torch)
    problem(bare_machine.examine("cpu", "torch_itself"), check, text, command=command, status=status)


def test_cuda_is_required_by_its_profile_alone(machine):
    problem(
        machine.examine("cuda", "torch_itself"),
        "torch.cuda",
        "PyTorch 2.9.0 is built without CUDA",
        command="pip install --force-reinstall torch",
    )


def test_mindspore_with_numpy_2(machine):
    machine.mindspore(numpy="2.1.0", source="raise ImportError('numpy.core.multiarray failed to import')")
    report = machine.examine("mindspore", "mindspore_itself")
    problem(
        report,
        "mindspore.numpy",
        "NumPy 2.1.0 is installed; MindSpore needs a version below 2",
        command='pip install "numpy<2"',
    )
    found = problem(report, "mindspore.run", "numpy.core.multiarray failed to import", command='pip install "numpy<2"')
    assert found.remedy[0] == "# NumPy 2 is the likely cause:"
    # Where PyTorch is used, MindSpore may be broken.
    assert report.exit_code() == 1


def test_a_mindspore_that_crashes_or_is_too_old(bare_machine):
    bare_machine.torch()
    bare_machine.mindspore("2.7.2", source=DEATHS["killed"][0])
    report = bare_machine.examine("mindspore", "mindspore_itself")
    problem(report, "mindspore.version", "2.7.2 is too old", command="pip install --upgrade")
    problem(
        report, "mindspore.run", "was killed by SIGSEGV (during: import mindspore)", command="python -X faulthandler"
    )
    assert report["mindspore.numpy"].status is Status.OK


def test_a_healthy_mindspore(bare_machine):
    bare_machine.torch()
    bare_machine.mindspore()
    report = bare_machine.examine("mindspore", "mindspore_itself")
    assert problems(report) == []
    assert report["mindspore.run"].text == "imports, and computes on the CPU"


def test_a_port_in_use_is_named_with_its_holder(machine):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = taken.getsockname()[1]
        machine.environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        report = machine.examine("cpu", "network")
    found = problem(
        report, "launch.port", f"port {port} is taken by process {os.getpid()} (", command="export MASTER_PORT="
    )
    assert f"export MASTER_PORT={port}" not in found.remedy
    assert report["launch.master"].text == f"127.0.0.1:{port}"


def test_a_free_port_is_free_and_another_machine_is_not_looked_at(machine):
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    machine.environment |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    assert machine.examine("cpu", "network")["launch.port"].text == f"port {port} is free"
    machine.environment["MASTER_ADDR"] = "192.0.2.1"  # RFC 5737: of no machine
    assert machine.examine("cpu", "network")["launch.port"].text == "the master is another machine"


def test_an_interface_that_does_not_exist(machine):
    machine.environment |= {"GLOO_SOCKET_IFNAME": "eth77", "HCCL_SOCKET_IFNAME": "=eth77"}
    report = machine.examine("cpu", "host")
    problem(
        report,
        "launch.interface",
        "GLOO_SOCKET_IFNAME=eth77 fits no interface of this host",
        "lo",
        command="export GLOO_SOCKET_IFNAME=",
    )
    # Nothing here uses HCCL: its variable is only warned about.
    problem(
        report,
        "hccl.socket-ifname",
        "HCCL_SOCKET_IFNAME==eth77 fits no",
        command="export HCCL_SOCKET_IFNAME==",
        status=Status.WARNING,
    )


def test_components_that_do_not_fit_each_other(machine):
    machine.install("hp-core", "0.2.0")
    machine.install(
        "hp-fsdp", "0.1.3", requires="Requires-Dist: hp-core<0.2,>=0.1.0\nRequires-Dist: hp-nothing>=1; extra == 'x'"
    )
    machine.install("hp-swap", "0.1.0", requires="Requires-Dist: hp-missing>=0.1")
    report = machine.examine("cpu", "wheels")
    found = problem(
        report,
        "wheels.ranges",
        " needs hp-core ",
        "; 0.2.0 is installed",
        command='pip install "hp-core',
    )
    # Components that are really installed may stand beside it.
    assert "hp-fsdp needs hp-core <0.2,>=0.1.0; 0.2.0 is installed" in found.details
    assert not any("hp-nothing" in detail for detail in found.details)


def test_a_component_that_is_installed_twice(machine):
    machine.install("hp-swap", "0.1.0")
    other = machine.folder / "other"
    (other / "hp_swap-0.0.1.dist-info").mkdir(parents=True)
    record = other / "hp_swap-0.0.1.dist-info" / "METADATA"
    record.write_text("Metadata-Version: 2.1\nName: hp-swap\nVersion: 0.0.1\n", encoding="utf-8")
    machine.environment["PYTHONPATH"] += f":{other}"
    problem(
        machine.examine("cpu", "wheels"),
        "wheels.installed",
        "hp-swap is installed twice: 0.1.0 in",
        "hides 0.0.1",
        command="unset PYTHONPATH",
        status=Status.WARNING,
    )


@pytest.mark.parametrize(
    ("broken", "check", "texts", "command"),
    [
        (
            "torch-symbol",
            "wheels.symbols",
            ("undefined symbol _ZN3c10", "libc10.so should have it"),
            "pip install --force-reinstall",
        ),
        ("foreign", "wheels.symbols", ("is built for", "this is"), "pip install --force-reinstall"),
        (
            "future",
            "host.glibc",
            ("is too old: GLIBC_2.999", "future.so"),
            "pip install --force-reinstall --no-deps --no-binary",
        ),
    ],
)
def test_a_native_part_that_does_not_link(bare_machine, shared_objects, broken, check, texts, command):
    package = bare_machine.install("hp-broken", "0.1.0")
    (package / shared_objects[broken].name).write_bytes(shared_objects[broken].read_bytes())
    problem(bare_machine.examine("cpu", "wheels"), check, *texts, command=command)


def test_an_optional_part_for_a_framework_that_is_not_used_is_no_failure(bare_machine, shared_objects):
    package = bare_machine.install("hp-broken", "0.1.0")
    (package / "_cann.so").write_bytes(shared_objects["needs-hccl"].read_bytes())
    found = problem(
        bare_machine.examine("cpu", "wheels"),
        "wheels.symbols",
        "_cann.so needs libhccl.so, which was not found; it is part of CANN",
        command="source /usr/local/Ascend",
        status=Status.WARNING,
    )
    assert found.details == ("not found: libhccl.so",)
