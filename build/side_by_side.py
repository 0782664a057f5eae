"""Writes the tables of docs/guide/pytorch-and-mindspore.md from what the tests check: `python build/side_by_side.py --update`.

Ops come from the golden records of the two validators: an op stands in one only if its calls equalled the dense op, forward
and backward, in every combination of layouts tried. Features name the tests that show them; a test that is gone is an error.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import NamedTuple

from workspace import ROOT

PAGE = ROOT / "docs" / "guide" / "pytorch-and-mindspore.md"
CORE = ROOT / "packages" / "hp-core"
RECORDS = {"PyTorch": CORE / "tests" / "rules" / "golden", "MindSpore": CORE / "tests_mindspore" / "golden"}
SPELLINGS = CORE / "src" / "hp_core" / "platform" / "mindspore" / "op_names.py"
BEGIN, END = "<!-- written by build/side_by_side.py -->", "<!-- end of what build/side_by_side.py writes -->"

FAMILIES = {
    "elementwise": "elementwise, comparison, casts",
    "matmul": "linear, matmul, bmm and their like",
    "view": "reshape, transpose, squeeze, expand",
    "split": "split, chunk, unbind, narrow",
    "join": "cat, stack, repeat",
    "rearrange": "roll, flip and their like",
    "reduce": "sums, means, extrema, all, any",
    "scan": "cumsum and its like",
    "norm": "softmax and norms",
    "embedding": "embedding",
    "index": "indexing, gather",
    "scatter": "writes by index, scatter",
    "search": "argmax, nonzero, unique, searchsorted",
    "order": "sort, topk, median",
    "loss": "losses",
    "attention": "scaled dot product attention",
    "random": "dropout and random ops",
    "conv": "convolution, pooling",
    "distance": "distances",
    "matrix": "linear algebra",
    "foreach": "ops on lists of tensors",
}


class Feature(NamedTuple):
    """A row of the second table: what it is, and on each framework the test that shows it, or None."""

    what: str
    torch: str | None
    mindspore: str | None


def _core(path: str) -> str:
    return f"packages/hp-core/{path}"


def on_both(what: str, test: str, module: str = "test_dtensor.py") -> Feature:
    """A row that one test shows, which runs on both frameworks."""
    path = _core(f"tests_both/{module}::{test}")
    return Feature(what, path, path)


FIRST_LOSSES = _core("tests_mindspore/test_language_model.py::test_both_frameworks_have_the_same_first_losses")

FEATURES = [
    on_both(
        "gradients by the law, with the fewest collectives", "test_the_law_of_gradients_costs_no_more_than_by_hand"
    ),
    on_both(
        "redistribution between all layouts, uneven and ragged ones too",
        "test_redistribution_keeps_values_and_sends_gradients_back",
    ),
    on_both("redistribution to another mesh", "test_redistribution_to_another_mesh_and_back"),
    on_both("asynchronous redistribution", "test_redistribution_that_is_waited_for_at_first_use"),
    on_both("tensor-parallel styles", "test_styles_on_two_axes_give_the_gradients_of_one_process"),
    on_both("`custom_shard`", "test_a_function_of_local_parts_has_the_dense_gradients"),
    Feature(
        "`shard_module`",
        _core("tests/tensor_parallel/test_sharding_plan.py"),
        _core("tests_mindspore/test_sharding.py::test_a_cell_sharded_by_a_plan_equals_dense"),
    ),
    Feature(
        "the framework's own optimizers on distributed parameters",
        _core("tests/dtensor/test_optimizers.py"),
        _core("tests_mindspore/test_cells.py::test_a_parallel_block_trains_like_its_dense_twin"),
    ),
    on_both("random numbers of equal bits for every layout, and on both frameworks", "test_a_seed_gives_the_same_bits"),
    Feature(
        "models built without memory and filled shard by shard",
        _core("tests/dtensor/test_initialize.py"),
        _core("tests_mindspore/test_initialize.py::test_values_do_not_depend_on_the_layout_or_the_world"),
    ),
    on_both(
        "mistakes told alike on all ranks before anything is sent",
        "test_a_mistake_is_told_alike_on_all_ranks_before_anything_is_sent",
        "test_mistakes.py",
    ),
    on_both(
        "`fingerprint`: one hash for all layouts, and for both frameworks",
        "test_hashes_are_a_format",
        "test_debugging.py",
    ),
    on_both("`describe`: the table of what a rank holds", "test_describe_shows_the_same_table", "test_debugging.py"),
    Feature(
        "`deterministic`",
        _core("tests/platform/test_determinism.py"),
        _core("tests_mindspore/test_determinism.py::test_it_is_set_once_and_not_taken_back"),
    ),
    Feature("writing in place: `x.add_(y)`, `x[...] = v`", _core("tests/rules/test_cut_dim_ops.py"), None),
    Feature("mistakes in a call told when it is planned", _core("tests/dtensor/test_bad_inputs.py"), None),
    Feature("fallback to the framework's own distributed ops", _core("tests/dtensor/test_dispatch.py"), None),
    Feature("conversion to and from the framework's own DTensor", _core("tests/dtensor/test_interop.py"), None),
    Feature("distributed checkpoints", _core("tests/dtensor/test_checkpoint.py"), None),
    Feature(
        "the language model of the examples on a mesh equals one process",
        "tests/examples/test_lm_parallel.py",
        _core("tests_mindspore/test_language_model.py::test_a_mesh_gives_the_losses_and_gradients_of_one_process"),
    ),
    Feature("the first losses of that model are the same on both frameworks", FIRST_LOSSES, FIRST_LOSSES),
]


def tables() -> str:
    """The generated part of the page."""
    lines = [BEGIN, "", "| ops | checked on PyTorch | checked on MindSpore |", "|---|---|---|"]
    found = {name: recorded_ops(folder) for name, folder in RECORDS.items()}
    families = set().union(*found.values())
    unknown = sorted(families - FAMILIES.keys())
    if unknown:
        raise ValueError(
            f"the golden records hold families without a title: {', '.join(unknown)}; add them to FAMILIES"
        )
    for family, title in FAMILIES.items():
        torch, mindspore = (found[name].get(family, set()) for name in RECORDS)
        if torch or mindspore:
            names = ", ".join(f"`{op}`" for op in sorted(mindspore)) or "-"
            lines.append(f"| {title} | {len(torch)} op{'' if len(torch) == 1 else 's'} | {names} |")
    unchecked = sorted(spelled_ops() - set().union(*found["MindSpore"].values()))
    lines += [
        "",
        "These have rules on MindSpore that no sample checks, most of them for want of a CPU kernel in MindSpore 2.10: "
        + ", ".join(f"`{op}`" for op in unchecked)
        + ".",
        "",
        "| feature | PyTorch | MindSpore |",
        "|---|---|---|",
    ]
    for feature in FEATURES:
        lines.append(f"| {feature.what} | {_answer(feature.torch)} | {_answer(feature.mindspore)} |")
    return "\n".join([*lines, "", END])


def page(text: str) -> str:
    """The page with its generated part written anew."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{tables()}{after}"


