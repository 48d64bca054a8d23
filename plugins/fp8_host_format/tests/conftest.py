"""The tiers that this machine has, for tests beside the conformance kit."""

from __future__ import annotations

from topkv_testing.fixtures import on as on
