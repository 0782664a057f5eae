"""`describe`: one table of parameters as a rank holds them; what it says is what is there."""

from __future__ import annotations

import io
import textwrap
from typing import Any

import pytest
import torch
from torch import nn

import hp_core
from hp_core import PlatformError, describe, init_empty_weights, record_collectives
from hp_core.debug.tables import aligned, in_bytes
from hp_core.testing import run_ranks


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(6)
        self.up = nn.Linear(6, 10)
        self.down = nn.Linear(10, 6, bias=False)
        self.register_buffer("scale", torch.ones(3))


def text_of(model: Any) -> str:
    file = io.StringIO()
    describe(model, file=file)
    return file.getvalue()


def test_a_plain_model() -> None:
    model = Block()
    model.up.bias.requires_grad_(False)
    model.norm.bias = model.norm.weight
    model.down.to(torch.bfloat16)
    model.down.weight.grad = torch.zeros_like(model.down.weight)
    assert text_of(model) == textwrap.dedent(
        """\
        Block on rank 0 of 1: 4 parameters of 136 elements (126 trained), here 136 elements, 424 B

        parameter    shape    layout  local shape  dtype     bytes  state
        -----------  -------  ------  -----------  --------  -----  --------------
        norm.weight  [6]      plain   [6]          float32      24  also norm.bias
        up.weight    [10, 6]  plain   [10, 6]      float32     240
        up.bias      [10]     plain   [10]         float32      40  frozen
        down.weight  [6, 10]  plain   [6, 10]      bfloat16    120  grad

        1 buffer, 12 B
        """
    )


def laid_out() -> Any:
    mesh = hp_core.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    plan = {"up": hp_core.ColwiseParallel(), "down": hp_core.RowwiseParallel()}
    return hp_core.parallelize_module(Block(), mesh["tp"], plan)


def test_a_laid_out_model_says_what_this_rank_holds_and_who_it_talks_to() -> None:
    def look() -> Any:
        model = laid_out()
        with record_collectives() as log:
            text = text_of(model)
        found = describe(model, file=io.StringIO())
        up = model.up.weight
        row = next(row for row in found.rows if row.name == "up.weight")
        assert row.local_shape == tuple(up.to_local().shape)
        assert row.local_bytes == up.to_local().nbytes
        assert row.layout == up.layout.compact_str
        return text, len(list(log)), found.local_bytes, repr(found)

    text, collectives, local_bytes, short = run_ranks(4, look)[2]
    assert collectives == 0
    assert local_bytes == 4 * (6 + 6 + 30 + 5 + 30)
    assert short == "<Description of Block: 5 parameters, print() shows all>"
    assert text == textwrap.dedent(
        """\
        Block on rank 2 of 4, backend gloo: 5 parameters of 142 elements (142 trained), here 77 elements, 308 B
          DeviceMesh(tp=2, ranks=[2, 3]) at (0,); ranks along tp [2, 3]

        parameter    shape    layout   local shape  dtype    bytes  state
        -----------  -------  -------  -----------  -------  -----  -----
        norm.weight  [6]      plain    [6]          float32     24
        norm.bias    [6]      plain    [6]          float32     24
        up.weight    [10, 6]  (tp)     [5, 6]       float32    120
        up.bias      [10]     (tp)     [5]          float32     20
        down.weight  [6, 10]  (-, tp)  [6, 5]       float32    120

        1 buffer, 12 B
        """
    )


def test_parameters_on_the_meta_device_take_no_bytes() -> None:
    with init_empty_weights():
        model = Block()
    found = describe(model, file=io.StringIO())
    assert found.local_bytes == 0
    assert all(row.states == ("meta",) for row in found.rows)


def test_several_modules_and_modules_without_parameters(capsys: pytest.CaptureFixture[str]) -> None:
    describe([nn.ReLU(), nn.Linear(1, 1)])
    printed = capsys.readouterr().out
    assert "ReLU on rank 0 of 1: 0 parameters" in printed
    assert "no parameters" in printed
    assert "Linear on rank 0 of 1: 2 parameters" in printed


def test_what_is_no_module_is_refused() -> None:
    with pytest.raises(PlatformError, match=r"a torch.Tensor was given where a torch.nn.Module is needed"):
        describe(torch.ones(2))
    with pytest.raises(ValueError, match="at least one"):
        describe([])


def test_tables_are_aligned_and_bytes_are_short() -> None:
    assert aligned([("a", "long"), ("bcd", "1")], right={1}) == ["a    long", "---  ----", "bcd     1"]
    assert [in_bytes(count) for count in (0, 1023, 1024, 5 << 20, 3 << 40, 5000 << 40)] == [
        "0 B", "1023 B", "1 KiB", "5 MiB", "3 TiB", "5000 TiB",
    ]  # fmt: skip
