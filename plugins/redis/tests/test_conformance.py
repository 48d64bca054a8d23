"""The storage against the conformance kit, over a real server."""

from __future__ import annotations

import itertools
import socket

import pytest

from topkv_testing.storages import StorageOptions, StorageTests

_numbers = itertools.count()


class TestRedis(StorageTests):
    @pytest.fixture
    def plugin(self):
        return "redis"

    @pytest.fixture
    def options(self, shared):
        def params():
            return {**shared.params, "namespace": f"kit-{next(_numbers)}"}

        return StorageOptions(params, reopens=True)


class TestOverTcp(StorageTests):
    """The server has a password, another database, and objects that expire long after the test."""

    @pytest.fixture
    def plugin(self):
        return "redis"

    @pytest.fixture
    def options(self, make_server):
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        server = make_server("--requirepass", "open sesame", port=port)

        def params():
            further = {"password": "open sesame", "database": 3, "expire_s": 3600}
            return {**server.params, **further, "namespace": f"tcp-{next(_numbers)}"}

        return StorageOptions(params, reopens=True)
