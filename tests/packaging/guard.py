"""A pytest plugin for tests that run in an environment of wheels: topkv must come from there."""

from __future__ import annotations

import sys

import pytest


def pytest_collection_finish(session: pytest.Session) -> None:
    for name, module in list(sys.modules.items()):
        where = getattr(module, "__file__", None)
        if name.startswith("topkv") and where and not where.startswith(sys.prefix):
            pytest.exit(f"{name} must come from {sys.prefix}, got {where}", returncode=3)
