"""`fingerprint` and `describe` say the same of the same model on both frameworks."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

import hp_core as hp
from hp_core.testing import assert_same_error, run_ranks

RNG = np.random.default_rng(5)
UP, DOWN = RNG.normal(size=(8, 6)).astype(np.float32), RNG.normal(size=(6, 8)).astype(np.float32)
# Known hashes: on every framework, version and machine a tensor of these bits has them.
EXACT = {
    "float32": (np.arange(24, dtype=np.float32).reshape(4, 6) - 7, "3a2e48031201c0fb"),
    "float64": (np.arange(6, dtype=np.float64).reshape(2, 3) / 3, "22892b1b4893a6f8"),
    "bool": (np.arange(5) % 2 == 0, "15aac27658d9f1f6"),
}


def built(framework: Any, layouts: bool = True) -> Any:
    model = framework.sequential(
        framework.linear(UP, np.zeros(8, np.float32)),
        framework.activation(),
        framework.linear(DOWN, np.ones(6, np.float32)),
    )
    mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    if layouts:
        hp.parallelize_module(model, mesh["tp"], {"0": hp.ColwiseParallel(), "2": hp.RowwiseParallel()})
    return model, mesh


@pytest.mark.parametrize("name", EXACT)
def test_hashes_are_a_format(framework: Any, name: str) -> None:
    def look(framework: Any, array: Any) -> str | None:
        return hp.fingerprint({"x": framework.tensor(array)}, mesh=hp.DeviceMesh((1,), ("one",))).tensors["x"]

    array, expected = EXACT[name]
    assert run_ranks(1, look, framework, array) == [expected]


def test_a_cut_model_has_the_dense_total(framework: Any) -> None:
    def look(framework: Any) -> tuple[str | None, str | None, list[str]]:
        dense, mesh = built(framework, layouts=False)
        cut, _ = built(framework)
        found = hp.fingerprint(cut, mesh=mesh).check()
        return hp.fingerprint(dense, mesh=mesh).check().total, found.total, list(found.tensors)

    names = ["0.weight", "0.bias", "2.weight", "2.bias"]
    results = run_ranks(4, look, framework)
    assert all(dense == cut for dense, cut, _ in results)
    assert [found for _, _, found in results] == [names] * 4


def test_gradients_of_a_cut_model_have_the_dense_hashes(framework: Any) -> None:
    """Of whole numbers, so that no order of adding them matters."""

    def look(framework: Any) -> Any:
        hashes = []
        for layouts in (False, True):
            model = framework.sequential(framework.linear(np.rint(UP), np.zeros(8, np.float32)))
            mesh = hp.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            if layouts:
                hp.parallelize_module(model, mesh["tp"], {"0": hp.ColwiseParallel()})
            x = framework.tensor(np.arange(12, dtype=np.float32).reshape(2, 6))
            _, gradients = framework.differentiate_module(lambda model=model, x=x: model(x).sum(), model)
            found = hp.fingerprint(model, [framework.tensor(one) for one in gradients], mesh=mesh).check()
            hashes.append(dict(found.tensors))
        return hashes

    for dense, cut in run_ranks(4, look, framework):
        assert dense == cut
        assert None not in dense.values()


def test_a_replica_with_another_value_is_named_on_all_ranks(framework: Any) -> None:
    def look(framework: Any) -> None:
        down = np.ones(6, np.float32)
        if hp.get_rank() == 3:
            down[4] = np.nextafter(down[4], np.float32(2))
        model = framework.sequential(framework.linear(DOWN, down))
        hp.fingerprint(model).check()

    message, *others = assert_same_error(4, look, hp.ReplicaError, "", framework)
    assert "'0.bias' [6]: rank 3 differs from the others" in message
    assert set(others) == {message}


def test_describe_shows_the_same_table(framework: Any) -> None:
    def look(framework: Any) -> list[str]:
        model, _ = built(framework)
        file = io.StringIO()
        hp.describe(model, file=file)
        return file.getvalue().splitlines()

    lines = run_ranks(4, look, framework)[1]
    assert lines[0].endswith(
        "on rank 1 of 4, backend gloo: 4 parameters of 110 elements (110 trained), here 58 elements, 232 B"
    )
    assert lines[1:] == [
        "  DeviceMesh(tp=2) at (1,); ranks along tp [0, 1]",
        "",
        "parameter  shape   layout      local shape  dtype    bytes  state",
        "---------  ------  ----------  -----------  -------  -----  -----",
        "0.weight   [8, 6]  (tp)        [4, 6]       float32     96",
        "0.bias     [8]     (tp)        [4]          float32     16",
        "2.weight   [6, 8]  (-, tp)     [6, 4]       float32     96",
        "2.bias     [6]     replicated  [6]          float32     24",
    ]
