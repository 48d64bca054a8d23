"""Whole decodes of Quest through the coordinator, see ``DecodeTests``."""

from __future__ import annotations

from hypothesis import strategies as st

from topkv_quest.entry import topkv_register_algorithms
from topkv_testing.decodes import DecodeTests
from topkv_testing.fixtures import on as on


@st.composite
def shapes(draw):
    """unit, scope, parameters."""
    params = {
        "metadata": draw(st.sampled_from(["bf16", "int8"])),
        "sink_units": draw(st.integers(0, 2)),
    }
    return draw(st.sampled_from([1, 2, 4])), draw(st.sampled_from(["kv_head", "shared"])), params


class TestDecode(DecodeTests):
    (entry,) = topkv_register_algorithms()
    shapes = staticmethod(shapes)
