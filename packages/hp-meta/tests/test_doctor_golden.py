"""What people see: whole outputs on made-up machines, reviewed by eye, and shown on the doctor's page of the guide.

`UPDATE_GOLDEN=1` writes the files in `golden/` and their copies on the page anew; read them before you commit them.
"""

from __future__ import annotations

import os
import platform
from dataclasses import replace
from pathlib import Path

import pytest

from hyper_parallel.doctor import CHECKS, Report, examine_wheel
from hyper_parallel.doctor.render import as_text
from hyper_parallel.doctor.tags import Interpreter

GOLDEN = Path(__file__).with_name("golden")
PAGE = Path(__file__).resolve().parents[3] / "docs" / "guide" / "doctor.md"


def compare(name: str, report: Report, *replaced: tuple[str, str]) -> None:
    """The text of a report against the golden one, with the test's own paths named as on a real machine."""
    text = as_text(replace(report, seconds=2.9))
    for own, real in (*replaced, (platform.machine(), "x86_64")):
        text = text.replace(own, real)
    path = GOLDEN / f"{name}.txt"
    if os.environ.get("UPDATE_GOLDEN"):
        shown = PAGE.read_text("utf-8").replace(path.read_text("utf-8") if path.exists() else text, text)
        PAGE.write_text(shown, encoding="utf-8")
        path.write_text(text, encoding="utf-8")
    assert text == path.read_text("utf-8")


def test_a_laptop(machine):
    compare("laptop", machine.examine("cpu", "cann"))


def test_a_torch_npu_without_cann(machine, shared_objects):
    package = machine.torch_npu(source="import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    (package / "_C.so").write_bytes(shared_objects["needs-hccl"].read_bytes())
    compare("torch-npu-without-cann", machine.examine("cpu", "torch_npu", "cann"))


def test_an_npu_machine_with_everything_wrong(machine):
    machine.torch_npu("2.7.1", source="raise ImportError('libhccl.so: cannot open shared object file')")
    machine.cann("ascend-toolkit", "8.3.RC1")
    machine.driver("Alarm")
    machine.mindspore("2.10.0", numpy="2.1.0", source="raise ImportError('numpy.core.multiarray failed to import')")
    machine.environment |= {
        "HCCL_CONNECT_TIMEOUT": "60",
        "HCCL_EXEC_TIMEOUT": "3600",
        "HCCL_EVENT_TIMEOUT": "3600",
        "HCCL_SOCKET_IFNAME": "=eth1",
        "HCCL_BUFFERSIZE": "400",
        "RANK": "4",
        "WORLD_SIZE": "4",
    }
    report = machine.examine("npu", "torch_npu", "cann", "mindspore_itself")
    compare(
        "npu-machine", report, (str(machine.root), ""), (str(machine.packages), "/usr/lib/python3.11/site-packages")
    )


def test_a_wheel_for_another_machine(make_wheel):
    here = Interpreter((3, 11), machine="x86_64", glibc=(2, 34))
    path = make_wheel("hp_kernels-0.1.0-cp312-cp312-manylinux_2_38_x86_64.whl")
    compare("wheel", examine_wheel(path, here=here), (f"{path.parent}/", ""))


@pytest.mark.parametrize("name", ["laptop", "npu-machine", "torch-npu-without-cann", "wheel"])
def test_the_guide_shows_it(name):
    assert f"```text\n{(GOLDEN / f'{name}.txt').read_text('utf-8')}```" in PAGE.read_text("utf-8")


def test_every_check_leads_to_a_place_in_the_documents():
    for check in CHECKS.values():
        file, _, anchor = check.page.partition("#")
        text = (PAGE.parents[2] / file).read_text("utf-8")
        assert f'<a id="{anchor}"></a>' in text or f"\n### {anchor}\n" in text, check
    assert all(f"`{check}`" in PAGE.read_text("utf-8") or check.startswith("hccl.") for check in CHECKS)
