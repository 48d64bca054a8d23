"""A real store for these tests, or the reason why there is none."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parent))

from mooncake_cluster import Cluster, missing

REASON = missing()


@pytest.fixture
def make_cluster(tmp_path):
    """Makes stores, and ends them."""
    if REASON:
        pytest.skip(REASON)
    made = []

    def make(*flags):
        folder = tmp_path / f"store-{len(made)}"
        folder.mkdir()
        made.append(Cluster(folder, *flags))
        return made[-1]

    yield make
    for cluster in made:
        cluster.close()


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """A store with one holder, for tests that leave it alone."""
    if REASON:
        pytest.skip(REASON)
    cluster = Cluster(tmp_path_factory.mktemp("store"))
    try:
        cluster.hold("128 MB")
        yield cluster
    finally:
        cluster.close()
