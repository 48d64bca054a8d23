"""The split of a budget against figures worked out by hand, and what it has to fulfil."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv_rocketkv.split import capacity, channels

# c = 32, share 0.5: 2^17 / 2^2.5. c = 1024, share 0.8: 2^20 / 2^8, less what a power rounds. With
# c = 4096 the share ends at 0.8: 2^22 / 2^9.6. With c = 2 it is 0.26. Channels are those of the
# paper's chunk, ceil(sqrt(c2)) if that is at most c2, else 1.
TABLE = [
    ((131072, 4096, 256), 23170, (128, 3), 67),
    ((1 << 20, 1024, 0), 4095, (128, 2), 64),
    ((1 << 22, 1024, 0), 5404, (128, 3), 72),
    ((8192, 4096, 256), 6841, (64, 1), 38),
    ((4096, 4096, 256), 4096, (128, 1), 128),
    ((100, 4096, 256), 100, (128, 1), 128),
    ((1000, 100, 300), 600, (128, 3), 64),
    ((400, 100, 300), 400, (128, 2), 64),
]


@pytest.mark.parametrize(("given", "kept", "of_chunk", "read"), TABLE)
def test_the_table(given, kept, of_chunk, read):
    assert capacity(*given) == kept
    assert channels(*of_chunk, kept, given[1]) == read


TOKENS = st.integers(1, 1 << 21)
BUDGETS = st.integers(2, 1 << 15)
DIMS = st.sampled_from([64, 80, 128, 256])


@given(n=TOKENS, t=BUDGETS, dim=DIMS, chunk=st.integers(1, 16), generated=st.integers(0, 2048))
@settings(deadline=None, max_examples=300)
def test_the_index_is_worth_half_of_the_budget(n, t, dim, chunk, generated):
    kept = capacity(n, t, generated)
    assert min(2 * generated, n) <= kept <= n
    read = channels(dim, chunk, kept, t)
    assert 1 <= read <= dim
    if read > 1:  # one channel has to be read
        assert kept / chunk * read / (2 * dim) <= min(kept, t) / 2 * (1 + 1e-9)


@given(n=TOKENS, budgets=st.tuples(BUDGETS, BUDGETS), generated=st.integers(0, 999))
@settings(deadline=None, max_examples=200)
def test_a_larger_budget_keeps_no_less(n, budgets, generated):
    small, large = (capacity(n, t, generated) for t in sorted(budgets))
    assert small <= large


def test_channels_end_at_both_ends():
    assert channels(64, 16, 400, 100) == 64
    assert channels(64, 1, 100000, 100) == 1
    assert [channels(128, unit, 560, 100) for unit in (1, 2, 4, 8)] == [22, 45, 91, 128]
