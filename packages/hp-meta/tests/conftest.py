"""Made-up machines for the doctor: CANN trees, drivers, packages and shared objects that are broken on purpose.

Packages are small fakes that come before the installed ones on the path, so a machine is examined in a fraction of a
second; `MadeUpMachine` writes them into a folder of the test.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from pathlib import Path
from textwrap import dedent

import pytest

from hyper_parallel.doctor import Report, diagnose
from hyper_parallel.doctor.examine import judge, requests
from hyper_parallel.doctor.probe import Outcome, run_probe

# What the probes find on a healthy machine with PyTorch and without devices.
HEALTHY = {
    "host": Outcome(
        {
            "system": "linux",
            "machine": os.uname().machine,
            "kernel": "6.6.0",
            "os": "openEuler 22.03 (LTS-SP4)",
            "python": "3.11.4",
            "implementation": "CPython",
            "tag": "cp311-cp311-linux_x86_64",
            "threaded": False,
            "executable": "/usr/bin/python3",
            "glibc": [2, 34],
            "glibcxx": "3.4.28",
            "nvidia": [],
            "open-files": [65535, 65535],
            "shared-memory": [8 << 30, 8 << 30],
            "interfaces": {"lo": ["127.0.0.1", "::1"], "eth0": ["192.168.1.5"], "enp3s0": ["10.0.0.5", "fe80::1"]},
        }
    ),
    "wheels": Outcome(
        {
            "distributions": {
                name: {
                    "version": "0.1.0",
                    "place": "/usr/lib/python3.11/site-packages",
                    "hidden": [],
                    "requires": [],
                    "tags": ["py3-none-any"],
                    "editable": False,
                }
                for name in ("hp-core", "hp-fsdp", "hp-pipeline", "hyper-parallel")
            },
            "native": [],
        }
    ),
    "torch_itself": Outcome(
        {
            "installed": "2.9.0",
            "version": "2.9.0",
            "seconds": 1.5,
            "place": "/usr/lib/torch/__init__.py",
            "abi": True,
            "backends": ["gloo"],
            "cuda.build": None,
        }
    ),
    "torch_npu": Outcome({"installed": None}),
    "mindspore_itself": Outcome({"installed": None}),
    "cann": Outcome({"homes": [], "stated": None}),
}

TORCH = """
    import os
    from importlib import metadata
    from types import SimpleNamespace
    __version__ = {version!r}
    version = SimpleNamespace(cuda=None)
    _C = SimpleNamespace(_GLIBCXX_USE_CXX11_ABI={abi!r})
    distributed = SimpleNamespace(is_available=lambda: True)
    for name in ("gloo", "nccl", "mpi"):
        setattr(distributed, f"is_{{name}}_available", lambda name=name: name in {backends!r})
    if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "0":
        for entry in metadata.entry_points(group="torch.backends"):
            try:
                entry.load()()
            except Exception as error:
                raise RuntimeError(f"Failed to load the backend extension: {{entry.name}}") from error
"""
TORCH_NPU = """
    from types import SimpleNamespace
    __version__ = {version!r}
    npu = SimpleNamespace(device_count=lambda: {devices})
    def _autoload():
        pass
"""
MINDSPORE = """
    __version__ = {version!r}
    def set_device(name):
        assert name == "CPU"
    class Tensor:
        def __init__(self, values):
            self.values = values
        def __add__(self, other):
            return Tensor([a + b for a, b in zip(self.values, other.values)])
        def asnumpy(self):
            return self.values
"""
SMI = """
    #!/bin/sh
    cat <<END
    +------------------------------------------------------------------------------------------------+
    | npu-smi 25.5.0                   Version: 25.5.0                                               |
    +---------------------------+---------------+----------------------------------------------------+
    | NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
    | Chip                      | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
    +===========================+===============+====================================================+
    | 0     910B1               | {first:<13} | 94.6        49                0    / 0             |
    | 0                         | 0000:C1:00.0  | 0           0    / 0          3373 / 65536         |
    | 1     910B1               | OK            | 93.0        48                0    / 0             |
    | 0                         | 0000:01:00.0  | 0           0    / 0          3373 / 65536         |
    +===========================+===============+====================================================+
    END
