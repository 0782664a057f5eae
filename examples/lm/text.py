"""The text: the source files of Python's own standard library, as bytes, and the batches cut from it.

Every machine that runs Python has this text. It is read in a fixed order and cut by numbers that depend only on
(seed, split, step, position in the global batch), so that every mesh, and one process alone, sees the same batches.
"""

from __future__ import annotations

import hashlib
import os
import sysconfig
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from .config import ConfigError

# Not source text in the same sense: tests and their data, generated tables, installed packages, files made per machine.
SKIPPED_FOLDERS = {
    "__pycache__",
    "config",
    "dist-packages",
    "encodings",
    "idlelib",
    "lib2to3",
    "pydoc_data",
    "site-packages",
    "test",
    "tests",
}
SKIPPED_PREFIXES = ("_sysconfigdata", "config-")
VALIDATION_EVERY = 10


@dataclass(frozen=True)
class Text:
    """The bytes to learn from and the bytes to measure on, from different files.

    Attributes:
        train: Of the files for training, one after the other.
        validation: Of those for validation.
        files: How many files were read.
        digest: A fingerprint of all bytes: two runs with equal digests saw the same text.
    """

    train: bytes
    validation: bytes
    files: int
    digest: str

    def unigram_entropy(self) -> float:
        """Entropy of the training bytes' frequencies, in nats per byte.

        What a model reaches that knows how often each byte occurs and nothing of what came before.
        """
        share = np.bincount(np.frombuffer(self.train, np.uint8), minlength=256) / len(self.train)
        return float(-(share * np.log(np.maximum(share, 1e-300))).sum())

    def rows(self, split: str, seed: int, step: int, positions: range, sequence: int) -> NDArray[np.int64]:
        """Some rows of one step's global batch: int64 `[len(positions), sequence + 1]`.

        Args:
            split: `train` or `validation`.
            seed: Of the run.
            step: Which global batch.
            positions: Which of its rows.
            sequence: Bytes to predict in a row; one more is returned, since inputs and targets are shifted by one.
        """
        source = self.train if split == "train" else self.validation
        starts = [_number(f"{seed}/{split}/{step}/{position}") % (len(source) - sequence) for position in positions]
        rows = [np.frombuffer(source, np.uint8, sequence + 1, start) for start in starts]
        return np.stack(rows).astype(np.int64)


def load_standard_library(max_bytes: int, sequence: int) -> Text:
    """Reads the standard library's sources up to `max_bytes`; every tenth file is for validation.

    Raises:
        ConfigError: There is too little text for one row of `sequence` bytes in each split: the sources are stripped,
            or `max_bytes` is too small.
    """
    root = Path(sysconfig.get_path("stdlib"))
    train, validation = bytearray(), bytearray()
    files = 0
    for path in _source_files(root):
        room = max_bytes - len(train) - len(validation)
        if room <= 0:
            break
        (validation if files % VALIDATION_EVERY == VALIDATION_EVERY - 1 else train).extend(path.read_bytes()[:room])
        files += 1
    if min(len(train), len(validation)) <= sequence:
        raise ConfigError(
            f"only {len(train):,} bytes to train on and {len(validation):,} to validate on were found in {files} files "
            f"under {root}, a row needs {sequence + 1}: "
            f"raise --max-bytes ({max_bytes:,}) or use a Python installed with its sources"
        )
    return Text(
        train=bytes(train),
        validation=bytes(validation),
        files=files,
        digest=hashlib.sha256(bytes(train) + b"|" + bytes(validation)).hexdigest()[:16],
    )


def _source_files(root: Path) -> list[Path]:
    """The library's `.py` files in an order that doesn't depend on the file system."""
    kept: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [
            name for name in subfolders if name not in SKIPPED_FOLDERS and not name.startswith(SKIPPED_PREFIXES)
        ]
        kept += [Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(SKIPPED_PREFIXES)]
    return sorted(kept, key=lambda path: path.relative_to(root).as_posix())


def _number(key: str) -> int:
    """A 64-bit number that looks random and is the same on every machine (Python's `hash` is not)."""
    return int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "little")
