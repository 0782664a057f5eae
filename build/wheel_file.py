"""A built wheel, read once: its tags, metadata, files and shared objects.

Nothing is judged here; `build/check_wheel.py` does that, and `build/finish_wheels.py` says whom a wheel serves.
"""

from __future__ import annotations

from dataclasses import dataclass
from email.message import Message
from email.parser import Parser
from functools import cached_property
from pathlib import Path
from zipfile import BadZipFile, ZipFile

from packaging.requirements import Requirement
from packaging.tags import Tag
from packaging.utils import InvalidWheelFilename, canonicalize_name, parse_wheel_filename
from packaging.version import Version

from shared_objects import ELF_MAGIC, NATIVE_MAGICS, SharedObject, read_shared_object


@dataclass(frozen=True)
class Wheel:
    """One wheel file.

    Attributes:
        path: the file.
        name: the distribution, normalised (`hp-kernels`).
        version: its version.
        tags: the tags of its file name.
        files: the paths inside it, sorted, folders left out.
        metadata: its METADATA, field by field.
        description: its WHEEL, field by field.
        native: paths of compiled files of any system's format.
        shared_objects: its ELF files.
    """

    path: Path
    name: str
    version: Version
    tags: frozenset[Tag]
    files: tuple[str, ...]
    metadata: Message
    description: Message
    native: tuple[str, ...]
    shared_objects: tuple[SharedObject, ...]

    @cached_property
    def platforms(self) -> frozenset[str]:
        """The platform tags (`any`, `linux_x86_64`, `manylinux_2_28_aarch64`)."""
        return frozenset(tag.platform for tag in self.tags)

    @cached_property
    def pure(self) -> bool:
        """Whether its tags say that it runs on every machine."""
        return self.platforms == {"any"}

    @cached_property
    def requirements(self) -> tuple[Requirement, ...]:
        """What it declares to need, extras included."""
        return tuple(Requirement(text) for text in self.metadata.get_all("Requires-Dist", []))

    @cached_property
    def packages(self) -> tuple[str, ...]:
        """What it puts beside other packages in site-packages."""
        return tuple(sorted({path.split("/")[0] for path in self.files if ".dist-info/" not in path}))


def read_wheel(path: Path) -> Wheel:
    """Read a wheel.

    Raises:
        ValueError: the file is no wheel: its name, its archive, its METADATA or one of its ELF files can't be read.
    """
    try:
        name, version, _, tags = parse_wheel_filename(path.name)
    except InvalidWheelFilename as error:
        raise ValueError(f"{path.name} isn't named as a wheel is: {error}") from error
    try:
        with ZipFile(path) as archive:
            contents = {info.filename: archive.read(info) for info in archive.infolist() if not info.is_dir()}
    except (BadZipFile, OSError) as error:
        raise ValueError(f"{path} can't be read: {error}") from error
    native = sorted(file for file, content in contents.items() if content.startswith(NATIVE_MAGICS))
    return Wheel(
        path=path,
        name=canonicalize_name(name),
        version=version,
        tags=tags,
        files=tuple(sorted(contents)),
        metadata=_fields(path, contents, "METADATA"),
        description=_fields(path, contents, "WHEEL"),
        native=tuple(native),
        shared_objects=tuple(
            read_shared_object(file, contents[file]) for file in native if contents[file].startswith(ELF_MAGIC)
        ),
    )


def _fields(path: Path, contents: dict[str, bytes], name: str) -> Message:
    found = [file for file in contents if file.endswith(f".dist-info/{name}") and file.count("/") == 1]
    if len(found) != 1:
        raise ValueError(f"{path.name} must hold one *.dist-info/{name}, and holds {len(found)}")
    return Parser().parsestr(contents[found[0]].decode("utf-8"))
