"""Units of copies rank as their key does; one query head ranks by its direction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def whole(generator, *shape):
    """Small integers: products and sums are exact in fp32, whatever their order.

    Divided by powers of two, so that unequal logits are no less than 1/64 and no more than 40
    apart: a softmax in fp32 keeps their order.
    """
    return torch.randint(-4, 5, shape, generator=generator).bfloat16()


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("sinks", [0, 2])
def test_units_of_copies_are_exact_top_k_by_q_times_k(world, impl, device, unit, sinks):
    """The bound of a unit that holds one key, over and over, is that key's logit."""

    @given(seed=st.integers(0, 999), units=st.integers(1, 18))
    @settings(deadline=None, max_examples=8)
    def run(seed, units):
        make = {"heads": 2, "kv_heads": 2, "unit": unit, "sinks": sinks, "select": 5}
        w = world(impl, device, **make)
        generator = torch.Generator().manual_seed(seed)
        keys, q = whole(generator, units, 2, 12) / 2, whole(generator, 1, 1, 2, 12) / 4
        # One token more closes the last unit.
        w.prefill(0, torch.cat([keys.repeat_interleave(unit, 0), keys[:1]]))
        for head, row in enumerate(w.retrieve(q, [0])[0].tolist()):
            logits = (keys[:, head].double() @ q[0, 0, head].double()).tolist()
            order = sorted(range(units), key=lambda u: (u >= sinks, -logits[u], u))
            assert set(row) - {-1} == set(order[:5])

    run()


def test_one_query_head_ranks_by_direction_alone(world, impl, device, metadata):
    """q times c > 0 selects what q selects, while no unit's softmax underflows."""

    @given(seed=st.integers(0, 999), exponent=st.sampled_from([-2, -1, 1]))
    @settings(deadline=None, max_examples=8)
    def run(seed, exponent):
        w = world(impl, device, heads=2, kv_heads=2, metadata=metadata, select=4)
        generator = torch.Generator().manual_seed(seed)
        keys, q = whole(generator, 80, 2, 12), whole(generator, 1, 1, 2, 12) / 8
        keys[::4, :, 0] = 127  # int8 bounds are exact
        w.prefill(0, keys)
        assert torch.equal(w.retrieve(q, [0]), w.retrieve(q * 2.0**exponent, [0]))

    run()
