"""`doctor wheel`: which part of a wheel doesn't fit, what its native parts miss, and how one that fits is built.

Tags and versions are compared with the library `packaging`, which pip uses; the reader of ELF files with damaged ones.
"""

from __future__ import annotations

import itertools
import platform
import random
import sys
from pathlib import Path

import pytest
from packaging.specifiers import SpecifierSet
from packaging.tags import sys_tags
from packaging.version import Version

from hyper_parallel.doctor import Status, examine_wheel
from hyper_parallel.doctor.elf import ElfError, read_elf
from hyper_parallel.doctor.linking import Loader
from hyper_parallel.doctor.tables import table
from hyper_parallel.doctor.tags import Interpreter, WheelNameError, misfits, parse_wheel_name
from hyper_parallel.doctor.versions import allows, key, release
from targets import read_floors

HERE = Interpreter((3, 11), machine=platform.machine(), glibc=(2, 34))
MACHINE = HERE.machine
OTHER = "aarch64" if MACHINE == "x86_64" else "x86_64"


def examine(path: Path, **here: object):
    return examine_wheel(path, here=Interpreter(**{**vars(HERE), **here}))


@pytest.mark.parametrize(
    ("tag", "part", "text", "command"),
    [
        ("cp312-cp312-linux_{m}", "Python", "built for Python 3.12, this is cp311", "python3.12 -m pip install"),
        (
            "cp310-cp310-manylinux_2_28_{m}",
            "Python",
            "built for Python 3.10",
            "python -m pip wheel --no-deps --wheel-dir dist packages/hp-kernels",
        ),
        ("cp311-cp311d-linux_{m}", "ABI", "a debug build (cp311d)", "python -m pip wheel"),
        ("cp311-cp311t-linux_{m}", "ABI", "a build without the global lock (cp311t)", "python -m pip wheel"),
        ("cp311-cp311-linux_{o}", "platform", "built for the architecture {o}, this is {m}", "python -m pip wheel"),
        (
            "cp311-cp311-manylinux_2_38_{m}",
            "platform",
            "needs glibc 2.38 or newer, this system has 2.34",
            "nox -s wheels -- --target openeuler-22.03",
        ),
        ("cp311-cp311-musllinux_1_2_{m}", "platform", "built for musl", "python -m pip wheel"),
        ("cp311-cp311-macosx_11_0_arm64", "platform", "it is for macosx_11_0_arm64", "python -m pip wheel"),
        ("pp310-pypy310_pp73-linux_{m}", "Python", "another implementation of Python (pp)", "python -m pip wheel"),
        ("py2-none-any", "Python", "it needs Python 2.0", "python -m pip wheel"),
    ],
)
def test_the_part_that_does_not_fit_is_named(make_wheel, tag, part, text, command):
    names = {"m": MACHINE, "o": OTHER}
    report = examine(make_wheel(f"hp_kernels-0.1.0-{tag.format(**names)}.whl"))
    finding = report["wheels.tag"]
    assert finding.status is Status.FAILURE
    assert report.exit_code() == 1
    assert finding.text.startswith(f"{part} tag ")
    assert text.format(**names) in finding.text
    assert any(line.startswith(command) for line in finding.remedy), finding.remedy


def test_several_parts_are_all_named(make_wheel):
    text = examine(make_wheel(f"hp_kernels-0.1.0-cp312-cp312-linux_{OTHER}.whl"))["wheels.tag"].text
    assert "Python tag cp312" in text
    assert f"platform tag linux_{OTHER}" in text


def test_a_wheel_that_fits_and_links_is_all_right(make_wheel, shared_objects):
    tag = Interpreter.current().tag
    report = examine_wheel(make_wheel(f"hp_kernels-0.1.0-{tag}.whl", shared_objects["fine"]))
    assert [finding.status for finding in report.findings if finding.status is not Status.SKIPPED] == [Status.OK] * 5
    assert report.exit_code(strict=True) == 0


