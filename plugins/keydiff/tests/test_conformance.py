"""KeyDiff against the conformance kit."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from topkv_keydiff.entry import topkv_register_stages
from topkv_testing.stages import StageOptions, StageTests

(ENTRY,) = topkv_register_stages()


def by_tokens(keys, page, lanes):
    """The formula, a token at a time and in float64: ``keys [n, Hkv, D]``, whole pages."""
    heads = keys.shape[1] // lanes
    found = torch.zeros(lanes, len(keys) // page, dtype=torch.float64)
    for head in range(keys.shape[1]):
        directions = [key / key.norm() if key.any() else key for key in keys[:, head].double()]
        anchor = torch.stack(directions).sum(0)
        for at, direction in enumerate(directions):
            like = direction @ anchor / anchor.norm() if anchor.any() else 0.0
            found[head // heads, at // page] -= like / page / heads
    return found


def worth(bench, slot, position):
    """Worth of pages by direction alone: neither size nor position matter."""
    page = bench.group.page_tokens
    whole = len(bench.keys[slot]) // page * page
    return by_tokens(bench.keys[slot][:whole], page, bench.group.lane_heads), 1e-5


OPTIONS = StageOptions(
    params=st.fixed_dictionaries({"tokens": st.sampled_from([16, 4096])}),
    selects=(2, 3, 5),
    worth=worth,
)


class TestKeyDiff(StageTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS
