"""What the package weighs: its wheel, built here, and the import of `_native` in a fresh interpreter."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
import zipfile
from pathlib import Path
from tempfile import TemporaryDirectory

from benchmarks.report import Section, at_most, table

__all__ = ["section"]

_SOURCE = Path(__file__).resolve().parents[2] / "packages" / "hp-kernels" / "src"
_PROGRAMS = {"import": "import hp_kernels; hp_kernels.native()", "empty": "pass"}


def section(repeats: int) -> Section:
    """Measure, and tell of it."""
    samples: dict[str, list[float]] = {name: [] for name in _PROGRAMS}
    for _ in range(repeats):
        for name, program in _PROGRAMS.items():
            start = time.perf_counter()
            subprocess.run([sys.executable, "-c", program], check=True)
            samples[name].append(1e3 * (time.perf_counter() - start))
    took = statistics.median(full - empty for full, empty in zip(samples["import"], samples["empty"], strict=True))
    size = wheel_bytes() / 1e6
    rows = [("wheel, megabytes", f"{size:.2f}"), ("import with `_native`, milliseconds", f"{took:.1f}")]
    aims = (at_most("wheel", size, 1.0, " MB"), at_most("import", took, 20.0, " ms"))
    lines = [
        "The wheel's files, compressed as a wheel compresses them; the median of fresh interpreters against empty ones in turn.",
        "",
        *table(("", ""), rows),
    ]
    return Section("Footprint", tuple(lines), aims)


def wheel_bytes() -> int:
    """The size of an archive of what is imported here: the Python files, the sources and the extension module."""
    import hp_kernels

    module = hp_kernels.native()
    files = [path for path in sorted(_SOURCE.rglob("*")) if path.suffix in (".py", ".pyi", ".cpp", ".h")]
    with TemporaryDirectory() as folder:
        target = Path(folder) / "wheel.zip"
        with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as archive:
            for path in files:
                archive.write(path, str(path.relative_to(_SOURCE)))
            if module is not None and module.__file__:
                archive.write(module.__file__, Path(module.__file__).name)
        return target.stat().st_size
