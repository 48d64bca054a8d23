"""The lightning indexer against the conformance kit, in both formats of keys."""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st

from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def shapes(tier, **further):
    """Index heads and dims; few of them where each compiles its kernels anew."""
    if tier.name == "gpu":
        return {"dims": (32,)} | {name: values[:1] for name, values in further.items()}
    return {"groups": (4, 1, 3), "dims": (16, 32)} | further


def by_key(name, pool):
    """fp8 pages token by token: in blocks of 64, all codes stand in front of all scales."""
    codes, scales = (
        pool.view(-1, 64, pool.shape[1])
        .flatten(1)
        .split_with_sizes([64 * (pool.shape[1] - 4), 64 * 4], dim=1)
    )
    each = [codes.unflatten(1, (64, -1)), scales.unflatten(1, (64, 4))]
    return torch.cat(each, dim=2).flatten(0, 1)


class TestModelKeys(AlgorithmTests):
    """Keys in the model's own dtype, in pages of any size."""

    @pytest.fixture
    def plugin(self):
        return "deepseek_dsa"

    @pytest.fixture
    def options(self, tier):
        params = {"keys": st.just("bf16"), "hadamard": st.booleans()}
        return AlgorithmOptions(
            params=st.fixed_dictionaries(params),
            geometry=shapes(tier),
            hidden_needles=True,
            head_needles=True,
        )


@pytest.mark.slow
class TestFp8Keys(AlgorithmTests):
    """Keys in e4m3, in pages of 64 tokens and of 128."""

    @pytest.fixture
    def plugin(self):
        return "deepseek_dsa"

    @pytest.fixture
    def options(self, tier):
        params = {"hadamard": st.booleans(), "scale_format": st.sampled_from(["fp32", "ue8m0"])}
        return AlgorithmOptions(
            params=st.fixed_dictionaries(params),
            geometry=shapes(tier, page_units=(64, 128)),
            selects=(1, 2, 5, 70),
            units=128,
            hidden_needles=True,
            head_needles=True,
            by_key=by_key,
            mass=2.0**-9,  # products of e4m3 on tensor cores, see the README
        )
