"""A native wheel gets the tag that it can keep on every target, and it is said honestly whom it serves."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from tests.made_wheels import Versions, make_shared_object, make_wheel

import finish_wheels
from check_wheel import check, workspace_demands
from finish_wheels import finish, report
from wheel_file import read_wheel

MODULE = "hp_made/_native.cpython-311-x86_64-linux-gnu.so"
LIBC = {"libc.so.6": {"GLIBC_2.17": ["memcpy"]}}
# What the module needs, the platforms of the finished wheel, and the targets that it serves.
CASES: dict[str, tuple[Versions, str, str]] = {
    "old": (LIBC, "manylinux_2_17_x86_64", "manylinux_2_28, openEuler 22.03, Ubuntu 22.04, openEuler 24.03"),
    "glibc": (
        {"libc.so.6": {"GLIBC_2.34": ["f"]}},
        "manylinux_2_34_x86_64",
        "openEuler 22.03, Ubuntu 22.04, openEuler 24.03",
    ),
    # auditwheel's own choice would be manylinux_2_34, by which pip would install it on openEuler 22.03.
    "glibcxx": (
        {**LIBC, "libstdc++.so.6": {"GLIBCXX_3.4.29": ["f"]}},
        "manylinux_2_35_x86_64",
        "Ubuntu 22.04, openEuler 24.03",
    ),
    "newest": ({"libc.so.6": {"GLIBC_2.39": ["f"]}}, "manylinux_2_39_x86_64", "none of our targets"),
    "future": ({**LIBC, "libstdc++.so.6": {"GLIBCXX_3.4.99": ["f"]}}, "linux_x86_64", "none of our targets"),
}


@pytest.mark.parametrize("case", CASES)
def test_the_tag_is_one_that_the_wheel_can_keep(tmp_path: Path, case: str) -> None:
    needs, platform, served = CASES[case]
    (tmp_path / "object").mkdir()
    made = make_wheel(tmp_path, "cp311-cp311-linux_x86_64", {MODULE: make_shared_object(tmp_path / "object", needs)})
    demands = workspace_demands()
    finished = finish(made, demands)
    assert list(tmp_path.glob("*.whl")) == [finished]
    wheel = read_wheel(finished)
    assert platform in wheel.platforms
    assert check(wheel, demands) == []
    lines = report(wheel, demands)
    assert lines[0] == f"{finished.name}: serves {served}"
    refused = [re.match(r"    not (.+): hp_made/_native\S+ needs (\S+) of", line) for line in lines[1:]]
    assert all(refused)
    assert len(refused) == 4 - (0 if served.startswith("none") else len(served.split(", ")))
    # Finishing twice changes nothing.
    assert finish(finished, demands) == finished


def test_a_target_that_is_not_served_fails(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "object").mkdir()
    content = make_shared_object(tmp_path / "object", CASES["glibcxx"][0])
    make_wheel(tmp_path, "cp311-cp311-linux_x86_64", {MODULE: content})
    make_wheel(tmp_path, name="hp_pure", Name=["hp-pure"])
    assert finish_wheels.main(["--target", "ubuntu-22.04", str(tmp_path)]) == 0
    assert "hp_pure-0.1.0-py3-none-any.whl: serves every machine" in capsys.readouterr().out
    assert finish_wheels.main(["--target", "openeuler-22.03", str(tmp_path)]) == 1
    assert (
        "GLIBCXX_3.4.29 of libstdc++.so.6 (for f); openEuler 22.03 has up to GLIBCXX_3.4.28" in capsys.readouterr().out
    )


def test_an_empty_folder_is_wrong_usage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stopped:
        finish_wheels.main([str(tmp_path)])
    assert stopped.value.code == 2
    assert "run nox -s build first" in capsys.readouterr().err
