"""Bytes that `topkv eval` counts for a selection with a stage of another package behind it."""

from __future__ import annotations

import pytest
import torch

from topkv import attach
from topkv.plugins import registry
from topkv_evaluation.demo import load_checkpoint
from topkv_evaluation.eval import choices, tasks
from topkv_evaluation.eval.cells import Cell, Grid, config_of
from topkv_evaluation.eval.runs import Run
from topkv_evaluation.retrieval import ASK_BYTES

CONTEXT, UNIT, WIDEN = 768, 16, 2


def ran(text):
    """Run two questions; return their row, the group, head dim and kv-heads of the model."""
    model = load_checkpoint("cpu").float()
    task = tasks.retrieval_task(CONTEXT, questions=2, seed=3)
    dim = model.config.head_dim
    (choice,) = choices.read_algorithms([text], dim, registry())
    cell, grid = Cell(task, choice, 0.1, ()), Grid(model, "triton_attention", None, 2)
    with torch.inference_mode(), attach(model, config_of(cell, grid)) as handle:
        (group,) = handle.coordinator.config.groups
        run = Run(handle, task, cell.budget, 2)
        run.all()
        return run.row(), group, dim, model.config.num_key_value_heads


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_a_stage_reads_what_stands_for_its_candidates(p):
    """The algorithm reads the representations of the request, as without a stage."""
    row, group, dim, heads = ran(f"quest:stages=top_p/p={p}/widen={WIDEN}")
    length = CONTEXT + ASK_BYTES
    bounds = -(-length // UNIT) * 2 * heads * dim * 2
    keys = (
        WIDEN * group.shape.select * UNIT * heads * (dim // 2 + 4 + 4 * 4)
    )  # with words of outliers
    token = 2 * heads * dim * 4
    assert row["index_tokens"] == pytest.approx((bounds + keys) / token, abs=1e-3)


def test_a_correction_reads_what_stands_for_the_request():
    """A correction reads means of all units."""
    row, _, dim, heads = ran("quest:stages=residual")
    units = -(-(CONTEXT + ASK_BYTES) // UNIT)
    bounds, kept = units * 2 * heads * dim * 2, units * heads * dim * 4
    expected = bounds + kept * 2
    assert row["index_tokens"] == pytest.approx(expected / (2 * heads * dim * 4), abs=1e-3)
