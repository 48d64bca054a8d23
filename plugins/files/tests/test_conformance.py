"""The storage against the conformance kit."""

from __future__ import annotations

import itertools

import pytest

from topkv_testing.storages import StorageOptions, StorageTests


class TestFiles(StorageTests):
    @pytest.fixture
    def plugin(self):
        return "files"

    @pytest.fixture(params=[True, False], ids=["sync", "no sync"])
    def options(self, request, tmp_path):
        numbers = itertools.count()

        def params():
            return {"path": tmp_path / str(next(numbers)), "sync": request.param}

        return StorageOptions(params, reopens=True)


class TestLimited(StorageTests):
    """The storage has a limit that nothing reaches."""

    @pytest.fixture
    def plugin(self):
        return "files"

    @pytest.fixture
    def options(self, tmp_path):
        numbers = itertools.count()
        return StorageOptions(
            lambda: {"path": str(tmp_path / str(next(numbers))), "limit": "1GiB", "sync": False},
            reopens=True,
        )
