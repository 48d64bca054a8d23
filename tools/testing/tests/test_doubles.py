"""Doubles on which tests run, each under the suite of its kind."""

from __future__ import annotations

import itertools

import pytest
from attrs import evolve

from topkv.entries import PluginEntry
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests
from topkv_testing.models.indexed import INDEXED
from topkv_testing.models.storage_doubles import SHELF, SHELVES
from topkv_testing.observers import ObserverOptions, ObserverTests
from topkv_testing.storages import StorageOptions, StorageTests


class TestWatcher(ObserverTests):
    """The observer that the suite of engines plugs in."""

    @pytest.fixture
    def plugin(self):
        return PluginEntry("watcher", "observer", "topkv_testing.models.engine_doubles:Watcher")

    @pytest.fixture
    def options(self):
        return ObserverOptions(
            says=lambda watcher: (
                watcher.began,
                [(each.slots, each.prefill_tokens) for each in watcher.ended],
            ),
            oracle=lambda reported: (
                [(each.slots, each.prompt_tokens) for each in reported],
                [(each.slots, each.prompt_tokens) for each in reported if each.ended],
            ),
        )


class TestShelf(StorageTests):
    """The storage on which tests of the core run, under a name of its own."""

    @pytest.fixture
    def plugin(self):
        return evolve(SHELF, name="bookcase")

    @pytest.fixture
    def options(self):
        numbers = itertools.count()
        return StorageOptions(lambda: {"shelf": f"kit {next(numbers)}"}, reopens=True)

    @pytest.fixture(autouse=True)
    def tidy(self):
        yield
        SHELVES.clear()


class TestIndexed(AlgorithmTests):
    @pytest.fixture
    def plugin(self):
        return evolve(INDEXED, capabilities=evolve(INDEXED.capabilities, tiers=("cpu",)))

    @pytest.fixture
    def options(self):
        return AlgorithmOptions(hidden_needles=True, head_needles=True)
