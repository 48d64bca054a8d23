"""Fixtures for the tests of what plugins share."""

from __future__ import annotations

from topkv_testing.fixtures import on as on
