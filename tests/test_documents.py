"""What the documents show is run: every Python block of the READMEs and the guide, on four ranks."""

from __future__ import annotations

import re
import socket
from pathlib import Path

import pytest

from hp_core.testing import run_ranks

ROOT = Path(__file__).resolve().parent.parent
DOCUMENTS = [ROOT / "README.md", ROOT / "README.zh-CN.md", *sorted((ROOT / "docs").rglob("*.md"))]


def python_blocks(path: Path) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```", path.read_text("utf-8"), flags=re.M | re.S)


def _run_script(source: str, port: int) -> None:
    import os

    import torch.distributed as dist

    from hp_core import destroy_process_group, deterministic

    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    scope = {"__name__": "__main__"}
    exec(compile(source, "document", "exec"), scope)
    if dist.is_initialized():
        dist.barrier()  # a rank that leaves a document without communication must not meet one that still joins the group
    destroy_process_group()
    deterministic(0)  # the ranks serve other tests as well


@pytest.mark.parametrize(
    "path", [p for p in DOCUMENTS if python_blocks(p)], ids=lambda p: p.relative_to(ROOT).as_posix()
)
def test_blocks_run(path):
    """The blocks of one document run one after the other, as one script."""
    blocks = python_blocks(path)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    source = "\n".join(blocks)
    if "init_process_group" not in source:
        source = "import hyper_parallel as hp\nhp.init_process_group()\n" + source
    run_ranks(4, _run_script, source, port, init=False)


def test_both_readmes_show_the_same_code():
    english, chinese = ([re.sub(r"\s*#.*", "", block) for block in python_blocks(path)] for path in DOCUMENTS[:2])
    assert english
    assert english == chinese
