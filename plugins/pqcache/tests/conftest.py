"""The tiers that this machine has, for tests beside the conformance kit."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions
from topkv_testing.fixtures import on as on
from topkv_testing.kit import subject_of

OPTIONS = AlgorithmOptions(
    params=st.fixed_dictionaries(
        {
            "subvectors": st.sampled_from([1, 2, 4]),
            "bits": st.sampled_from([1, 2, 3]),
            "window": st.integers(8, 10),
            "segment": st.sampled_from([20, 24]),
            "iterations": st.integers(0, 4),
        }
    ),
    selects=(3, 5),
    units=64,
)


@pytest.fixture
def subject(on):
    return subject_of("pqcache", "algorithm", on, OPTIONS)