def recorded_ops(folder: Path) -> dict[str, set[str]]:
    """Names of the ops that a golden record holds, by family of rules."""
    return {
        path.stem: set(re.findall(r"^call (\w+): ", path.read_text("utf-8"), re.MULTILINE))
        for path in sorted(folder.glob("*.txt"))
    }


def spelled_ops() -> set[str]:
    """Canonical names of all ops that MindSpore's table of spellings has."""
    table = SPELLINGS.read_text("utf-8").partition('_TABLE = """')[2].partition('"""')[0]
    return {line.split()[1].rstrip("_") for line in table.splitlines() if line.strip()}


def _answer(test: str | None) -> str:
    """What a row says, after looking whether its test is there."""
    if test is None:
        return "no"
    path, _, name = test.partition("::")
    if not (ROOT / path).is_file() or (name and f"def {name}(" not in (ROOT / path).read_text("utf-8")):
        raise ValueError(f"build/side_by_side.py names the test {test}, which isn't there")
    return "yes"


def main(arguments: list[str]) -> int:
    """Check the page, or write it; returns 1 if it isn't current."""
    now = PAGE.read_text("utf-8")
    wanted = page(now)
    if "--update" in arguments:
        PAGE.write_text(wanted, "utf-8")
    elif wanted != now:
        sys.stderr.write(f"{PAGE.relative_to(ROOT)} isn't current; run: python build/side_by_side.py --update\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