"""


class MadeUpMachine:
    """A machine of files below one folder, and the environment variables of a shell on it.

    Args:
        folder: an empty folder.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root, self.packages, self.programs = folder / "root", folder / "packages", folder / "bin"
        for path in (self.root / "dev" / "shm", self.root / "etc", self.packages, self.programs, folder / "home"):
            path.mkdir(parents=True)
        (self.root / "etc" / "os-release").write_text('PRETTY_NAME="openEuler 22.03 (LTS-SP4)"\n', encoding="utf-8")
        self.environment = {
            "PATH": f"{self.programs}:/usr/bin:/bin",
            "HOME": str(folder / "home"),
            "PYTHONPATH": str(self.packages),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def examine(self, profile: str | None = None, *probes: str, timeout: float = 60.0) -> Report:
        """What the doctor says of it; with names of probes, from these alone, and all else as `HEALTHY` has it."""
        if not probes:
            return diagnose(profile, environment=self.environment, root=self.root, timeout=timeout)
        wanted = requests(self.environment, self.root)
        outcomes = {name: run_probe(name, *wanted[name], timeout) for name in probes}
        return judge({**HEALTHY, **outcomes}, self.environment, profile)

    def install(self, name: str, version: str, source: str = "", entry_points: str = "", requires: str = "") -> Path:
        """Put a package on the path, before what is really installed; returns its folder."""
        package = self.packages / name.replace("-", "_")
        package.mkdir()
        (package / "__init__.py").write_text(dedent(source), encoding="utf-8")
        record = self.packages / f"{name.replace('-', '_')}-{version}.dist-info"
        record.mkdir()
        lines = ["Metadata-Version: 2.1", f"Name: {name}", f"Version: {version}", *filter(None, requires.split("\n"))]
        (record / "METADATA").write_text("\n".join(lines) + "\n", encoding="utf-8")
        if entry_points:
            (record / "entry_points.txt").write_text(dedent(entry_points), encoding="utf-8")
        return package

    def torch(
        self, version: str = "2.9.0", *, abi: bool = True, backends: tuple[str, ...] = ("gloo",), source: str = ""
    ) -> Path:
        """A PyTorch that has what the doctor asks for; or one with a source of its own."""
        return self.install("torch", version, source or TORCH.format(version=version, abi=abi, backends=backends))

    def torch_npu(self, version: str = "2.9.0", *, devices: int = 2, source: str = "") -> Path:
        """A torch_npu, which torch loads by itself."""
        entry = "[torch.backends]\ntorch_npu = torch_npu:_autoload\n"
        return self.install("torch-npu", version, source or TORCH_NPU.format(version=version, devices=devices), entry)

    def mindspore(self, version: str = "2.10.0", *, numpy: str = "1.26.4", source: str = "") -> None:
        """A MindSpore, and a NumPy beside it."""
        self.install("mindspore", version, source or MINDSPORE.format(version=version))
        self.install("numpy", numpy)

    def cann(self, layout: str = "cann", version: str = "8.5.0", without: tuple[str, ...] = ()) -> Path:
        """A CANN tree, of the layout up to 8.3 (`ascend-toolkit`) or of that since 8.5 (`cann`); returns its home."""
        ascend = self.root / "usr" / "local" / "Ascend"
        if layout == "cann":
            real, link = ascend / f"cann-{version}", ascend / "cann"
            script = real / "set_env.sh"
        else:
            real, link = ascend / "ascend-toolkit" / version, ascend / "ascend-toolkit" / "latest"
            script = ascend / "ascend-toolkit" / "set_env.sh"
        pieces = {
            "lib64/libascendcl.so": "",
            "lib64/libhccl.so": "",
            "opp/built-in/op_impl/ai_core/tbe/kernel/ascend910b": "",
            "x86_64-linux/ascend_toolkit_install.info": f"package_name=Ascend-cann-toolkit\nversion={version}\n",
        }
        for name, text in pieces.items():
            if not name.startswith(without or ("nothing",)):
                (real / name).parent.mkdir(parents=True, exist_ok=True)
                (real / name).write_text(text, encoding="utf-8")
        real.mkdir(parents=True, exist_ok=True)
        script.write_text("# sets the environment\n", encoding="utf-8")
        link.symlink_to(real, target_is_directory=True)
        return link

    def source_script(self, home: Path) -> None:
        """What sourcing set_env.sh does to the shell."""
        self.environment["ASCEND_HOME_PATH"] = str(home)
        self.environment["ASCEND_OPP_PATH"] = str(home / "opp")
        self.environment["LD_LIBRARY_PATH"] = f"{home}/lib64:{home}/lib64/plugin"

    def driver(self, health: str = "OK", smi: str = "") -> None:
        """A driver with two devices, and npu-smi."""
        (self.root / "dev" / "davinci0").touch()
        (self.root / "dev" / "davinci1").touch()
        record = self.root / "usr" / "local" / "Ascend" / "driver" / "version.info"
        record.parent.mkdir(parents=True)
        record.write_text("Version=25.5.0\n", encoding="utf-8")
        program = self.programs / "npu-smi"
        program.write_text(dedent(smi or SMI.format(first=health)).lstrip(), encoding="utf-8")
        program.chmod(0o755)


@pytest.fixture
def healthy() -> dict[str, Outcome]:
    """What the probes find on a healthy machine without devices."""
    return dict(HEALTHY)


@pytest.fixture
def machine(tmp_path: Path) -> MadeUpMachine:
    """An empty machine with a healthy PyTorch."""
    made = MadeUpMachine(tmp_path / "machine")
    made.torch()
    return made


@pytest.fixture
def bare_machine(tmp_path: Path) -> MadeUpMachine:
    """An empty machine, on which a test puts everything itself."""
    return MadeUpMachine(tmp_path / "machine")


@pytest.fixture(scope="session")
def shared_objects(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Shared objects by what is wrong with them, compiled once."""
    folder = tmp_path_factory.mktemp("shared-objects")
    compiler = shutil.which("gcc") or shutil.which("cc")
    assert compiler, "a C compiler is needed to make broken shared objects"
    sources = {
        "fine": '#include <stdio.h>\nint fine(void) { return puts("fine"); }\n',
        "hccl": "int HcclCommInit(void) { return 0; }\n",
        "needs-hccl": "int HcclCommInit(void); int wants(void) { return HcclCommInit(); }\n",
        "torch-symbol": (
            'extern int wanted(void) __asm__("_ZN3c1011SymInt19toSymNodeEv");\nint wants(void) { return wanted(); }\n'
        ),
    }
    arguments = {"hccl": ["-Wl,-soname,libhccl.so"], "needs-hccl": [f"-L{folder}", "-lhccl"]}
    made = {}
    for name, source in sources.items():
        path = folder / ("libhccl.so" if name == "hccl" else f"{name}.so")
        (folder / f"{name}.c").write_text(source, encoding="utf-8")
        command = [compiler, "-shared", "-fPIC", "-o", str(path), str(folder / f"{name}.c"), *arguments.get(name, [])]
        subprocess.run(command, check=True, timeout=60)
        made[name] = path
    # Another architecture is two bytes of the header.
    foreign = bytearray(made["fine"].read_bytes())
    foreign[18:20] = (183 if os.uname().machine == "x86_64" else 62).to_bytes(2, "little")
    made["foreign"] = folder / "foreign.so"
    made["foreign"].write_bytes(foreign)
    # A version of glibc that doesn't exist yet, of the same length as the one that is asked for.
    future = made["fine"].read_bytes()
    made["future"] = folder / "future.so"
    wanted = b"GLIBC_2.2.5\0" if b"GLIBC_2.2.5\0" in future else b"GLIBC_2.17\0"
    made["future"].write_bytes(
        future.replace(wanted, b"GLIBC_2.999"[: len(wanted) - 1].ljust(len(wanted) - 1, b"9") + b"\0")
    )
    return made


@pytest.fixture
def make_wheel(tmp_path: Path) -> Callable[..., Path]:
    """A function that writes a wheel with the given name and shared objects."""

    def make(name: str, *shared: Path, tag: str | None = None, metadata: str = "") -> Path:
        path = tmp_path / name
        distribution, version, *tags = name.removesuffix(".whl").split("-")
        record = f"{distribution}-{version}.dist-info"
        with zipfile.ZipFile(path, "w") as archive:
            own = tag or "-".join(tags)
            archive.writestr(f"{record}/WHEEL", f"Wheel-Version: 1.0\nGenerator: test\nTag: {own}\n")
            archive.writestr(
                f"{record}/METADATA", f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n{metadata}"
            )
            for file in shared:
                archive.write(file, f"{distribution}/{file.name}")
        return path

    return make
