"""KL between the two ends: nothing where everything is selected, much where chance selects."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from topkv_cli.group import topkv

pytest.importorskip("topkv_double_sparsity.entry")
pytest.importorskip("topkv_triton_attention.entry")

from topkv_double_sparsity.algorithm import DoubleSparsity

GIVEN = (
    "--dtype",
    "float32",
    "--tasks",
    "text",
    "--contexts",
    "768",
    "--questions",
    "1",
    "--dense-layers",
    "none",
)


def kl_of(share):
    """Return the KL of exact top-k in nats, from queries, keys and values of a trained model."""
    reported = ("eval", "--json", "--device", "cpu", "--impl", "reference", *GIVEN)
    result = CliRunner().invoke(topkv, [*reported, "--algorithms", "exact", "--budgets", share])
    assert result.exit_code == 0, result.output
    return next(row["kl"] for row in json.loads(result.stdout)["cells"] if row["plugin"])


@pytest.mark.nightly
def test_a_full_budget_is_dense_and_chance_is_far_off(monkeypatch):
    score = DoubleSparsity.score

    def shuffled(self, layer, q):
        scores, closed = score(self, layer, q)
        return scores[..., torch.randperm(scores.shape[-1])], closed

    best = kl_of("5%")
    assert kl_of("100%") < 1e-6 < best
    monkeypatch.setattr(DoubleSparsity, "score", shuffled)
    assert kl_of("5%") > 20 * best
