"""Parameters of ``prefixes``: what is wrong is refused at once, with all reasons."""

from __future__ import annotations

import pytest
from attrs import evolve, field, frozen

from tests.machines.kept import make_kept
from topkv.config.settings import CHECKS
from topkv.errors import ConfigError
from topkv_testing.machines.lifecycle_model import doubles
from topkv_testing.models.storage_doubles import SHELF, ShelfParams
from topkv_testing.tiers import tier

KEEPER = "topkv-doubles 1 (keeper 'prefixes')"
STORAGE = f"storage of {KEEPER}"
QUOTAS = f"parameter quotas of {STORAGE}"


@pytest.mark.parametrize(
    ("storage", "reason"),
    [
        ("shelf", f"parameter storage of {KEEPER} must be a mapping of name, params, write,"),
        ({}, "storage of prefixes must have a name, that of a plugin of kind storage"),
        ({"name": "shelf", "write": "behind"}, f"parameter write of {STORAGE} must be one of"),
        ({"name": "shelf", "wait": 3}, f"unknown parameter 'wait' of {STORAGE}; did you mean"),
        (
            {"name": "shelf", "quotas": {"a": "much"}},
            f"{QUOTAS} must be sizes by tenant: 'a' must",
        ),
        ({"name": "shelf", "quotas": []}, f"{QUOTAS} must be a mapping with names for keys or"),
        ({"name": "shelf", "quotas": {}}, f"{QUOTAS} must be a mapping of tenants such as"),
        ({"name": "shelf", "limit_s": 0}, f"parameter limit_s of {STORAGE} must be a number of"),
        (
            {"name": "shelf", "quotas": {"\ud800": 1}},
            f"{QUOTAS} must be sizes by tenant: '\\ud800'",
        ),
        ({"name": "shelf", "wait_s": -1}, f"parameter wait_s of {STORAGE} must be a number of"),
        ({"name": "shelves"}, "unknown storage 'shelves': installed of kind storage: shelf"),
        (
            {"name": "shelf", "params": {"board": 1}},
            "unknown parameter 'board' of topkv-doubles 1 (storage 'shelf')",
        ),
    ],
    ids=str,
)
def test_a_setting_that_is_wrong_is_refused(storage, reason):
    with pytest.raises(ConfigError) as refused:
        make_kept(tier("cpu"), {"storage": storage})
    (reported,) = refused.value.reasons
    assert reported.startswith(reason)


def test_all_that_is_wrong_is_refused_together_and_before_anything_is_allocated(monkeypatch):
    monkeypatch.setattr("topkv.assembly.assembly.SparseKVCacheManager", None)
    storage = {"name": "shelves", "write": "behind", "quotas": {"a": 0}}
    params = {"keep": "some", "storage": storage, "quotas": {}}
    with pytest.raises(ConfigError) as refused:
        make_kept(tier("cpu"), params, budget=3, observers=["nobody"])
    reported = " ".join(refused.value.reasons)
    for wrong in (
        f"keep of {KEEPER}",
        f"write of {STORAGE}",
        f"{QUOTAS} must be sizes",
        f"quotas of {KEEPER} must be a mapping",
        "unknown storage 'shelves'",
        "unknown observer 'nobody'",
        "budget",
    ):
        assert wrong in reported


@frozen
class Locked(ShelfParams):
    """Parameters.

    Attributes:
        password: of the shelf.
    """

    password: str = field(default="", repr=False)


def test_passwords_of_storages_are_shown_to_nobody():
    registry = doubles(evolve(SHELF, name="locked", parameters=Locked))
    storage = {"name": "locked", "params": {"password": "swordfish"}, "write": "write_back"}
    coordinator = make_kept(tier("cpu"), {"storage": storage}, registry=registry)
    config = coordinator.config
    assert config.pages.params.storage.params.password == "swordfish"
    shown = "prefixes(keep='all', storage=locked(shelf='default') write='write_back', quotas=None)"
    assert shown in config.describe()
    assert "swordfish" not in f"{config.describe()} {config}"
    coordinator.close()


@pytest.mark.parametrize(
    "storage",
    [
        [{"password": "swordfish"}],
        {"name": "shelf", "params": [{"password": "swordfish"}]},
        {"name": "shelf", "params": {"password": "swordfish"}},
    ],
    ids=str,
)
def test_no_password_is_in_a_refusal(storage):
    with pytest.raises(ConfigError) as refused:
        make_kept(tier("cpu"), {"storage": storage})
    assert "swordfish" not in str(refused.value)


def test_settings_that_are_not_lowered_yet_show_no_values():
    """Which of them are secrets is for the plugin to say."""
    (observer,) = CHECKS["observers"]([{"name": "log", "params": {"password": "swordfish"}}])
    assert repr(observer) == "log(password=...)"
