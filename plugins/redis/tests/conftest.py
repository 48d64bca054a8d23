"""A real server for these tests, or the reason why there is none."""

from __future__ import annotations

import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

sys.path.append(str(Path(__file__).parent))

from redis_server import MISSING, Server


@pytest.fixture
def make_server():
    """Makes servers, and ends them."""
    if MISSING:
        pytest.skip(MISSING)
    made = []
    with TemporaryDirectory(prefix="topkv-redis-") as folder:  # short enough for a socket

        def make(*flags, port=0):
            place = Path(folder) / str(len(made))
            place.mkdir()
            made.append(Server(place, *flags, port=port))
            return made[-1]

        yield make
        for server in made:
            server.kill()


@pytest.fixture(scope="module")
def shared():
    """A server for tests that leave it alone."""
    if MISSING:
        pytest.skip(MISSING)
    with TemporaryDirectory(prefix="topkv-redis-") as folder:
        server = Server(folder)
        yield server
        server.kill()
