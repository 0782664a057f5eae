"""Wheels and shared objects made up for the tests of the wheel checks, wrong in whatever way a test wants.

A shared object is linked by gcc against libraries of our making, so that it needs exactly the versions of symbols that a
test names, whatever compiler and C library the machine has.
"""

from __future__ import annotations

import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from zipfile import ZipFile

Versions = Mapping[str, Mapping[str, Sequence[str]]]

METADATA = {
    "Metadata-Version": ["2.4"],
    "Name": ["hp-made"],
    "Version": ["0.1.0"],
    "License-Expression": ["Apache-2.0"],
    "License-File": ["LICENSE"],
    "Requires-Dist": ["hp-core<0.2,>=0.1.0"],
}


def make_wheel(
    folder: Path,
    tag: str = "py3-none-any",
    files: Mapping[str, bytes] | None = None,
    without: Sequence[str] = (),
    *,
    name: str = "hp_made",
    inner_tag: str | None = None,
    purelib: bool | None = None,
    **metadata: list[str],
) -> Path:
    """Write a wheel that keeps every rule, but for what the arguments say.

    Args:
        folder: where to write it.
        tag: the tag of its name, and of its WHEEL unless `inner_tag` is given.
        files: what it holds beyond the package, its types and its licence, by path.
        without: paths to leave out.
        name: the package.
        inner_tag: the tag that WHEEL says.
        purelib: what WHEEL says; as the tag says where None.
        metadata: fields of METADATA, `Requires_Dist` for `Requires-Dist`.
    """
    fields = {**METADATA, **{key.replace("_", "-"): value for key, value in metadata.items()}}
    info = f"{name}-0.1.0.dist-info"
    pure = tag.endswith("-any") if purelib is None else purelib
    contents = {
        f"{name}/__init__.py": b"",
        f"{name}/py.typed": b"",
        f"{info}/licenses/LICENSE": b"Apache License",
        f"{info}/METADATA": "".join(f"{key}: {value}\n" for key, values in fields.items() for value in values).encode(),
        f"{info}/WHEEL": f"Wheel-Version: 1.0\nRoot-Is-Purelib: {str(pure).lower()}\nTag: {inner_tag or tag}\n".encode(),
        **(files or {}),
    }
    path = folder / f"{name}-0.1.0-{tag}.whl"
    with ZipFile(path, "w") as archive:
        for file, content in contents.items():
            if file not in without:
                archive.writestr(file, content)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in contents))
    return path


def make_shared_object(folder: Path, needs: Versions, rpath: str | None = None) -> bytes:
    """Link a shared object that needs certain versions of symbols.

    Args:
        folder: an empty folder to work in.
        needs: by library, by version, the symbols that the object uses: `{"libc.so.6": {"GLIBC_2.34": ["f"]}}`. A version ""
            is a library without versions.
        rpath: its RUNPATH.
    """
    libraries = []
    used = []
    for library, versions in needs.items():
        source, script, output = (folder / f"{library}{suffix}" for suffix in (".c", ".map", ""))
        defined = {symbol: version for version, symbols in versions.items() for symbol in symbols}
        source.write_text("".join(f"void {symbol}(void) {{}}\n" for symbol in defined))
        script.write_text(
            "".join(
                f"{version} {{ {' '.join(f'{symbol};' for symbol in symbols)} }};\n"
                for version, symbols in versions.items()
            )
        )
        scripted = [] if "" in versions else [f"-Wl,--version-script={script}"]
        _gcc([str(source), f"-Wl,-soname,{library}", *scripted], output)
        libraries.append(str(output))
        used += defined
    source = folder / "module.c"
    source.write_text(
        "".join(f"void {symbol}(void);\n" for symbol in used)
        + f"void PyInit_module(void) {{ {' '.join(f'{symbol}();' for symbol in used)} }}\n"
    )
    output = folder / "module.so"
    _gcc([str(source), *libraries, *([f"-Wl,-rpath,{rpath}"] if rpath else [])], output)
    return output.read_bytes()


def _gcc(arguments: list[str], output: Path) -> None:
    command = ["gcc", "-shared", "-fPIC", "-nostdlib", "-fno-builtin", "-w", "-o", str(output), *arguments]
    subprocess.run(command, check=True, capture_output=True, text=True, timeout=60)
