"""The option against the conformance kit, and its parameter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import strategies as st

from topkv.errors import ConfigError
from topkv.hooks.stage import StageSetup
from topkv.types import GroupShape, ModelShape
from topkv_skip_softmax import stage
from topkv_skip_softmax.entry import topkv_register_stages
from topkv_testing.stages import AlgorithmOptions, OptionTests

(ENTRY,) = topkv_register_stages()
FACTORS = st.floats(1e-300, 1e300) | st.integers(1, 10**6)
OPTIONS = AlgorithmOptions(params=st.fixed_dictionaries({}, optional={"factor": FACTORS}))
GROUP = GroupShape((0,), 16, 1, 2, 64, torch.bfloat16, 128, 4, 99, 8, 8, 2)
MODEL = ModelShape(1, 8, 2, 64, torch.bfloat16, 0.125)


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
    with pytest.raises(ConfigError, match="factor must be a positive, finite number, got"):
        stage.SkipSoftmax(StageSetup(MODEL, GROUP, {"factor": factor}, torch.device("cpu")))
