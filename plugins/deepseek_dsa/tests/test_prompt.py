"""Selections of prompt rows: each is that of a decode step at its position."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv.types import Selection
from topkv_authoring import index
from topkv_deepseek_dsa.algorithm import DeepSeekDSA


def as_steps(w, start, q, weights):
    """Select by decode steps at positions from ``start`` on, among keys that are there already."""
    sets = []
    for row in range(len(q)):
        w.rows([0])
        w.layer.step.lengths.fill_(start + row + 1)
        ids = torch.full((1, w.group.select), -7, dtype=torch.int32).to(w.device)
        w.indexer.retrieve_topk(
            w.layer,
            q[row, None, None].to(w.device),
            weights[row, None, None].to(w.device),
            Selection(ids),
        )
        sets += w.formed(ids, [start + row + 1])
    return sets


@pytest.mark.parametrize("hadamard", [False, True])
def test_a_row_is_a_decode_step(world, impl, device, form, hadamard):
    @given(start=st.integers(0, 150), rows=st.integers(1, 30), seed=st.integers(0, 99))
    @settings(deadline=None, max_examples=4)
    def check(start, rows, seed):
        w = world(impl, device, keys=form, hadamard=hadamard, seed=seed)
        w.prefill(0, w.random(start + rows), chunks=(start,))
        q, weights = w.queries(rows)
        assert w.prompt(0, start, q[:, 0], weights) == as_steps(w, start, q[:, 0], weights)

    check()


def test_rows_select_the_best_before_them(world, impl, device, form):
    w = world.filled(impl, device, keys=form, dtype=torch.float32)
    q, weights = w.queries(60)
    sets = w.prompt(1, 10, q[:, 0], weights)
    for row in range(60):
        seen = 10 + row + 1
        truth = w.oracle(1, q[row, 0], weights[row])[:seen]
        order = truth.argsort(descending=True)
        if seen > 8 and truth[order[7]] - truth[order[8]] < 1e-4 * truth.abs().max():
            continue
        assert sets[row] == set(order[:8].tolist())


def test_blocks_of_rows_change_nothing(world, impl, device, form, monkeypatch):
    w = world.filled(impl, device, keys=form)
    q, weights = w.queries(14)
    expected = w.prompt(0, 236, q[:, 0], weights)
    row = 4 * 250 * (w.heads if impl == "reference" else 1)
    for fit, most in [(1, 14), (4, 14), (13, 14), (14, 6)]:
        monkeypatch.setattr(DeepSeekDSA, "score_bytes", fit * row)
        monkeypatch.setattr(index, "PROMPT_ROWS", most)
        made = []
        if impl == "triton":
            score = w.indexer.launcher.prompt

            def counted(*args, score=score, made=made):
                made.append(score(*args))
                return made[-1]

            monkeypatch.setattr(w.indexer.launcher, "prompt", counted)
        assert w.prompt(0, 236, q[:, 0], weights) == expected
        for scores in made:
            assert scores.numel() * 4 <= DeepSeekDSA.score_bytes
        assert not made or len(made) == -(-14 // min(fit, most))
        monkeypatch.undo()


def test_the_scratch_of_decoding_is_left_alone(world, impl, device, form):
    """A prompt may be scored between two steps of other requests."""
    w = world.filled(impl, device, keys=form)
    q, weights = w.queries(3)
    expected = w.retrieve(q, weights, [0, 1, 2])
    w.prompt(1, 0, *(x[:, 0] if x.dim() == 4 else x for x in w.queries(70)))
    assert w.retrieve(q, weights, [0, 1, 2]) == expected
    assert w.prompt(1, 70, q[:0, 0], weights[:0]) == []
