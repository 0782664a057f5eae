"""The example's text and model by themselves: batches that no mesh can change, and a model that sees only the past."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from lm.config import ConfigError, ModelSizes, RunConfig
from lm.model import Rotary, build_model, next_byte_loss
from lm.text import Text, load_standard_library
from lm.trainer import Trainer

SIZES = ModelSizes(d_model=32, layers=2, heads=4, d_hidden=64, sequence=32)


@pytest.fixture(scope="module")
def text() -> Text:
    return load_standard_library(400_000, SIZES.sequence)


def test_the_text_is_the_same_each_time_and_capped(text: Text) -> None:
    again = load_standard_library(400_000, SIZES.sequence)
    assert again.digest == text.digest
    assert len(text.train) + len(text.validation) == 400_000
    assert load_standard_library(300_000, SIZES.sequence).digest != text.digest


def test_a_rank_that_reads_its_rows_gets_the_rows_of_the_global_batch(text: Text) -> None:
    whole = text.rows("train", seed=3, step=7, positions=range(8), sequence=32)
    parts = [text.rows("train", 3, 7, range(first, first + 2), 32) for first in range(0, 8, 2)]
    assert np.array_equal(np.concatenate(parts), whole)
    assert whole.shape == (8, 33)
    assert not np.array_equal(text.rows("train", 3, 8, range(8), 32), whole)
    assert not np.array_equal(text.rows("train", 4, 7, range(8), 32), whole)


def test_rows_are_pieces_of_their_split(text: Text) -> None:
    for split, source in (("train", text.train), ("validation", text.validation)):
        for row in text.rows(split, 0, 1, range(4), 32):
            assert bytes(row.tolist()) in source


def test_unigram_entropy_of_known_frequencies() -> None:
    four = bytes([10, 20, 30, 40] * 5)
    assert Text(four, four, files=1, digest="").unigram_entropy() == pytest.approx(math.log(4))


def test_too_little_text_is_refused() -> None:
    with pytest.raises(ConfigError, match="raise --max-bytes"):
        load_standard_library(max_bytes=500, sequence=128)


def test_the_model_sees_only_the_past() -> None:
    model = build_model(SIZES, torch.float64, seed=0)
    tokens = torch.randint(256, (2, 32), generator=torch.Generator().manual_seed(0))
    changed = tokens.clone()
    changed[:, 20:] = 255 - changed[:, 20:]
    before, after = model(tokens), model(changed)
    assert torch.equal(before[:, :20], after[:, :20])
    assert not torch.equal(before[:, 20:], after[:, 20:])


def test_rotary_scores_depend_only_on_the_distance() -> None:
    rotary = Rotary(8, 32, torch.float64)
    generator = torch.Generator().manual_seed(0)
    query, key = (torch.randn(8, generator=generator, dtype=torch.float64) for _ in range(2))
    turned_query = rotary(query.expand(1, 1, 32, 8))[0, 0]
    turned_key = rotary(key.expand(1, 1, 32, 8))[0, 0]
    scores = turned_query @ turned_key.T
    for distance in (0, 1, 5):
        diagonal = scores.diagonal(distance)
        torch.testing.assert_close(diagonal, diagonal[0].expand_as(diagonal))


def test_weights_depend_on_the_seed_alone() -> None:
    torch.manual_seed(1)
    first = build_model(SIZES, torch.float32, seed=5).state_dict()
    torch.manual_seed(2)
    again = build_model(SIZES, torch.float32, seed=5).state_dict()
    other = build_model(SIZES, torch.float32, seed=6).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["head.weight"], other["head.weight"])


def test_a_fresh_model_is_as_good_as_guessing(text: Text) -> None:
    rows = torch.from_numpy(text.rows("train", 0, 1, range(8), SIZES.sequence))
    loss = next_byte_loss(build_model(SIZES, torch.float32, seed=0)(rows[:, :-1]), rows[:, 1:])
    assert loss.item() == pytest.approx(math.log(256), abs=0.1)


def test_training_falls_clearly_below_the_unigram_entropy(text: Text) -> None:
    config = RunConfig(sizes=SIZES, steps=150, batch=16, lr=1e-2, warmup=10, max_bytes=400_000)
    trainer = Trainer(config, text)
    for step in range(1, config.steps + 1):
        trainer.train_step(step)
    assert trainer.validate() < text.unigram_entropy() - 0.5


def test_a_loss_that_is_not_finite_stops_the_run_before_the_weights_change(text: Text) -> None:
    trainer = Trainer(RunConfig(sizes=SIZES, batch=4), text)
    with torch.no_grad():
        trainer.model.head.weight.fill_(float("inf"))
    before = trainer.model.embedding.weight.clone()
    with pytest.raises(FloatingPointError, match="lower --lr"):
        trainer.train_step(1)
    assert torch.equal(trainer.model.embedding.weight, before)
