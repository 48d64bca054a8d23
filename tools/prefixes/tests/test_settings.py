"""Parameters of ``prefixes``: what is wrong is refused at once, with all reasons."""

from __future__ import annotations

import pytest

from topkv.errors import ConfigError
from topkv_testing.machines.kept import make_kept
from topkv_testing.tiers import tier


@pytest.mark.parametrize(
    ("storage", "reason"),
    [
        ("shelf", "storage must be a mapping such as"),
        ({}, "storage: name is missing"),
        ({"name": "shelf", "write": "behind"}, "storage: write must be one of 'write_through'"),
        ({"name": "shelf", "wait": 3}, "storage: unknown key 'wait'; did you mean 'wait_s'"),
        ({"name": "shelf", "quotas": {"a": "much"}}, "storage: quotas: 'a' must be"),
        ({"name": "shelf", "quotas": []}, "storage: quotas must be a mapping of tenants"),
        ({"name": "shelf", "limit_s": 0}, "storage: limit_s must be a number of seconds above 0"),
        ({"name": "shelf", "quotas": {"\ud800": 1}}, "storage: quotas: '\\ud800' must be a name"),
        ({"name": "shelf", "wait_s": -1}, "storage: wait_s must be a number of seconds"),
        (
            {"name": "shelves"},
            "storage: unknown storage 'shelves': installed of kind storage: shelf",
        ),
        (
            {"name": "shelf", "params": {"board": 1}},
            "storage: unknown parameter 'board' of topkv-doubles",
        ),
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_is_refused(storage, reason):
    with pytest.raises(ConfigError) as refused:
        make_kept(tier("cpu"), {"storage": storage})
    (told,) = refused.value.reasons
    assert told.startswith(f"prefixes: {reason}")


def test_all_that_is_wrong_is_refused_together_and_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("topkv.assembly.SparseKVCacheManager", None)
    storage = {"name": "shelves", "write": "behind", "quotas": {"a": 0}}
    with pytest.raises(ConfigError) as refused:
        make_kept(tier("cpu"), {"keep": "some", "storage": storage, "quotas": {}})
    told = dict(each.removeprefix("prefixes: ").split(" ", 1) for each in refused.value.reasons)
    assert [*told] == ["keep", "storage:", "quotas"]
    told = [each for each in refused.value.reasons if "storage" in each]
    assert len(told) == 3


def test_passwords_of_storages_are_shown_to_nobody():
    storage = {"name": "shelf", "params": {"shelf": "swordfish"}}
    coordinator = make_kept(tier("cpu"), {"storage": storage})
    told = coordinator.config.describe()
    assert "prefixes(keep='all', storage=...)" in told
    assert "swordfish" not in told
    coordinator.close()