@pytest.mark.parametrize(
    ("broken", "check", "texts", "command"),
    [
        (
            "torch-symbol",
            "wheels.symbols",
            ("undefined symbol _ZN3c10", "libc10.so should have it"),
            "pip install --force-reinstall",
        ),
        (
            "needs-hccl",
            "wheels.symbols",
            ("needs libhccl.so, which was not found; it is part of CANN",),
            "source /usr/local/Ascend",
        ),
        ("foreign", "wheels.symbols", (f"is built for {OTHER}, this is {MACHINE}",), "python -m pip wheel"),
        (
            "future",
            "wheels.symbols",
            ("(GLIBC_2.999", "libc.so.6 should have it", "doesn't"),
            "pip install --force-reinstall",
        ),
        ("future", "host.glibc", ("too old: GLIBC_2.999",), "pip install --force-reinstall"),
    ],
)
def test_native_parts_that_would_not_link(make_wheel, shared_objects, broken, check, texts, command):
    path = make_wheel(f"hp_kernels-0.1.0-cp311-cp311-linux_{MACHINE}.whl", shared_objects[broken])
    report = examine(path)
    assert report["wheels.tag"].status is Status.OK
    assert report[check].status is Status.FAILURE
    for text in texts:
        assert text in report[check].text
    assert any(line.startswith(command) for line in report[check].remedy), report[check].remedy


def test_a_wheel_for_any_platform_with_a_native_part(make_wheel, shared_objects):
    finding = examine(make_wheel("hp_core-0.1.0-py3-none-any.whl", shared_objects["fine"]))["wheels.symbols"]
    assert finding.text == "the wheel says it fits any platform, and holds hp_core/fine.so"


def test_a_renamed_wheel(make_wheel):
    path = make_wheel(f"hp_kernels-0.1.0-cp311-cp311-linux_{MACHINE}.whl", tag=f"cp312-cp312-linux_{MACHINE}")
    finding = examine(path)["wheels.tag"]
    assert finding.text == f"the file was renamed: its own record says cp312-cp312-linux_{MACHINE}"
    assert finding.remedy[1] == f"mv {path} {path.with_name(f'hp_kernels-0.1.0-cp312-cp312-linux_{MACHINE}.whl')}"


def test_a_damaged_file(tmp_path):
    path = tmp_path / "hp_core-0.1.0-py3-none-any.whl"
    path.write_bytes(b"PK\3\4 cut off")
    finding = examine(path)["wheels.tag"]
    assert "BadZipFile" in finding.text
    assert "pip download --no-deps hp-core==0.1.0" in finding.remedy


def test_what_it_requires(make_wheel):
    metadata = "Requires-Python: >=3.12\nRequires-Dist: packaging<2\nRequires-Dist: pytest<1; extra == 'old'\n"
    report = examine(make_wheel("hp_core-0.1.0-py3-none-any.whl", metadata=metadata))
    assert report["host.python"].text == "the wheel requires Python >=3.12, this is 3.11"
    assert report["wheels.ranges"].text.startswith("hp-core 0.1.0 needs packaging <2; ")
    assert report["wheels.ranges"].remedy == ('pip install "packaging<2"',)
    assert len(report["wheels.ranges"].details) == 1


def test_names_that_are_no_wheels(tmp_path):
    (tmp_path / "hp_core.whl").touch()
    with pytest.raises(WheelNameError, match=r"name-version-python-abi-platform\.whl is needed"):
        examine_wheel(tmp_path / "hp_core.whl")
    with pytest.raises(FileNotFoundError, match="there is no such file"):
        examine_wheel(tmp_path / "hp_core-0.1.0-py3-none-any.whl")
    with pytest.raises(IsADirectoryError, match="is a folder"):
        examine_wheel(tmp_path)


def test_tags_fit_exactly_when_pip_says_so():
    supported = {str(tag) for tag in sys_tags()}
    here = Interpreter.current()
    assert here.tag in supported
    minor = sys.version_info.minor
    pythons = [f"cp3{other}" for other in range(minor - 2, minor + 2)] + [
        "py3",
        f"py3{minor}",
        f"py3{minor + 1}",
        "cp3",
        "py2",
        "pp310",
    ]
    abis = ["none", "abi3", f"cp3{minor - 1}", f"cp3{minor}", f"cp3{minor}t", f"cp3{minor}d", "cp37m", "pypy310_pp73"]
    libraries = ["manylinux1", "manylinux2014", "manylinux_2_28", "manylinux_2_99", "musllinux_1_1", "linux"]
    platforms = ["any", "win_amd64", *(f"{library}_{machine}" for library in libraries for machine in (MACHINE, OTHER))]
    wrong = []
    for python, abi, place in itertools.product(pythons, abis, platforms):
        fits = not misfits(parse_wheel_name(f"a-1-{python}-{abi}-{place}.whl"), here)
        if fits is not (f"{python}-{abi}-{place}" in supported):
            wrong.append((python, abi, place))
    assert wrong == []


