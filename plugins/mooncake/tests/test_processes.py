"""Prompts that one process stores and another one finds, and stores that fail them meanwhile."""

from __future__ import annotations

import json
import random
import signal
import subprocess
import sys
import time
import warnings

import pytest
import torch
from mooncake_pages import PROGRAM, coordinator, live, made, plain, read

from tests.machines import ENVIRONMENT

pytestmark = pytest.mark.slow


def start(what, params):
    command = [sys.executable, PROGRAM, what, json.dumps(params)]
    return subprocess.Popen(command, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True)


def lived(params):
    """Run a life in a process, and return the found, fetched and stored counts and the outputs."""
    process = start("live", params)
    reported, _ = process.communicate(timeout=300)
    assert process.returncode == 0
    found, fetched, stored, outputs = json.loads(reported.splitlines()[-1])
    return found, fetched, stored, torch.tensor(outputs)


def equal(ours, expected):
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)


@pytest.mark.nightly
def test_another_process_decodes_from_what_the_first_has_stored(shared):
    params = {**shared.params, "namespace": "processes"}
    expected = plain()
    found, fetched, stored, outputs = lived(params)
    assert (found, fetched, stored) == (0, 0, 7)
    equal(outputs, expected)
    found, fetched, stored, outputs = lived(params)
    assert (found, fetched, stored) == (28, 28, 0)
    equal(outputs, expected)
    here = coordinator(params, fetch="wait_complete")
    found, outputs = live(here)
    assert found == 28
    equal(outputs, expected)
    here.close()


@pytest.mark.nightly
def test_writers_that_are_killed_leave_whole_pages_or_none(shared):
    params = {**shared.params, "namespace": "killed"}
    storage, draw, whole = made(params), random.Random(1), 0
    for _ in range(6):
        writer = start("write", params)
        try:
            assert writer.stdout.readline() == "begun\n"
            time.sleep(draw.random() * 0.1)
        finally:
            writer.kill()
            writer.wait()
            writer.stdout.close()
        for number in range(8):
            problem = read(storage, number)
            assert problem in (None, "absent"), problem
            whole += problem is None
    assert whole >= 6 * 4, "what nobody deletes is gone"
    storage.close()


def stored(cluster):
    """Store a prompt by a coordinator that then closes, and return its outputs."""
    first = coordinator(cluster.params)
    found, outputs = live(first)
    first.close()
    assert found == 0
    assert first.keeper.counts.storage.stored == 7
    return outputs


def test_a_prompt_whose_holder_is_gone_is_computed(make_cluster):
    cluster = make_cluster()
    holder = cluster.hold()
    expected = stored(cluster)
    second = coordinator(cluster.params, fetch="wait_complete")
    cluster.kill(holder)
    found, outputs = live(second)
    assert found == 0
    equal(outputs, expected)
    second.keeper.storage.wait()
    assert second.keeper.counts.storage.failed > 0
    assert "-800 (the transfer failed" in second.keeper.storage.reason
    second.close()


def test_a_prompt_whose_master_is_gone_is_computed(make_cluster):
    cluster = make_cluster()
    cluster.hold()
    expected = stored(cluster)
    second = coordinator(cluster.params, fetch="wait_complete")
    cluster.kill(cluster.master)
    found, outputs = live(second)
    assert found == 0
    equal(outputs, expected)
    second.close()
    assert "-900 (the master does not answer)" in second.keeper.storage.reason


def test_a_prompt_waits_for_a_silent_holder_as_long_as_its_policy_says(make_cluster):
    """Pages that the call may still write are given to nobody."""
    cluster = make_cluster()
    holder = cluster.hold()
    expected = stored(cluster)
    wait = {"wait_s": 0.5, "wait_s_per_1k": 0, "limit_s": 1}
    second = coordinator(cluster.params, **wait)
    holder.send_signal(signal.SIGSTOP)
    found, outputs = live(second)
    assert found == 0
    equal(outputs, expected)
    counts = second.keeper.counts.storage
    assert (counts.late, counts.fetched) == (1, 0)
    with warnings.catch_warnings(record=True) as reported:
        warnings.simplefilter("always")
        second.close()
    assert any("calls hang and are left behind" in str(each.message) for each in reported)
    holder.send_signal(signal.SIGCONT)


@pytest.mark.parametrize("write", ["write_through", "write_back"])
def test_writes_of_either_kind_arrive(shared, write):
    params = {**shared.params, "namespace": f"{write}"}
    first = coordinator(params, write=write)
    _, expected = live(first)
    first.close()
    second = coordinator(params, fetch="wait_complete")
    found, outputs = live(second)
    assert found == 28
    equal(outputs, expected)
    second.close()
