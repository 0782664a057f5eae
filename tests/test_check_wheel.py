"""Every rule of build/check_wheel.py refuses a wheel that breaks it, and names what, where and what to do.

The wheels are made up; tests/test_wheels.py holds our own against the same rules.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from packaging.version import Version
from tests.made_wheels import Versions, make_shared_object, make_wheel

import check_wheel
from check_wheel import check, tagged_glibc, workspace_demands
from shared_objects import read_shared_object
from targets import read_floors
from wheel_file import read_wheel
from workspace import ROOT

WAIT = "_ZNSt18condition_variable4waitERSt11unique_lockISt5mutexE"
NATIVE = "cp311-cp311-linux_x86_64"
MODULE = "hp_made/_native.cpython-311-x86_64-linux-gnu.so"
OBJECTS: dict[str, tuple[Versions, str | None]] = {
    "old": ({"libc.so.6": {"GLIBC_2.17": ["memcpy"]}}, None),
    "glibc": ({"libc.so.6": {"GLIBC_2.34": ["pthread_create"], "GLIBC_2.17": ["memcpy"]}}, None),
    "glibcxx-29": ({"libstdc++.so.6": {"GLIBCXX_3.4.29": ["_ZSt28__throw_bad_array_new_lengthv"]}}, None),
    "glibcxx-30": ({"libstdc++.so.6": {"GLIBCXX_3.4.30": [WAIT], "GLIBCXX_3.4": ["_Znwm"]}}, None),
    "cxxabi": ({"libstdc++.so.6": {"CXXABI_1.3.15": ["__cxa_new"]}}, None),
    "relr": ({"libc.so.6": {"GLIBC_ABI_DT_RELR": ["memcpy"]}}, None),
    "torch": ({"libc10.so": {"": ["c10"]}}, None),
    "cann": ({"libascendcl.so": {"": ["aclInit"]}}, None),
    "rpath": ({"libc.so.6": {"GLIBC_2.17": ["memcpy"]}}, "/opt/torch/lib:$ORIGIN/../../torch/lib"),
    "origin": ({"libc.so.6": {"GLIBC_2.17": ["memcpy"]}}, "$ORIGIN/../hp_made.libs"),
}


@pytest.fixture(scope="module")
def objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """Shared objects that need what their names say, linked once."""
    folders = {name: tmp_path_factory.mktemp(name) for name in OBJECTS}
    return {name: make_shared_object(folders[name], *arguments) for name, arguments in OBJECTS.items()}


def findings(path: Path, *targets: str) -> dict[str, list[str]]:
    """Messages by rule."""
    found: dict[str, list[str]] = {}
    for rule, message in check(read_wheel(path), workspace_demands(targets)):
        found.setdefault(rule, []).append(message)
    return found


def served(path: Path) -> set[str]:
    return {target.name for target in workspace_demands().served(read_wheel(path))}


def test_good_wheels_keep_every_rule(tmp_path: Path, objects: dict[str, bytes]) -> None:
    assert findings(make_wheel(tmp_path)) == {}
    assert findings(make_wheel(tmp_path, NATIVE, {MODULE: objects["old"]}), *read_floors().targets) == {}
    assert findings(make_wheel(tmp_path, "cp311-cp311-manylinux_2_17_x86_64", {MODULE: objects["old"]})) == {}


@pytest.mark.parametrize("path", ["hp_made/_native.so", "hp_made/data/blob"])
def test_a_wheel_for_every_machine_with_compiled_code_is_refused(
    tmp_path: Path, objects: dict[str, bytes], path: str
) -> None:
    found = findings(make_wheel(tmp_path, files={path: objects["old"]}))
    [message] = found["tag-names-what-is-inside"]
    assert "py3-none-any" in message
    assert path in message


def test_a_wheel_for_one_machine_without_compiled_code_is_refused(tmp_path: Path) -> None:
    assert "nothing in it is compiled" in findings(make_wheel(tmp_path, NATIVE))["tag-names-what-is-inside"][0]


def test_compiled_code_is_for_the_machine_of_the_tag(tmp_path: Path, objects: dict[str, bytes]) -> None:
    foreign = bytearray(objects["old"])
    foreign[18:20] = (183).to_bytes(2, "little")  # e_machine: EM_AARCH64
    found = findings(make_wheel(tmp_path, NATIVE, {MODULE: bytes(foreign)}))
    assert found["tag-names-what-is-inside"] == [f"{MODULE} is compiled for aarch64, and the tag says x86_64"]
    assert "named for x86_64 and compiled for aarch64" in found["modules-fit-the-interpreter"][0]
    found = findings(make_wheel(tmp_path, "cp311-cp311-musllinux_1_2_x86_64", {MODULE: objects["old"]}))
    assert "none that we build for" in found["tag-names-what-is-inside"][0]


@pytest.mark.parametrize(
    ("tag", "module", "message"),
    [
        ("cp312-cp312-linux_x86_64", MODULE, "is for cp311-cp311, and the tag says cp312-cp312"),
        ("cp311-none-linux_x86_64", MODULE, "is for cp311-cp311, and the tag says cp311-none"),
        (NATIVE, "hp_made/_native.abi3.so", "uses the stable ABI, and the tag says cp311"),
    ],
)
def test_modules_are_for_the_python_of_the_tag(
    tmp_path: Path, objects: dict[str, bytes], tag: str, module: str, message: str
) -> None:
    assert message in findings(make_wheel(tmp_path, tag, {module: objects["old"]}))["modules-fit-the-interpreter"][0]


def test_a_wheel_is_not_retagged_by_renaming(tmp_path: Path, objects: dict[str, bytes]) -> None:
    tag = "cp311-cp311-manylinux_2_28_x86_64"
    found = findings(make_wheel(tmp_path, tag, {MODULE: objects["old"]}, inner_tag=NATIVE))
    assert "auditwheel repair" in found["name-and-metadata-agree"][0]
    found = findings(make_wheel(tmp_path, Name=["hp-other"]))
    assert found["name-and-metadata-agree"] == ["the file is named for hp-made 0.1.0, and METADATA says hp-other 0.1.0"]
    assert "Root-Is-Purelib: false" in findings(make_wheel(tmp_path, purelib=False))["name-and-metadata-agree"][0]


def test_a_newer_glibcxx_than_the_target_has_is_refused(tmp_path: Path, objects: dict[str, bytes]) -> None:
    """The symbol, the object file, both versions, and how to build it right."""
    wheel = make_wheel(tmp_path, NATIVE, {MODULE: objects["glibcxx-30"]})
    assert findings(wheel) == {}
    assert findings(wheel, "ubuntu-22.04", "openeuler-24.03") == {}
    [message] = findings(wheel, "openeuler-22.03")["symbols-are-on-the-targets"]
    assert message == (
        f"{MODULE} needs GLIBCXX_3.4.30 of libstdc++.so.6 (for {WAIT}); openEuler 22.03 has up to GLIBCXX_3.4.28. "
        "Build it in that system's image: nox -s wheels -- --target openeuler-22.03"
    )


def test_a_tag_that_lets_pip_install_the_wheel_must_keep_its_word(tmp_path: Path, objects: dict[str, bytes]) -> None:
    """manylinux_2_34 allows GLIBCXX_3.4.29, openEuler 22.03 takes that tag, and has 3.4.28."""
    wheel = make_wheel(tmp_path, "cp311-cp311-manylinux_2_34_x86_64", {MODULE: objects["glibcxx-29"]})
    [message] = findings(wheel)["symbols-are-on-the-targets"]
    assert "GLIBCXX_3.4.29" in message
    assert (
        "openEuler 22.03 has up to GLIBCXX_3.4.28, where pip installs a wheel tagged manylinux_2_34_x86_64" in message
    )
    # A system whose glibc is older than the tag's never sees the wheel.
    wheel = make_wheel(tmp_path, "cp311-cp311-manylinux_2_35_x86_64", {MODULE: objects["glibcxx-29"]})
    assert findings(wheel) == {}


def test_a_tag_for_an_older_glibc_than_the_content_needs_is_refused(tmp_path: Path, objects: dict[str, bytes]) -> None:
    tag = "cp311-cp311-manylinux_2_28_x86_64"
    messages = findings(make_wheel(tmp_path, tag, {MODULE: objects["glibc"]}))["symbols-are-on-the-targets"]
    assert any(
        "GLIBC_2.34 of libc.so.6 (for pthread_create); manylinux_2_28 has up to GLIBC_2.28" in text for text in messages
    )
    assert any("the tag manylinux_2_28_x86_64 promises that 2.28 is enough" in text for text in messages)


def test_which_targets_a_wheel_serves(tmp_path: Path, objects: dict[str, bytes]) -> None:
    everywhere = set(read_floors().targets)
    newest = {"ubuntu-22.04", "openeuler-24.03"}
    expected = {
        "old": everywhere,
        "glibc": everywhere - {"manylinux-2.28"},
        "glibcxx-29": newest,
        "glibcxx-30": newest,
        "cxxabi": set(),
        "relr": {"openeuler-24.03"},
        "torch": everywhere,
    }
    found = {name: served(make_wheel(tmp_path, NATIVE, {MODULE: objects[name]})) for name in expected}
    assert found == expected


@pytest.mark.parametrize(("name", "library"), [("torch", "libc10.so"), ("cann", "libascendcl.so")])
def test_a_module_links_nothing_that_a_machine_need_not_have(
    tmp_path: Path, objects: dict[str, bytes], name: str, library: str
) -> None:
    found = findings(make_wheel(tmp_path, NATIVE, {MODULE: objects[name]}))
    [message] = found["libraries-are-everywhere"]
    assert f"{MODULE} links {library}, which is on no list in build/floors.toml" in message
    # Carrying it along is no way out.
    carried = {MODULE: objects[name], f"hp_made.libs/{library}": objects["old"]}
    [message] = findings(make_wheel(tmp_path, NATIVE, carried))["libraries-are-everywhere"]
    assert f"carries {library}" in message


def test_an_island_links_what_it_is_for_and_only_that(tmp_path: Path, objects: dict[str, bytes]) -> None:
    island = "hp_made/libhp_kernels_cann.so"
    assert findings(make_wheel(tmp_path, NATIVE, {MODULE: objects["old"], island: objects["cann"]})) == {}
    found = findings(make_wheel(tmp_path, NATIVE, {MODULE: objects["old"], island: objects["torch"]}))
    assert f"{island} links libc10.so" in found["libraries-are-everywhere"][0]


def test_libraries_are_looked_for_only_in_the_wheel(tmp_path: Path, objects: dict[str, bytes]) -> None:
    found = findings(make_wheel(tmp_path, NATIVE, {MODULE: objects["rpath"]}))
    assert [re.search(r"RPATH '(.*?)'", message)[1] for message in found["rpaths-stay-inside"]] == [
        "/opt/torch/lib",
        "$ORIGIN/../../torch/lib",
    ]
    assert findings(make_wheel(tmp_path, NATIVE, {MODULE: objects["origin"]})) == {}


@pytest.mark.parametrize(
    ("rule", "arguments", "message"),
    [
        ("types-come-along", {"without": ["hp_made/py.typed"]}, "hp_made/py.typed is missing"),
        ("types-come-along", {"files": {"other/__init__.py": b""}}, "installs hp_made, other and must"),
        ("licence-comes-along", {"without": ["hp_made-0.1.0.dist-info/licenses/LICENSE"]}, "the text of the licence"),
        ("licence-comes-along", {"License_Expression": ["MIT"]}, "MIT, which must be Apache-2.0"),
        ("siblings-are-bounded", {"Requires_Dist": ["hp-core"]}, "requires hp-core: give it a range"),
        ("siblings-are-bounded", {"Requires_Dist": ["hp_core>=0.1"]}, "hp-core>=0.1.0,<0.2"),
        ("siblings-are-bounded", {"Requires_Dist": ["hp-core[torch]; extra == 'torch'"]}, "requires hp-core[torch]"),
        ("frameworks-are-optional", {"Requires_Dist": ["torch>=2.7; python_version > '3.9'"]}, "requires torch>=2.7"),
        ("nothing-else-is-shipped", {"files": {"hp_made/tests/test_it.py": b""}}, "hp_made/tests/test_it.py is a test"),
        ("nothing-else-is-shipped", {"files": {"hp_made/conftest.py": b""}}, "is a test"),
        ("nothing-else-is-shipped", {"files": {"hp_made/__pycache__/x.cpython-311.pyc": b""}}, "left over"),
    ],
)
def test_content_and_metadata(tmp_path: Path, rule: str, arguments: dict[str, object], message: str) -> None:
    found = findings(make_wheel(tmp_path, **arguments))
    assert list(found) == [rule]
    assert message in found[rule][0]


def test_an_extra_of_a_bounded_sibling_and_of_a_framework_is_fine(tmp_path: Path) -> None:
    required = [
        "hp-core<0.2,>=0.1.0",
        "hp-core[torch]; extra == 'torch'",
        "torch>=2.7; extra == 'torch'",
        "testing-tool",
    ]
    assert findings(make_wheel(tmp_path, Requires_Dist=required)) == {}


def test_what_is_read_from_an_object_is_what_binutils_reads(objects: dict[str, bytes], tmp_path: Path) -> None:
    """An independent reader of the same tables, on one of ours and on a real module of this Python."""
    module = Path(
        subprocess.run([sys.executable, "-c", "import _ctypes; print(_ctypes.__file__)"], **_CAPTURE).stdout.strip()
    )
    for name, content in {"made.so": objects["glibcxx-30"], "real.so": module.read_bytes()}.items():
        path = tmp_path / name
        path.write_bytes(content)
        listed = subprocess.run(["readelf", "--dyn-syms", "--wide", str(path)], **_CAPTURE).stdout
        expected = set(re.findall(r"UND (\w+)@(\w+[\w.]*)", listed))
        found = read_shared_object(name, content)
        assert {(symbol, need.version) for need in found.needs for symbol in need.symbols} == expected
        dynamic = subprocess.run(["readelf", "--dynamic", str(path)], **_CAPTURE).stdout
        assert list(found.needed) == re.findall(r"\(NEEDED\).*\[(.*)\]", dynamic)


_CAPTURE = {"capture_output": True, "text": True, "check": True, "timeout": 60}


@pytest.mark.parametrize("kept", [0.3, 0.9, 0.999])
def test_a_damaged_object_is_an_error_that_names_it(objects: dict[str, bytes], kept: float) -> None:
    content = objects["glibcxx-30"]
    with pytest.raises(ValueError, match=r"module\.so"):
        read_shared_object("module.so", content[: int(len(content) * kept)])


def test_the_tags_of_old_stand_for_their_glibc() -> None:
    assert tagged_glibc("manylinux2014_x86_64") == Version("2.17")
    assert tagged_glibc("manylinux_2_34_aarch64") == Version("2.34")
    assert tagged_glibc("linux_x86_64") is None


def test_the_floors_are_those_of_the_design() -> None:
    table = {
        name: (str(t.offers["GLIBC"]), str(t.offers["GLIBCXX"]), t.gcc) for name, t in read_floors().targets.items()
    }
    assert table == {
        "openeuler-22.03": ("2.34", "3.4.28", "10.3.1"),
        "openeuler-24.03": ("2.38", "3.4.30", "12.3.1"),
        "ubuntu-22.04": ("2.35", "3.4.30", "11.4"),
        "manylinux-2.28": ("2.28", "3.4.24", "toolset 14"),
    }


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    good = str(make_wheel(tmp_path))
    assert check_wheel.main([good]) == 0
    assert "serves every machine" in capsys.readouterr().out
    torn = tmp_path / "hp_torn-0.1.0-py3-none-any.whl"
    torn.write_bytes(b"PK")
    misnamed = tmp_path / "wheel.whl"
    assert check_wheel.main([good, str(torn), str(misnamed)]) == 1
    output = capsys.readouterr().out
    assert "hp_torn-0.1.0-py3-none-any.whl: readable: " in output
    assert "wheel.whl isn't named as a wheel is" in output
    with pytest.raises(SystemExit) as stopped:
        check_wheel.main([good, "--target", "solaris"])
    assert stopped.value.code == 2
    # As a person calls it, from anywhere.
    command = [sys.executable, str(ROOT / "build" / "check_wheel.py"), good]
    assert "keeps all" in subprocess.run(command, cwd=tmp_path, **_CAPTURE).stdout
