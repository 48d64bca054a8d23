"""Top-p against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from topkv_testing.stages import StageOptions, StageTests, along_a_line, fewest
from topkv_top_p.entry import topkv_register_stages

(ENTRY,) = topkv_register_stages()


def left(bench, slot, q, lane, among):
    """The fewest candidates that hold the share p of the attention to the candidates: q·k of the
    keys themselves, which are where 4 bits keep them, less one rounding to bfloat16."""
    group, model = bench.group, bench.model
    params = bench.params
    keys = bench.keys[slot].double().unflatten(1, (group.lane_heads, -1))[:, lane]
    queries = q[0].double().unflatten(0, (group.lane_heads, group.heads_per_lane, -1))[lane]
    logits = torch.einsum("kgd,tkd->kgt", queries, keys).flatten(0, 1) * model.scale
    tokens = torch.tensor(among)[:, None] * group.unit + torch.arange(group.unit)
    share = logits[:, tokens].logsumexp(-1).softmax(-1)
    return fewest(share, params.p, group.select, NEAR)


NEAR = 0.02
"""Tolerance of shares: logits are off by 1 / 128 at most, where bfloat16 rounds."""

OPTIONS = StageOptions(
    params=st.fixed_dictionaries(
        {
            "p": st.sampled_from([0.85, 0.3, 0.95, 1.0]),
            "widen": st.sampled_from([1, 3, 2]),
            "outliers": st.integers(1, 4),
        }
    ),
    selects=(2, 3, 5),
    left=left,
    exactly=along_a_line,
    near=NEAR,
)


class TestTopP(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
