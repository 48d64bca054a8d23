"""Fixtures that the tests of prefixes and storages share."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))  # storage_driver is beside the tests

from storage_driver import Maker

from tests.machines.kept import make_kept
from topkv_testing.fixtures import on as on
from topkv_testing.models.storage_doubles import SHELVES, Shelf
from topkv_testing.tiers import tier


@pytest.fixture
def make():
    """Coordinators that keep pages, on a CPU: two sparse layers around a resident and a streamed
    one."""
    made = []

    def make(params=(), **options):
        made.append(make_kept(tier("cpu"), params, **options))
        return made[-1]

    yield make
    for coordinator in made:
        coordinator.close()


@pytest.fixture
def shelf():
    """The content of the storage double ``shelf`` under the name ``test``."""
    SHELVES["test"] = shelf = Shelf()
    yield shelf
    SHELVES.clear()


@pytest.fixture
def make_stored(shelf):
    """Coordinators over the shelf; keywords go into the parameter ``storage``."""
    made = Maker()
    yield made
    made.close()
