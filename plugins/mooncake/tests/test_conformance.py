"""The storage against the conformance kit, over a real store."""

from __future__ import annotations

import itertools

import pytest

from topkv_testing.storages import StorageOptions, StorageTests

_numbers = itertools.count()


@pytest.mark.slow
class TestMooncake(StorageTests):
    """Objects are in another process."""

    @pytest.fixture
    def plugin(self):
        return "mooncake"

    @pytest.fixture
    def options(self, shared):
        def params():
            return {**shared.params, "namespace": f"kit-{next(_numbers)}"}

        return StorageOptions(params, reopens=True)


@pytest.mark.nightly
class TestOwnMemory(StorageTests):
    """Objects are in this process, as long as the storage is open."""

    @pytest.fixture
    def plugin(self):
        return "mooncake"

    @pytest.fixture
    def options(self, make_cluster):
        cluster = make_cluster()

        def params():
            return {**cluster.params, "namespace": f"own-{next(_numbers)}", "segment": "16MiB"}

        return StorageOptions(params)
