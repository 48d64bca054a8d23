"""The option against the conformance kit, and its parameter."""

from __future__ import annotations

import math

import pytest
from hypothesis import strategies as st

from topkv.errors import ConfigError
from topkv_skip_softmax.entry import topkv_register_stages
from topkv_testing.kit import params_of
from topkv_testing.stages import AlgorithmOptions, OptionTests

(ENTRY,) = topkv_register_stages()
FACTORS = st.floats(1e-300, 1e300) | st.integers(1, 10**6)
OPTIONS = AlgorithmOptions(params=st.fixed_dictionaries({}, optional={"factor": FACTORS}))


class TestSkipSoftmax(OptionTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self):
        return OPTIONS


@pytest.mark.parametrize(
    "factor", [0, 0.0, -1, math.nan, math.inf, -math.inf, 10**400, "1", None, True, [1]]
)
def test_a_factor_that_is_none_is_refused(factor):
    with pytest.raises(ConfigError, match="factor of skip_softmax must be "):
        params_of(ENTRY, {"factor": factor})