def test_several_tags_in_one_name_need_one_that_fits():
    assert misfits(parse_wheel_name(f"a-1-cp39.cp310.cp311-cp39.cp310.cp311-linux_{MACHINE}.whl"), HERE) == []
    both = parse_wheel_name(f"a-1-1build-cp311-cp311-manylinux_2_40_{MACHINE}.manylinux2014_{MACHINE}.whl")
    assert misfits(both, HERE) == []
    assert both.version == "1"


VERSIONS = (
    "0.1 0.1.0 0.1.0.dev1 0.1.0a1 0.1rc1 0.1.post1 0.1.1 0.2 0.2.0rc1 0.2.1 1 1.0.1 2.13.0+cpu 2.7.1.post2 10.0".split()
)


def test_versions_and_ranges_are_those_of_packaging():
    for one, other in itertools.product(VERSIONS, VERSIONS):
        assert (key(one) < key(other)) is (Version(one.split("+")[0]) < Version(other.split("+")[0])), (one, other)
    ranges = ">=0.1.0,<0.2|~=0.1.0|~=0.1|==0.1.*|!=0.1.*|!=0.1|<1|>0.1|<=0.2|==2.13.0|>=2.7|<2|===0.1".split("|")
    for specifier, version in itertools.product(ranges, VERSIONS):
        assert allows(specifier, version) is SpecifierSet(specifier).contains(version, prereleases=True), (
            specifier,
            version,
        )
    assert allows("about 2", "2.0") is None
    assert allows("", "2.0") is True
    assert [release(text) for text in ("8.3.RC1", "9.0.0-beta.2", "2.7.1.post2", "none")] == [
        (8, 3),
        (9,),
        (2, 7, 1),
        (),
    ]


def test_shared_objects_are_read(shared_objects):
    elf = read_elf(shared_objects["needs-hccl"])
    assert elf.machine == MACHINE
    assert "libhccl.so" in elf.needed
    assert "wants" in elf.defined
    assert [symbol.name for symbol in elf.undefined if not symbol.weak] == ["HcclCommInit"]
    assert read_elf(shared_objects["hccl"]).soname == "libhccl.so"
    assert ("libc.so.6", "GLIBC_2.2.5" if MACHINE == "x86_64" else "GLIBC_2.17") in read_elf(
        shared_objects["fine"]
    ).wanted


def test_libraries_are_found_where_the_linker_finds_them(shared_objects):
    path = shared_objects["needs-hccl"]
    assert Loader({}).link(path).missing == ("libhccl.so",)
    found = Loader({"LD_LIBRARY_PATH": f"/nowhere:{path.parent}"}).link(path)
    assert (found.missing, found.unresolved) == ((), ())
    assert found.found["libhccl.so"] == path.parent / "libhccl.so"
    assert Loader({}).newest("libc.so.6", "GLIBC_") == platform.libc_ver()[1]


def test_damaged_shared_objects_are_errors_and_nothing_worse(shared_objects, tmp_path):
    whole = shared_objects["needs-hccl"].read_bytes()
    random.seed(7)
    path = tmp_path / "damaged.so"
    cases = [whole[:length] for length in range(0, len(whole), len(whole) // 100)]
    for _ in range(200):
        damaged = bytearray(whole)
        for _ in range(8):
            damaged[random.randrange(16, 1280)] = random.randrange(256)
        cases.append(bytes(damaged))
    refused = 0
    for case in cases:
        path.write_bytes(case)
        try:
            read_elf(path)
        except ElfError:
            refused += 1
    assert refused > 50
    with pytest.raises(ElfError, match="is not an ELF file"):
        read_elf(Path(__file__))


def test_the_targets_are_those_that_wheels_are_built_for():
    """The doctor brings its own copy, since a user has no checkout."""
    own = {target["name"]: (target["glibc"], target["glibcxx"]) for target in table("targets")["targets"]}
    built = {name: target.offers for name, target in read_floors().targets.items()}
    assert own == {name: (str(offers["GLIBC"]), str(offers["GLIBCXX"])) for name, offers in built.items()}
