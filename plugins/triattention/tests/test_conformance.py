"""TriAttention against the conformance kit."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import strategies as st

from plugins.triattention.tests.making import by_tokens
from topkv.testing.stages import StageOptions, StageTests
from topkv_triattention.calibration import read
from topkv_triattention.entry import topkv_register_stages

(ENTRY,) = topkv_register_stages()

QUERIES = Path(__file__).parent / "queries.json"
"""A calibration of one layer of 4 heads of 12 channels, of which 8 are turned, in halves."""

KNOWN = read(QUERIES, [0], 4, 12)[0]


def worth(bench, slot, position):
    """The paper's formula. Keys are as RoPE has turned them, so that the turn of a key is in its
    phase, and its own position counts no more."""
    page, keys = bench.group.page_tokens, bench.keys[slot]
    whole = len(keys) // page * page
    lanes, positions = bench.group.lane_heads, [0] * whole
    scores, slack = by_tokens(KNOWN, keys[:whole], positions, position, page, lanes, 1.0)
    return scores, 1e-5 + 2e-6 * slack


OPTIONS = StageOptions(
    params=st.fixed_dictionaries(
        {"calibration": st.just(str(QUERIES)), "tokens": st.sampled_from([16, 4096])}
    ),
    geometry={"kv_heads": (2,), "groups": (2,), "dims": (12,)},
    selects=(2, 3, 5),
    worth=worth,
)


class TestTriAttention(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
