"""The split of a budget against figures worked out by hand, and what it has to fulfil."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv_rocketkv.split import Split, channels, narrowing, sizes, split

# c = 32, share 0.5: 2^17 / 2^2.5. c = 1024, share 0.8: 2^20 / 2^8, less what a power rounds. With
# c = 4096 the share ends at 0.8: 2^22 / 2^9.6. With c = 2 it is 0.26.
TABLE = [
    ((131072, 4096, 128, 256), Split(23170, 22914, 2048, 3, 67)),
    ((1 << 20, 1024, 128, 0), Split(4095, 4095, 512, 2, 64)),
    ((1 << 22, 1024, 128, 0), Split(5404, 5404, 512, 3, 72)),
    ((8192, 4096, 64, 256), Split(6841, 6585, 2048, 1, 38)),
    ((4096, 4096, 128, 256), Split(4096, 3840, 2048, 1, 128)),
    ((100, 4096, 128, 256), Split(100, 0, 2048, 1, 128)),
    ((1000, 100, 128, 300), Split(600, 300, 50, 3, 64)),
    ((400, 100, 128, 300), Split(400, 100, 50, 2, 64)),
]


@pytest.mark.parametrize(("given", "expected"), TABLE)
def test_the_table(given, expected):
    assert split(*given) == expected


TOKENS = st.integers(1, 1 << 21)
BUDGETS = st.integers(2, 1 << 15)
DIMS = st.sampled_from([64, 80, 128, 256])


@given(n=TOKENS, t=BUDGETS, dim=DIMS, generated=st.integers(0, 2048))
@settings(deadline=None, max_examples=300)
def test_a_step_reads_no_more_than_the_budget(n, t, dim, generated):
    """Keys and values of the tokens that it attends, and the index of all that is kept."""
    found = split(n, t, dim, generated)
    index = found.capacity / found.chunk * found.channels / (2 * dim)
    least = found.capacity / found.chunk / (2 * dim)  # one channel has to be read
    assert found.select + max(index - least, 0) <= t * (1 + 1e-9)
    assert found.prompt == max(found.capacity - generated, 0)
    assert min(2 * generated, n) <= found.capacity <= n
    assert found.chunk <= narrowing(found.capacity, t)
    assert 1 <= found.channels <= dim


@given(n=TOKENS, dim=DIMS, budgets=st.tuples(BUDGETS, BUDGETS), generated=st.integers(0, 999))
@settings(deadline=None, max_examples=200)
def test_a_larger_budget_keeps_no_less(n, dim, budgets, generated):
    small, large = (split(n, t, dim, generated) for t in sorted(budgets))
    assert small.capacity <= large.capacity


@given(n=TOKENS, attended=st.integers(2, 1 << 14), unit=st.sampled_from([1, 4, 16]), dim=DIMS)
@settings(deadline=None, max_examples=200)
def test_units_get_the_channels_of_chunks_of_their_size(n, attended, unit, dim):
    kept, read = sizes(n, attended, unit, dim, 256, 32)
    found = split(n, 2 * attended, dim, 256)
    assert kept == max(found.prompt, attended, 33)
    assert read == channels(dim, unit, narrowing(found.capacity, 2 * attended))
    if unit == found.chunk:
        assert read == found.channels
    if n <= attended:
        assert kept >= n, "what a step attends anyway is dropped"
        assert read == dim


def test_channels_end_at_both_ends():
    assert channels(64, 16, 4.0) == 64
    assert channels(64, 1, 1000.0) == 1
    assert [channels(128, unit, 5.6) for unit in (1, 2, 4, 8)] == [22, 45, 91, 128]
