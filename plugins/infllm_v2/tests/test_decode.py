"""Whole decodes of InfLLM-v2 through the coordinator, see ``DecodeTests``."""

from __future__ import annotations

from hypothesis import strategies as st

from topkv_infllm_v2.entry import topkv_register_algorithms
from topkv_testing.decodes import DecodeTests
from topkv_testing.fixtures import on as on


@st.composite
def shapes(draw):
    """unit, scope, parameters."""
    unit, stride = draw(st.sampled_from([(4, 2), (8, 2), (8, 4)]))
    params = {"stride": stride, "sink_units": draw(st.integers(0, 1)), "recent_units": 0}
    return unit, draw(st.sampled_from(["kv_head", "shared"])), params


class TestDecode(DecodeTests):
    (entry,) = topkv_register_algorithms()
    shapes = staticmethod(shapes)
