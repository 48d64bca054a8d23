"""Whole decodes of Double Sparsity through the coordinator, see ``DecodeTests``."""

from __future__ import annotations

from hypothesis import strategies as st

from topkv_double_sparsity.entry import topkv_register_algorithms
from topkv_testing.decodes import DecodeTests
from topkv_testing.fixtures import on as on


@st.composite
def shapes(draw):
    """unit, scope, parameters."""
    params = {
        "label": draw(st.sampled_from(["bf16", "int4"])),
        "sink_tokens": draw(st.integers(0, 2)),
        "channels": draw(st.sampled_from([2, 8])),
    }
    return 1, draw(st.sampled_from(["kv_head", "shared"])), params


class TestDecode(DecodeTests):
    (entry,) = topkv_register_algorithms()
    shapes = staticmethod(shapes)
