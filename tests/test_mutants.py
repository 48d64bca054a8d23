"""Plugins that are broken on purpose: the kit must fail each, and pass its clean twin.

    make test-slow, one of four
    make test-nightly, all of them

A mutant runs on the first tier on which it can be seen, and at night on the others too; those of
tier ``gpu`` need a CUDA device.
"""

from __future__ import annotations

import pytest

from tests.mutants import (
    algorithm_signs,
    algorithms,
    backends,
    bound,
    corrections,
    drafts,
    dropping,
    engines,
    evictions,
    host_format,
    index,
    keepers,
    latent,
    lifecycle,
    loads,
    observers,
    parameters,
    plugins,
    plugins_head_sparsity,
    plugins_infllm_v2,
    plugins_pqcache,
    plugins_trained_gate,
    prefixes,
    regranulated,
    several_tokens,
    stages,
    storage_tier,
    storages,
    topks,
    transfers,
)
from tests.selection import KERNELS
from topkv_testing.algorithms import AlgorithmTests
from topkv_testing.backends import BackendTests
from topkv_testing.stages import StageTests
from topkv_testing.tiers import tier
from topkv_testing.topks import TopKTests

KITS = (AlgorithmTests, BackendTests, StageTests, TopKTests)

MUTANTS = [
    *algorithm_signs.MUTANTS,
    *algorithms.MUTANTS,
    *backends.MUTANTS,
    *bound.MUTANTS,
    *drafts.MUTANTS,
    *dropping.MUTANTS,
    *engines.MUTANTS,
    *evictions.MUTANTS,
    *host_format.MUTANTS,
    *index.MUTANTS,
    *keepers.MUTANTS,
    *latent.MUTANTS,
    *lifecycle.MUTANTS,
    *loads.MUTANTS,
    *observers.MUTANTS,
    *parameters.MUTANTS,
    *plugins.MUTANTS,
    *plugins_head_sparsity.MUTANTS,
    *plugins_infllm_v2.MUTANTS,
    *plugins_pqcache.MUTANTS,
    *plugins_trained_gate.MUTANTS,
    *prefixes.MUTANTS,
    *regranulated.MUTANTS,
    *storage_tier.MUTANTS,
    *several_tokens.MUTANTS,
    *stages.MUTANTS,
    *corrections.MUTANTS,
    *storages.MUTANTS,
    *topks.MUTANTS,
    *transfers.MUTANTS,
]


PASSED = set()
"""Clean twins that have passed: several mutants of one test share theirs."""


def cells():
    """Every mutant on every tier on which it can be seen."""
    found = []
    for mutant in MUTANTS:
        for name in mutant.tiers:
            missing = tier(name).missing
            marks = [pytest.mark.gpu] if name == "gpu" else []
            if name not in (mutant.tiers[0], "gpu"):
                marks.append(pytest.mark.nightly)
            if missing:
                marks.append(pytest.mark.skip(reason=f"tier {name!r}: {missing}"))
            found.append(pytest.param(mutant, name, id=f"{mutant.name}-{name}", marks=marks))
    return found


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize(("mutant", "tier_name"), cells())
def test_a_mutant_is_caught_and_its_twin_passes(mutant, tier_name, record_property):
    if (mutant.twin, tier_name) not in PASSED:
        mutant.run_clean(tier_name)
        PASSED.add((mutant.twin, tier_name))
    failure = mutant.is_caught(tier_name)
    assert failure, f"{mutant.name} survived on tier {tier_name!r}"
    record_property("failure", failure)
    print(f"{tier_name}: {mutant.name}: {failure}")


def test_planted_errors_of_kernels_show_in_tests_that_a_commit_interprets():
    """``tests.selection.KERNELS`` names these tests."""
    kits = {each for kit in KITS for each in dir(kit) if each.startswith("test")}
    seen = {getattr(m, "test", None) for m in MUTANTS if m.tiers[0] == "interpret"} & kits
    assert len(seen) > 10
    assert [name for name in sorted(seen) if not any(part in name for part in KERNELS)] == []


def test_there_are_enough_of_them():
    assert len({mutant.name for mutant in MUTANTS}) >= 20
    shown = {m.name for m in MUTANTS if {"cpu", "interpret"} & set(m.tiers)}
    assert len(shown) >= 15
