"""Whole decodes of ParisKV through the coordinator, see ``DecodeTests``."""

from __future__ import annotations

from hypothesis import strategies as st

from topkv_pariskv.entry import topkv_register_algorithms
from topkv_testing.decodes import DecodeTests
from topkv_testing.fixtures import on as on


@st.composite
def shapes(draw):
    """unit, scope, parameters."""
    params = {"sink_units": draw(st.integers(0, 1)), "recent_units": draw(st.integers(0, 1))}
    return 1, draw(st.sampled_from(["kv_head", "shared"])), params


class TestDecode(DecodeTests):
    (entry,) = topkv_register_algorithms()
    shapes = staticmethod(shapes)
