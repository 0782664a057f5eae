"""The FAQ is true: all entries are there in both languages, checks that it names exist, messages that it quotes are raised."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from hp_core.testing import run_ranks
from hyper_parallel.doctor.checks import CHECKS

DOCS = Path(__file__).resolve().parent.parent / "docs"
LANGUAGES = {"en": DOCS / "faq.md", "zh": DOCS / "zh" / "faq.md"}
ANCHOR = re.compile(r'^<a id="faq-(\d+)"></a>$', re.M)


def entries(language: str) -> dict[int, str]:
    """The entries by number, in the order of the page."""
    parts = ANCHOR.split(LANGUAGES[language].read_text("utf-8"))
    return {int(number): text for number, text in zip(parts[1::2], parts[2::2], strict=True)}


def checks_in(text: str) -> set[str]:
    """Names in the text that look like checks of the doctor."""
    groups = {check.group for check in CHECKS.values()}
    found = {name for name in re.findall(r"`([a-z]+\.[a-z-]+)`", text) if name.partition(".")[0] in groups}
    return found - {"torch.library"}  # a module of torch


def code_of(language: str) -> list[str]:
    """The Python blocks, without comments."""
    blocks = re.findall(r"^```python\n(.*?)^```", LANGUAGES[language].read_text("utf-8"), flags=re.M | re.S)
    return [re.sub(r"\s*#.*", "", block) for block in blocks]


@pytest.mark.parametrize("language", LANGUAGES)
def test_there_are_sixteen_entries_in_order(language: str) -> None:
    found = entries(language)
    assert list(found) == list(range(1, 17))
    for number, text in found.items():
        assert text.lstrip().startswith(f"## {number}. ")


@pytest.mark.parametrize("language", LANGUAGES)
def test_checks_that_are_named_exist_and_lead_back_to_the_entry(language: str) -> None:
    for number, text in entries(language).items():
        named = checks_in(text)
        assert named <= set(CHECKS), f"entry {number} names checks that don't exist"
        leading = {name for name, check in CHECKS.items() if check.faq == number}
        assert leading <= named, f"checks lead to entry {number}, which doesn't name them"


def test_both_languages_show_the_same_code() -> None:
    assert code_of("en")
    assert code_of("en") == code_of("zh")


def said(function: Callable[[], object]) -> str:
    """What a mistake is told."""
    with pytest.raises(Exception) as error:
        function()
    return str(error.value)


def misses_in_every_step() -> str:
    import hyper_parallel as hp

    records: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: records.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("hp_core").addHandler(handler)
    try:
        mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
        hp.redistribute_cache_clear()
        for rows in range(300):
            x = hp.DTensor.from_local(torch.zeros(1 + rows), mesh, [hp.Replicate()])
            x.redistribute(mesh, [hp.Partial()])
    finally:
        logging.getLogger("hp_core").removeHandler(handler)
        hp.redistribute_cache_clear()
    [message] = records
    return message


def still_on_meta() -> str:
    import hyper_parallel as hp

    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",))
    with hp.init_empty_weights():
        net = nn.Linear(4, 4)
    hp.fully_shard(net, mesh=mesh)
    return said(lambda: net(torch.ones(1, 4)))


def steps_too_early() -> str:
    import hyper_parallel as hp

    net: Any = hp.fully_shard(nn.Linear(4, 4), mesh=hp.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with net.no_sync():
        net(torch.ones(1, 4)).sum().backward()
    return said(optimizer.step)


def stage(index: int, count: int, micro_batches: int = 8) -> Callable[[], Any]:
    import hyper_parallel as hp

    mesh = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("pp",))
    part = hp.PipelineStage(nn.Linear(2, 2), index, count, mesh=mesh)
    return lambda: hp.Schedule1F1B(part, micro_batches=micro_batches, loss_fn=nn.functional.mse_loss)


def wrong_pipelines() -> str:
    import hyper_parallel as hp

    rank = hp.get_rank()
    told = [
        said(stage(min(rank, 2), 4)),
        said(stage(rank, 4 if rank else 5)),
        said(stage(rank, 4, 4 + rank)),
        said(lambda: stage(rank, 4)().run(torch.ones(3, 2), target=torch.ones(3, 2))),
    ]
    return "\n".join(told)


def absent_components() -> str:
    import hyper_parallel as hp
    from hyper_parallel.core import activation_checkpoint

    return said(lambda: activation_checkpoint.SwapManager) + said(lambda: hp.ContextParallel)


def npu_tensor_over_gloo() -> str:
    import hyper_parallel as hp

    group = hp.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)).get_group()
    tensor = SimpleNamespace(device=SimpleNamespace(type="npu"), shape=(2, 3), dtype=torch.float32)
    return said(lambda: hp.get_platform().collectives.all_reduce(tensor, "sum", group))


def optimizer_before_sharding() -> str:
    import hyper_parallel as hp

    net = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(net.parameters())
    hp.fully_shard(net, mesh=hp.init_device_mesh("cpu", (4,), mesh_dim_names=("dp",)))
    net(torch.ones(1, 4)).sum().backward()
    return said(optimizer.step)


def too_late() -> str:
    import hyper_parallel as hp

    return said(lambda: hp.deterministic(1))


QUOTED: dict[int, tuple[Callable[[], str], tuple[str, ...]]] = {
    5: (misses_in_every_step, ("has missed the cache of redistribution plans 256 times",)),
    6: (still_on_meta, ("init_parameters",)),
    7: (steps_too_early, ("steps while", "holds gradients that were not reduced")),
    8: (
        wrong_pipelines,
        (
            "stage_index must be each of 0..3 once: stages [3] are on no rank",
            "were given different numbers of stages (stage_num)",
            "were given different numbers of micro-batches",
            "too few for 8 micro-batches",
        ),
    ),
    10: (absent_components, ("is part of hp-swap, which is not installed: pip install hp-swap",)),
    11: (absent_components, ("is part of hp-cp, which is not installed: pip install hp-cp",)),
    13: (
        npu_tensor_over_gloo,
        (
            "on device 'npu' can't travel over the group of ranks [0, 1, 2, 3]",
            "call init_process_group(backend='hccl')",
        ),
    ),
    15: (
        optimizer_before_sharding,
        (
            "AdamW holds a whole parameter ('weight') of a sharded Linear, whose updates would be lost; make the optimizer after "
            "fully_shard().",
        ),
    ),
    16: (too_late, ("comes too late: the process world exists",)),
}


def plain(text: str) -> str:
    """The text with single spaces: quotations run over the ends of lines."""
    return " ".join(text.split())


@pytest.fixture(scope="module")
def told() -> dict[int, list[str]]:
    """What the ranks said, by entry."""
    functions = {number: function for number, (function, _) in QUOTED.items()}

    def told_by(function: Callable[[], str]) -> str:
        try:
            return function()
        except BaseException as error:  # what pytest raises when nothing was: for the test of this entry alone
            return f"nothing as expected: {error!r}"

    def tell() -> dict[int, str]:
        return {number: told_by(function) for number, function in functions.items()}

    ranks = run_ranks(4, tell)
    return {number: [one[number] for one in ranks] for number in QUOTED}


@pytest.mark.parametrize("number", QUOTED)
def test_quoted_messages_are_raised_on_every_rank(number: int, told: dict[int, list[str]]) -> None:
    for quotation in QUOTED[number][1]:
        for rank, text in enumerate(told[number]):
            assert quotation in plain(text), f"rank {rank} said: {text}"
        for language in LANGUAGES:
            assert quotation in plain(entries(language)[number]), f"not quoted in {language}"


def test_wrong_launches_are_refused_as_entry_12_says() -> None:
    def launch() -> list[str]:
        import hyper_parallel as hp

        wrong = [said(lambda: hp.init_process_group(world_size=2))]
        del os.environ["RANK"]
        wrong.append(said(hp.init_process_group))
        wrong.append(said(lambda: hp.init_process_group(rank=3)))
        return wrong

    quotations = ("world_size=2 contradicts the launcher's WORLD_SIZE", "RANK not set", "is outside the world")
    [messages] = run_ranks(1, launch, init=False)
    for quotation, message in zip(quotations, messages, strict=True):
        assert quotation in message
        for language in LANGUAGES:
            assert quotation in plain(entries(language)[12])


def test_what_is_said_before_something_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    from hp_core.platform.remedies import explain_wrong_numpy
    from hp_kernels.build import require_version
    from hp_kernels.cann import cann_problems
    from hp_kernels.platform.torch.building import build_island

    monkeypatch.setattr(torch, "compiled_with_cxx11_abi", lambda: False)
    told = {
        3: {
            "MindSpore needs NumPy below 2": explain_wrong_numpy("2.1"),
            "2.8 or newer is needed": said(lambda: require_version("mindspore", "2.6.0", (2, 8))),
            "ASCEND_HOME_PATH is not set: CANN's environment is missing": "".join(cann_problems({})),
            "set_env.sh was not sourced": "".join(cann_problems({"ASCEND_HOME_PATH": str(DOCS)})),
        },
        4: {
            "torch 2.5.1 is installed, 2.7 or newer is needed": said(lambda: require_version("torch", "2.5.1", (2, 7))),
            "was compiled with the old C++ ABI": said(build_island),
        },
    }
    for number, quotations in told.items():
        for quotation, message in quotations.items():
            assert quotation in message
            for language in LANGUAGES:
                assert quotation in plain(entries(language)[number])


def test_public_names_in_the_faq_exist() -> None:
    import hyper_parallel as hp
    from hp_pipeline import CommComputeOverlap

    assert CommComputeOverlap.wrap_dispatch
    assert CommComputeOverlap.wrap_combine
    for name in re.findall(r"\bhp\.([A-Za-z_.]+)", "".join(code_of("en"))):
        found: Any = hp
        for part in name.rstrip(".").split("."):
            found = getattr(found, part)
