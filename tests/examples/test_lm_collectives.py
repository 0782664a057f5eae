"""What one step of the example's model sends, collective by collective, in order: Megatron's, and nothing else.

Recorded in the second step, when everything is planned. Bytes are those that a rank puts on the wire (ring formulas): with
two ranks an all-reduce sends its tensor once, an all-gather and a reduce-scatter half of the whole tensor.
"""

from __future__ import annotations

import pytest
import torch
from lm.config import ModelSizes, RunConfig, parse_mesh
from lm.model import next_byte_loss
from lm.parallel import build_mesh, distribute_batch, local_positions, loss_context
from lm.text import load_standard_library
from lm.trainer import Trainer

from hp_core.platform.recorder import record_collectives
from hp_core.testing import run_ranks

# A batch of 12: no activation then has the size of a weight, so bytes tell them apart.
BATCH, SEQUENCE, WIDTH, HIDDEN, LAYERS, VOCABULARY = 12, 32, 32, 64, 2, 256
ITEM = 8  # bytes of a float64
SCORES = BATCH * SEQUENCE * ITEM  # one number for each byte that is predicted
STREAM = SCORES * WIDTH  # the residual stream: batch x sequence x width

Sent = list[tuple[str, int, int]]
"""Kind, bytes on the wire and group size of each collective."""

ALL_REDUCE = ("all_reduce", STREAM, 2)
GATHER = ("all_gather", STREAM // 2, 2)
SCATTER = ("reduce_scatter", STREAM // 2, 2)
NORM_WEIGHT = ("all_reduce", WIDTH * ITEM, 2)
CLIPPING = [("all_reduce", (2 + 7 * LAYERS + 2 * LAYERS + 1) * ITEM, 2)]  # one number for each parameter
LOSS = [("all_reduce", SCORES, 2), ("all_reduce", 2 * SCORES, 2)]  # the maximum; the sum and the target's score


def second_step(mesh: str, sequence_parallel: bool) -> tuple[Sent, Sent, Sent]:
    """On a rank: what the forward pass, the backward pass and the rest of a training step send."""
    config = RunConfig(
        sizes=ModelSizes(d_model=WIDTH, layers=LAYERS, heads=4, d_hidden=HIDDEN, sequence=SEQUENCE),
        mesh=parse_mesh(mesh),
        sequence_parallel=sequence_parallel,
        dtype="float64",
        batch=BATCH,
        max_bytes=300_000,
    )
    text = load_standard_library(config.max_bytes, SEQUENCE)
    device_mesh = build_mesh(config)
    trainer = Trainer(config, text, device_mesh)
    trainer.train_step(1)
    trainer.optimizer.zero_grad()
    rows = torch.from_numpy(text.rows("train", config.seed, 2, local_positions(BATCH, device_mesh), SEQUENCE))
    inputs, targets = distribute_batch(rows[:, :-1], device_mesh), distribute_batch(rows[:, 1:], device_mesh)
    with loss_context(device_mesh):
        with record_collectives() as forward:
            loss: torch.Tensor = next_byte_loss(trainer.model(inputs), targets)
        with record_collectives() as backward:
            loss.backward()
    with record_collectives() as update:
        trainer.update(2)
    forward_sent, backward_sent, update_sent = (
        [(record.kind, record.nbytes, record.group_size) for record in log] for log in (forward, backward, update)
    )
    return forward_sent, backward_sent, update_sent


def test_tensor_parallel_reduces_once_per_block_side_in_each_direction() -> None:
    attention = feed_forward = [ALL_REDUCE]
    for forward, backward, update in run_ranks(2, second_step, "tp=2", False):
        embedding = head = [ALL_REDUCE]
        assert forward == [*embedding, *(attention + feed_forward) * LAYERS, *LOSS]
        assert backward == [*head, *(feed_forward + attention) * LAYERS]
        assert update == CLIPPING


def test_sequence_parallel_gathers_and_scatters_once_per_block_side_in_each_direction() -> None:
    side = [GATHER, SCATTER]
    side_backward = [GATHER, SCATTER, NORM_WEIGHT]
    for forward, backward, update in run_ranks(2, second_step, "tp=2", True):
        embedding, head = [SCATTER], [GATHER]
        assert forward == [*embedding, *side * 2 * LAYERS, *head, *LOSS]
        head_backward, embedding_backward = [SCATTER, NORM_WEIGHT], [GATHER]
        assert backward == [*head_backward, *side_backward * 2 * LAYERS, *embedding_backward]
        assert update == CLIPPING


def test_sequence_parallel_sends_the_bytes_of_tensor_parallel() -> None:
    sent = [
        sum(nbytes for _, nbytes, _ in [*forward, *backward])
        for sequence_parallel in (False, True)
        for forward, backward, _ in run_ranks(2, second_step, "tp=2", sequence_parallel)[:1]
    ]
    norm_weights = (2 * LAYERS + 1) * WIDTH * ITEM
    assert sent[0] == (4 * LAYERS + 2) * STREAM + 3 * SCORES
    assert sent[1] == sent[0] + norm_weights


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_data_parallel_reduces_each_gradient_once(sequence_parallel: bool) -> None:
    """A parameter's gradient that is pending over both axes crosses them in one all-reduce over four ranks."""
    matrices = VOCABULARY * WIDTH * 2 + LAYERS * (4 * WIDTH * WIDTH + 3 * WIDTH * HIDDEN)
    norms = 2 * LAYERS + 1
    for forward, backward, update in run_ranks(4, second_step, "dp=2,tp=2", sequence_parallel):
        of_one, of_both = [record for record in backward if record[2] == 2], [r for r in backward if r[2] == 4]
        streams = [record for record in of_one if record[1] in (STREAM // 2, STREAM // 4)]
        weights = [record for record in of_one if record not in streams]
        assert {kind for kind, _, _ in weights + of_both} == {"all_reduce"}
        assert len(weights) + len(of_both) == 2 + 7 * LAYERS + norms
        whole = norms * WIDTH * ITEM
        assert sum(nbytes for _, nbytes, _ in weights) == matrices // 2 * ITEM + (0 if sequence_parallel else whole)
        assert sum(nbytes for _, nbytes, _ in of_both) == (-(-whole * 3 // 2) if sequence_parallel else 0)
        assert all(size == 2 for _, _, size in forward)
        assert update == CLIPPING
