"""Every public name is offered, typed and real: the lazy tables, the stubs and the modules agree.

A name can go wrong in three ways: in the table but not in its module, in the table but not in the stub, or in a
component but not in the umbrella. Each has its test.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

import hp_core
import hyper_parallel
import stubs
from hyper_parallel.exports import NAMES, available
from workspace import ROOT, discover

PACKAGES = discover()
STUBS = stubs.stubs(PACKAGES)
FRONTS = [
    package.import_name for package in PACKAGES.values() if hasattr(import_module(package.import_name), "EXPORTS")
]


@pytest.mark.parametrize("path", STUBS, ids=lambda path: path.relative_to(ROOT).as_posix())
def test_stub_is_what_the_table_says(path: Path) -> None:
    assert path.exists(), "run `python build/stubs.py`"
    assert path.read_text("utf-8") == STUBS[path], "run `python build/stubs.py`"


@pytest.mark.parametrize("front", FRONTS)
def test_every_name_of_a_component_resolves(front: str) -> None:
    package = import_module(front)
    assert sorted(package.EXPORTS) == package.__all__
    for name, module in package.EXPORTS.items():
        value = getattr(package, name)
        assert value is getattr(import_module(f"{front}.{module}"), name), name


@pytest.mark.parametrize("name", sorted(hp_core.EXPORTS))
def test_the_umbrella_offers_every_name_of_the_core(name: str) -> None:
    assert name in hyper_parallel.__all__
    assert getattr(hyper_parallel, name) is getattr(hp_core, name)


@pytest.mark.parametrize("module", NAMES)
def test_every_listed_path_offers_what_is_installed(module: str) -> None:
    path = import_module(module)
    offered = available(module)
    assert path.__all__ == sorted(offered)
    assert set(offered) <= set(dir(path))
    for name, component in offered.items():
        assert getattr(path, name) is getattr(import_module(component), name)
