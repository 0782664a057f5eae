"""Every check of the doctor: its stable id, what it looks at, and where the documents say more.

The ids are public: scripts select on them in the JSON form, the FAQ names them. An id is never given another meaning;
the judges (`judges/`) produce exactly one finding for each id of their group.
"""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CHECKS", "GROUPS", "Check"]

GROUPS = ("host", "wheels", "torch", "mindspore", "cann", "hccl", "launch", "run")


@dataclass(frozen=True)
class Check:
    """One thing that the doctor looks at.

    Attributes:
        id: stable name, `group.what`.
        title: what is looked at, in a few words.
        faq: number of the entry in docs/faq.md that explains it, if one does.
    """

    id: str
    title: str
    faq: int | None = None

    @property
    def group(self) -> str:
        """The part of the id before the dot."""
        return self.id.partition(".")[0]

    @property
    def page(self) -> str:
        """Where the documents explain it, from the root of the repository."""
        return f"docs/faq.md#faq-{self.faq}" if self.faq else f"docs/guide/doctor.md#{self.group}"


CHECKS = {
    check.id: check
    for check in (
        Check("host.os", "operating system and architecture"),
        Check("host.python", "Python version and tag", faq=1),
        Check("host.glibc", "glibc against what the native parts need", faq=2),
        Check("host.libstdcxx", "newest GLIBCXX against what the native parts need", faq=2),
        Check("wheels.installed", "installed components"),
        Check("wheels.ranges", "versions against the ranges that the components declare"),
        Check("wheels.tag", "wheel tags against this interpreter", faq=1),
        Check("wheels.symbols", "libraries and symbols that the native parts need", faq=2),
        Check("torch.version", "PyTorch version", faq=4),
        Check("torch.import", "import torch", faq=2),
        Check("torch.abi", "C++ ABI of PyTorch", faq=4),
        Check("torch.gloo", "gloo, the CPU backend", faq=13),
        Check("torch.cuda", "CUDA devices and NCCL"),
        Check("torch.npu", "torch_npu and NPU devices", faq=2),
        Check("mindspore.version", "MindSpore version", faq=3),
        Check("mindspore.numpy", "NumPy below 2 for MindSpore"),
        Check("mindspore.run", "import mindspore, and one op", faq=3),
        Check("cann.home", "CANN, ASCEND_HOME_PATH and the pieces below it", faq=3),
        Check("cann.env", "set_env.sh sourced", faq=3),
        Check("cann.version", "CANN against torch_npu and MindSpore", faq=3),
        Check("cann.driver", "NPU driver and devices"),
        Check("hccl.connect-timeout", "HCCL_CONNECT_TIMEOUT", faq=12),
        Check("hccl.exec-timeout", "HCCL_EXEC_TIMEOUT", faq=12),
        Check("hccl.event-timeout", "HCCL_EVENT_TIMEOUT above HCCL_EXEC_TIMEOUT", faq=12),
        Check("hccl.whitelist", "HCCL_WHITELIST_DISABLE and HCCL_WHITELIST_FILE", faq=12),
        Check("hccl.if-ip", "HCCL_IF_IP against the addresses of this host", faq=12),
        Check("hccl.socket-ifname", "HCCL_SOCKET_IFNAME against the interfaces of this host", faq=12),
        Check("hccl.if-base-port", "HCCL_IF_BASE_PORT", faq=12),
        Check("hccl.buffsize", "HCCL_BUFFSIZE", faq=14),
        Check("hccl.deterministic", "HCCL_DETERMINISTIC", faq=16),
        Check("hccl.expansion-mode", "HCCL_OP_EXPANSION_MODE", faq=12),
        Check("hccl.names", "misspelt HCCL variables", faq=12),
        Check("launch.ranks", "RANK, WORLD_SIZE and the local ones", faq=12),
        Check("launch.master", "MASTER_ADDR and MASTER_PORT", faq=12),
        Check("launch.port", "the master's port is free"),
        Check("launch.interface", "GLOO_SOCKET_IFNAME and its like against the interfaces of this host", faq=12),
        Check("launch.open-files", "limit of open files"),
        Check("launch.shared-memory", "size of /dev/shm"),
        Check("run.collectives", "collectives between real processes (`doctor run`)", faq=12),
    )
}
