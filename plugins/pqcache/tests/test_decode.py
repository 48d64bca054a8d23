"""Whole decodes of PQCache through the coordinator, see ``DecodeTests``."""

from __future__ import annotations

from hypothesis import strategies as st

from topkv_pqcache.entry import topkv_register_algorithms
from topkv_testing.decodes import DecodeTests


@st.composite
def shapes(draw):
    """unit, scope, parameters: prompts of several codebooks, and windows that decode fills."""
    window = draw(st.sampled_from([3, 5, 30]))
    params = {
        "subvectors": draw(st.sampled_from([1, 2, 4])),
        "bits": draw(st.integers(1, 4)),
        "window": window,
        "segment": 2 * window + draw(st.sampled_from([0, 50])),
        "iterations": 2,
        "sink_units": draw(st.integers(0, 1)),
        "recent_units": draw(st.integers(0, 1)),
    }
    return 1, draw(st.sampled_from(["kv_head", "shared"])), params


class TestDecode(DecodeTests):
    (entry,) = topkv_register_algorithms()
    shapes = staticmethod(shapes)
