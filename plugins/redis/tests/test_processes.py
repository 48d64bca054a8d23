"""Prompts and requests that one process leaves in a server and another one goes on with."""

from __future__ import annotations

import json
import subprocess
import sys
import warnings

import pytest
import torch
from redis_pages import (
    PROGRAM,
    PROMPT,
    QUERIES,
    ROWS,
    coordinator,
    go_on,
    live,
    plain,
    sessions_of,
)

from tests.machines import ENVIRONMENT
from tests.machines.engine_pages import run_forward
from tests.machines.handed_over import leave, take
from topkv.errors import StorageError
from topkv_testing.machines.lifecycle_model import make_coordinator
from topkv_testing.tiers import tier

pytestmark = pytest.mark.slow

COUNT = len(PROMPT)


def reported(what, params):
    """Run another process, and return what it prints."""
    command = [sys.executable, PROGRAM, what, json.dumps(params)]
    done = subprocess.run(
        command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True, check=True, timeout=300
    )
    return json.loads(done.stdout.splitlines()[-1])


def equal(ours, expected):
    torch.testing.assert_close(torch.as_tensor(ours), expected, rtol=0, atol=0)


@pytest.mark.nightly
def test_another_process_decodes_from_what_the_first_has_stored(shared):
    params = {**shared.params, "namespace": "processes"}
    expected = plain()
    for found, stored in ((0, 7), (28, 0)):
        *counts, outputs = reported("live", params)
        assert counts == [found, found, stored]
        equal(outputs, expected)


def test_a_request_goes_on_in_another_process(make_server):
    server = make_server()
    here = make_coordinator(tier("cpu"))
    slot = here.request_begin()
    run_forward(here, [slot], [], {slot: ROWS[:COUNT]}, QUERIES[:, :COUNT])
    with sessions_of(server.params) as stored:
        leave(here, slot, stored["request"])
        length, outputs = reported("take", server.params)
        with pytest.raises(StorageError, match="it is not there; process the prompt again"):
            take(here, stored["request"])
        leave(here, slot, stored["request"])
        server.kill()
        with pytest.raises(StorageError, match=r"cannot be resumed:\n.*get: RedisError: get at"):
            take(here, stored["request"])
    assert length == COUNT
    equal(outputs, go_on(here, slot))
    here.close()


@pytest.mark.parametrize("fault", ["kill", "suspend"])
def test_a_prompt_whose_server_fails_is_computed(make_server, fault):
    server = make_server()
    first = coordinator(server.params)
    _, expected = live(first)
    first.close()
    assert first.keeper.counts.storage.stored == 7
    wait = {"wait_s": 0.5, "wait_s_per_1k": 0, "limit_s": 1}
    second = coordinator({**server.params, "timeout_s": 20}, **wait)
    getattr(server, fault)()
    found, outputs = live(second)
    assert found == 0
    equal(outputs, expected)
    counts = second.keeper.counts.storage
    assert counts.fetched == 0
    assert counts.late if fault == "suspend" else counts.failed
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", RuntimeWarning)  # a call that hangs is left behind
        second.close()
