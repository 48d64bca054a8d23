"""Eviction policies as the core takes them: without a kernel, and with one that is wrong."""

from __future__ import annotations

import pytest
import torch
import triton
import triton.language as tl
from attrs import evolve

from topkv.entries import PluginEntry
from topkv.errors import ConfigError, PluginError
from topkv.hooks.eviction import EvictionSetup
from topkv.plugins import PluginRegistry
from topkv.transfer.eviction import LeastRecentlyUsed
from topkv.transfer.triton import TritonTransfer
from topkv_testing.doubles import Entries
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import tier
from topkv_testing.transfer.bench import Row, TransferBench, group_shape, raw


class Bare:
    """A policy in torch alone."""

    def __init__(self, setup):
        """Nothing depends on the setup."""

    new_position = LeastRecentlyUsed.new_position


@triton.jit
def _behind_the_lane(
    position, stale, stale_rank, hit_rank, stale_count, misses, slots: tl.constexpr, state
):
    return position + 1


class BehindTheLane(LeastRecentlyUsed):
    """Every position is one too large, so that the last is in the lane behind."""

    new_position_kernel = _behind_the_lane


@pytest.fixture
def interpreted():
    found = tier("interpret")
    if found.missing:
        pytest.skip(found.missing)
    return found


def registry_with(factories):
    entry = PluginEntry("bare", "eviction", factories)
    return PluginRegistry([("topkv-bare", "7", Entries(entry))])


def test_a_policy_without_a_kernel_is_refused_by_its_own_name(interpreted):
    registry = registry_with(f"{__name__}:Bare")
    with pytest.raises(PluginError) as caught:
        make_coordinator(interpreted, registry=registry, eviction="bare")
    assert str(caught.value).startswith("topkv-bare 7 (eviction 'bare') has no kernel:")
    assert "new_position_kernel" in str(caught.value)
    assert "zero_copy" not in str(caught.value)
    make_coordinator(tier("cpu"), registry=registry, eviction="bare").close()


def test_a_policy_that_states_no_kernel_is_refused_before_anything_is_made(interpreted):
    registry = registry_with({"reference": f"{__name__}:Bare"})
    with pytest.raises(ConfigError, match=r"topkv-bare 7 .* takes impl reference, got triton"):
        make_coordinator(interpreted, registry=registry, eviction="bare")


def test_a_wrong_policy_writes_to_no_other_lane(interpreted):
    def make(setup, impl):
        policy = BehindTheLane(EvictionSetup(interpreted.device))
        return TritonTransfer(evolve(setup, eviction=policy))

    group = group_shape(slots=5, requests=3, lane_heads=1, layers=1)
    bench = TransferBench(make, group, interpreted.device, interpreted.impl)
    bench.put([Row(1, 48, 48)])
    before = raw(bench.store.order[0, [0, 2]])
    bench.run(0, [[1, 2, 3, 4]])
    assert torch.equal(raw(bench.store.order[0, [0, 2]]), before)
