"""Sizes of what an engine gives to the coordinator, against the bytes that that takes."""

from __future__ import annotations

from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tools.engines.tests.steps import LONGEST, SHAPE, lowered
from topkv import SparseCoordinator
from topkv_engines import memory

ROW = 2 * SHAPE.num_layers * SHAPE.num_kv_heads * SHAPE.head_dim * 4
"""Bytes of a token in all layers."""


def test_the_prompt_buffer_has_half_of_what_is_left_and_no_more_than_a_request():
    config = lowered()
    least = SparseCoordinator.required_bytes(config).device

    @given(left=st.integers(-(10**5), 3 * LONGEST * ROW))
    @settings(max_examples=25, deadline=None, phases=[Phase.generate])
    def check(left):
        made = memory.with_prompt_buffer(config, least + left)
        tokens = made.prefill_buffer_tokens
        taken = SparseCoordinator.required_bytes(made).device - least
        assert taken == tokens * ROW <= max(left, 0) / 2
        assert tokens == LONGEST or 2 * (tokens + 16) * ROW > left

    check()
