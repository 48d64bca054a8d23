"""What `topkv eval` says that a selection reads where a stage of another package is behind it."""

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


@pytest.mark.parametrize("p", [0.5, 1.0])
def test_a_stage_reads_what_stands_for_its_candidates(p):
    """And the algorithm what stands for the request, as without a stage."""
    model = load_checkpoint("cpu").float()
    task = tasks.retrieval_task(CONTEXT, questions=2, seed=3)
    dim = model.config.head_dim
    text = f"quest:stages=top_p/p={p}/widen={WIDEN}"
    (choice,) = choices.read_algorithms([text], dim, registry())
    cell, grid = Cell(task, choice, 0.1, ()), Grid(model, "triton_attention", None, 2)
    with torch.inference_mode(), attach(model, config_of(cell, grid)) as handle:
        (group,) = handle.coordinator.config.groups
        run = Run(handle, task, cell.budget, 2)
        run.all()
        row = run.row()
    length, heads = CONTEXT + ASK_BYTES, model.config.num_key_value_heads
    bounds = -(-length // UNIT) * 2 * heads * dim * 2
    keys = WIDEN * group.shape.select * UNIT * heads * (dim // 2 + 4)
    token = 2 * heads * dim * 4
    assert row["index_tokens"] == pytest.approx((bounds + keys) / token, abs=1e-3)
