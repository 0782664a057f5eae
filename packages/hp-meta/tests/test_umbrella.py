"""The umbrella's promises to existing scripts: names, import paths, and errors that say what to install.

Absent components are absent here by a finder that refuses them, so the tests mean the same when they are installed.
"""

from __future__ import annotations

import subprocess
import sys
import textwrap
from importlib import import_module
from types import ModuleType

import pytest

import hyper_parallel
from hyper_parallel.exports import NAMES, available

# What the FAQ and existing scripts import from the umbrella itself.
PROMISED = """
init_process_group destroy_process_group get_backend get_process_group_ranks split_group get_group_local_rank
DTensor Layout DeviceMesh init_device_mesh get_current_mesh distribute_tensor distribute_module
Shard Replicate Partial RaggedShard Placement manual_seed SkipDTensorDispatch custom_shard shard_module
init_parameters init_empty_weights init_on_device ones zeros empty full rand randn
ColwiseParallel RowwiseParallel SequenceParallel PrepareModuleInput PrepareModuleOutput PrepareModuleInputOutput
parallelize_module
fully_shard HSDPModule hsdp_sync_stream
PipelineStage ScheduleGPipe Schedule1F1B ScheduleInterleaved1F1B MetaStep MetaStepType BatchDimSpec
ContextParallel AsyncContextParallel
""".split()
PROMISED_PATHS = {
    "hyper_parallel.core.activation_checkpoint": (
        "CheckpointPolicy SwapManager checkpoint swap checkpoint_wrapper swap_wrapper swap_tensor_wrapper"
    ),
    "hyper_parallel.core.optimizer": "get_hyper_optimizer",
}


class Absent:
    """A finder under which some packages look as if they were not installed."""

    def __init__(self, *packages: str) -> None:
        self.packages = packages

    def find_spec(self, name: str, path: object = None, target: object = None) -> None:
        """Refuse the packages as the import system does, and leave all others to the finders that follow."""
        if name in self.packages:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)


def forget(monkeypatch: pytest.MonkeyPatch, *components: str) -> None:
    """Let the umbrella look for these components anew: a name that was used before is an ordinary attribute."""
    for component in components:
        monkeypatch.delitem(sys.modules, component, raising=False)
        for module, names in NAMES.items():
            for name in names.get(component, ()) if module in sys.modules else ():
                monkeypatch.delitem(vars(sys.modules[module]), name, raising=False)


@pytest.fixture
def without_components(monkeypatch: pytest.MonkeyPatch) -> None:
    """Only hp_core is installed."""
    absent = ("hp_fsdp", "hp_pipeline", "hp_cp", "hp_swap")
    forget(monkeypatch, *absent)
    monkeypatch.setattr(sys, "meta_path", [Absent(*absent), *sys.meta_path])


def listed(module: str) -> set[str]:
    """All names of a module of the umbrella, installed or not."""
    return {name for names in NAMES[module].values() for name in names}


def test_every_promised_name_has_a_component() -> None:
    assert set(PROMISED) <= listed("hyper_parallel")
    for module, names in PROMISED_PATHS.items():
        assert set(names.split()) <= listed(module)


@pytest.mark.parametrize("module", NAMES)
def test_every_path_can_be_imported_and_lists_each_name_once(module: str) -> None:
    assert isinstance(import_module(module), ModuleType)
    names = [name for names in NAMES[module].values() for name in names]
    assert len(names) == len(set(names))


@pytest.mark.usefixtures("without_components")
@pytest.mark.parametrize(
    ("module", "name", "distribution"),
    [
        ("hyper_parallel", "fully_shard", "hp-fsdp"),
        ("hyper_parallel", "Schedule1F1B", "hp-pipeline"),
        ("hyper_parallel", "ContextParallel", "hp-cp"),
        ("hyper_parallel.core.fully_shard.api", "HSDPModule", "hp-fsdp"),
        ("hyper_parallel.core.optimizer", "get_hyper_optimizer", "hp-fsdp"),
        ("hyper_parallel.core.pipeline_parallel", "PipelineStage", "hp-pipeline"),
        ("hyper_parallel.core.context_parallel", "AsyncContextParallel", "hp-cp"),
        ("hyper_parallel.core.activation_checkpoint", "SwapManager", "hp-swap"),
    ],
)
def test_a_name_of_an_absent_component_says_what_to_install(module: str, name: str, distribution: str) -> None:
    with pytest.raises(ImportError, match=f"{name} is part of {distribution}, .*: pip install {distribution}$"):
        exec(f"from {module} import {name}", {})


@pytest.mark.usefixtures("without_components")
def test_a_star_import_brings_what_is_there() -> None:
    names: dict[str, object] = {}
    exec("from hyper_parallel import *", names)
    assert set(available("hyper_parallel")) <= set(names)
    assert "fully_shard" not in names
    assert "fully_shard" not in dir(hyper_parallel)


def test_a_component_that_is_too_old_is_named_with_its_version(monkeypatch: pytest.MonkeyPatch) -> None:
    forget(monkeypatch, "hp_fsdp")
    old = ModuleType("hp_fsdp")
    old.__all__ = ["fully_shard"]  # type: ignore[attr-defined]
    old.__version__ = "0.0.1"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "hp_fsdp", old)
    with pytest.raises(
        ImportError, match=r"hsdp_sync_stream is not in the installed hp-fsdp 0\.0\.1: pip install --upg"
    ):
        _ = hyper_parallel.hsdp_sync_stream  # type: ignore[attr-defined]


def test_what_a_component_itself_misses_is_not_hidden(monkeypatch: pytest.MonkeyPatch) -> None:
    """A broken component is not reported as an absent one."""

    class Broken:
        def find_spec(self, name: str, path: object = None, target: object = None) -> None:
            if name == "hp_fsdp":
                raise ModuleNotFoundError("No module named 'hp_fsdp_needs_this'", name="hp_fsdp_needs_this")

    forget(monkeypatch, "hp_fsdp")
    monkeypatch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
    with pytest.raises(ModuleNotFoundError, match="hp_fsdp_needs_this"):
        _ = hyper_parallel.fully_shard  # type: ignore[attr-defined]


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'hyper_parallel' has no attribute 'fuly_shard'"):
        _ = hyper_parallel.fuly_shard  # type: ignore[attr-defined]


def test_names_are_loaded_when_used_and_not_before() -> None:
    code = """
        import sys
        import hyper_parallel
        import hyper_parallel.core.dtensor.layout
        assert "hp_core.layout" not in sys.modules
        assert hyper_parallel.Layout is hyper_parallel.core.dtensor.layout.Layout
        assert "hp_core.layout" in sys.modules
        assert callable(hyper_parallel.debug.describe)  # a module that nobody has imported
        assert "torch" not in sys.modules
        assert hyper_parallel.__version__
    """
    subprocess.run([sys.executable, "-c", textwrap.dedent(code)], check=True, timeout=60)
