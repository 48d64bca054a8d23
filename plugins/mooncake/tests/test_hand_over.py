"""Requests that go on in another process through a real store, and stores that lose them."""

from __future__ import annotations

import json
import signal
import subprocess
import sys

import pytest
import torch
from mooncake_pages import PROGRAM, PROMPT, QUERIES, ROWS, coordinator, go_on, sessions_of

from tests.machines import ENVIRONMENT
from tests.machines.engine_pages import run_forward
from tests.machines.handed_over import leave, take
from topkv.errors import StorageError
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import tier

pytestmark = pytest.mark.slow

COUNT = len(PROMPT)


@pytest.fixture
def begun():
    """A coordinator, and a request that has read a prompt, which ends within a page."""
    here = make_coordinator(tier("cpu"))
    slot = here.request_begin()
    run_forward(here, [slot], [], {slot: ROWS[:COUNT]}, QUERIES[:, :COUNT])
    yield here, slot
    here.close()


@pytest.mark.nightly
def test_another_process_goes_on_to_the_bit(shared, begun):
    here, slot = begun
    params = {**shared.params, "namespace": "handed"}
    with sessions_of(params) as stored:
        leave(here, slot, stored["request"])
    expected = go_on(here, slot)
    command = [sys.executable, PROGRAM, "take", json.dumps(params)]
    done = subprocess.run(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    length, outputs = json.loads(done.stdout.splitlines()[-1])
    assert length == COUNT
    torch.testing.assert_close(torch.tensor(outputs), expected, rtol=0, atol=0)
    with sessions_of(params) as stored, pytest.raises(StorageError, match="it is not there"):
        stored["request"].read()


def test_what_a_store_has_lost_is_reported(make_cluster, begun):
    """A holder is killed; then the master."""
    here, slot = begun
    cluster = make_cluster()
    holder = cluster.hold()
    with sessions_of(cluster.params) as stored:
        leave(here, slot, stored["request"])
        cluster.kill(holder)
        used = here.manager.host.used
        reported = (
            r"the session 'request' in storage 'mooncake' cannot be resumed:\n.*get: Mooncake"
        )
        with pytest.raises(StorageError, match=reported):
            take(here, stored["request"])
        cluster.kill(cluster.master)
        with pytest.raises(StorageError, match=r"cannot be stored:\n.*-900 \(the master does not"):
            leave(here, slot, stored["another"])
        assert here.manager.host.used == used
    expected = go_on(here, slot)  # it is as it was
    assert expected.isfinite().all()


def test_a_silent_holder_is_waited_for_as_long_as_it_may_take(make_cluster, begun):
    here, slot = begun
    cluster = make_cluster()
    holder = cluster.hold()
    stored = sessions_of(cluster.params, limit_s=1)
    leave(here, slot, stored["request"])
    holder.send_signal(signal.SIGSTOP)
    with pytest.raises(StorageError, match=r"get did not end within 1 s; raise limit_s"):
        take(here, stored["request"])
    with pytest.warns(RuntimeWarning, match="a call hangs and is left behind"):
        stored.close()
    holder.send_signal(signal.SIGCONT)


def test_prompts_and_requests_share_a_store(shared, begun):
    """Under one namespace: a coordinator keeps its pages there, and its request goes there."""
    here, slot = begun
    params = {**shared.params, "namespace": "both"}
    paged = coordinator(params)
    own = paged.request_begin()
    run_forward(paged, [own], [], {own: ROWS[:COUNT]}, QUERIES[:, :COUNT])
    paged.keeper.publish(own, PROMPT)
    with sessions_of(params) as stored:
        leave(here, slot, stored["request"])
        torch.testing.assert_close(
            go_on(here, take(here, stored["request"])), go_on(paged, own), rtol=0, atol=0
        )
    paged.close()
    assert paged.keeper.counts.storage.stored == 7
