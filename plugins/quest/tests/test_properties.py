"""Units rank by log-probabilities, those of copies by their key, one head's by its direction."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st


def whole(generator, *shape):
    """Small integers: products and sums are exact in fp32, whatever their order."""
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
        keys, q = whole(generator, units, 2, 12), whole(generator, 1, 1, 2, 12)
        # One token more closes the last unit.
        w.prefill(0, torch.cat([keys.repeat_interleave(unit, 0), keys[:1]]))
        for head, row in enumerate(w.retrieve(q, [0])[0].tolist()):
            logits = (keys[:, head].double() @ q[0, 0, head].double()).tolist()
            order = sorted(range(units), key=lambda u: (u >= sinks, -logits[u], u))
            assert set(row) - {-1} == set(order[:5])

    run()


def test_one_query_head_ranks_by_direction_alone(world, impl, device, metadata):
    """q times c > 0 selects what q selects."""

    @given(seed=st.integers(0, 999), exponent=st.sampled_from([-9, -1, 1, 12]))
    @settings(deadline=None, max_examples=8)
    def run(seed, exponent):
        w = world(impl, device, heads=2, kv_heads=2, metadata=metadata, select=4)
        generator = torch.Generator().manual_seed(seed)
        keys, q = whole(generator, 80, 2, 12), whole(generator, 1, 1, 2, 12)
        keys[::4, :, 0] = 127  # int8 bounds are exact
        w.prefill(0, keys)
        assert torch.equal(w.retrieve(q, [0]), w.retrieve(q * 2.0**exponent, [0]))

    run()


@pytest.mark.parametrize("heads", [1, 2])
def test_a_decoy_does_not_hide_the_needle(world, impl, device, heads):
    """A unit of a bound far above all others takes one place, and the others rank as before."""
    make = {"kv_heads": 1, "dim": 64, "unit": 16, "select": 3, "sinks": 1}
    w = world(impl, device, heads=heads, dtype=torch.bfloat16, **make)
    keys = w.random(17 * 16) / 128
    # Of channels in turns: the bound of unit 2 is 160, and each of its logits is 0.
    keys[32:48] = 5 * (1 - 2 * ((torch.arange(16)[:, None] + torch.arange(64)) % 2))[:, None]
    keys[15 * 16 + 3] = 0.9375  # of logit 30: its unit has all of the attention mass
    w.prefill(0, keys)
    assert w.retrieve(torch.ones(1, 1, heads, 64).bfloat16(), [0])[0, 0].tolist() == [0, 2, 15]


@pytest.mark.parametrize("heads", [2, 4, 6])
def test_units_rank_by_log_probabilities(world, impl, device, metadata, scope, heads):
    """Against float64, for scores of any size: no unit is so bad that it ties with worse ones."""

    @given(
        seed=st.integers(0, 999), size=st.sampled_from([1, 30, 1e3, 1e4]), select=st.integers(1, 9)
    )
    @settings(deadline=None, max_examples=4)
    def run(seed, size, select):
        make = {"metadata": metadata, "scope": scope, "heads": heads, "select": select}
        w = world.filled(impl, device, sinks=0, seed=seed, lengths=(80,), **make)
        q = w.queries(1)
        q *= torch.tensor([1.0, 0.7, 0.3, 1.0, 0.7, 0.3])[:heads, None]
        q = (q * (size / w.oracle(q[0], 0)[0].abs().max())).to(q.dtype)
        true = w.oracle(q[0], 0)[1]
        band = 2.0**-18 * (1 + w.magnitude(q[0], 0))  # sums of a dozen terms in fp32
        for lane, row in enumerate(w.retrieve(q, [0])[0].tolist()):
            left = sorted(set(range(19)) - set(row))
            assert true[lane, row].min() >= true[lane, left].max() - band

    run()
