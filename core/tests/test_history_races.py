"""History that is fetched ahead on a GPU where one side is late, or does not wait."""

from __future__ import annotations

import contextlib
import re
import subprocess
import sys
from functools import partial

import pytest
import torch
from history_driver import Driver, prompts

from topkv.decode.streams import SideStream
from topkv_testing.machines.delays import CLOCK_HZ, delayed_copies, fetched_in_time
from topkv_testing.machines.lifecycle_model import DIM, KV_HEADS, make_coordinator
from topkv_testing.tiers import tier

pytestmark = pytest.mark.gpu


@contextlib.contextmanager
def late_attention(coordinator, seconds):
    """Delay attention on the device."""
    kept = [(path, path.backend) for path in coordinator.layers]

    class Slow:
        def __init__(self, backend):
            self._backend = backend

        def __getattr__(self, name):
            return getattr(self._backend, name)

        def prefill(self, *args):
            torch.cuda._sleep(int(seconds * CLOCK_HZ))
            self._backend.prefill(*args)

    for path, backend in kept:
        path.backend = Slow(backend)
    try:
        yield
    finally:
        for path, backend in kept:
            path.backend = backend


@contextlib.contextmanager
def adversary(name, coordinator):
    """Slow down copies or attention."""
    if name == "copies":
        with delayed_copies(0.02) as delays:
            yield
        assert delays.count
    else:
        with late_attention(coordinator, 0.02):
            yield


def raced(slowed, broken=contextlib.nullcontext, buffer=None):
    """Compare ``prompts`` with history in time, ahead, and ahead with one side slowed down."""
    found = []
    for run in ("in time", "ahead", slowed):  # compiled and allocated before one side is slowed
        coordinator = make_coordinator(tier("gpu"), prefill_buffer_tokens=buffer)
        driver = Driver(fetched_in_time(coordinator) if run == "in time" else coordinator)
        try:
            with contextlib.ExitStack() as stack:
                if run == slowed:
                    stack.enter_context(broken())
                    stack.enter_context(adversary(slowed, coordinator))
                prompts(driver)
                torch.cuda.synchronize()
        finally:
            coordinator.forward_abort()
            driver.close()
        found.append(driver.outputs[0])
    true, *others = found
    for other in others:
        assert all(map(torch.equal, true, other)), "outputs differ"


ADVERSARIES = pytest.mark.parametrize("adversary_name", ["copies", "attention"])


@ADVERSARIES
@pytest.mark.parametrize("buffer", [0, 16, 48])
def test_either_side_may_be_late(buffer, adversary_name):
    raced(adversary_name, buffer=buffer)


@contextlib.contextmanager
def broken(adversary_name):
    """Leave out the wait of one side for the other."""
    with pytest.MonkeyPatch.context() as patch:
        if adversary_name == "copies":
            join = SideStream.join
            patch.setattr(SideStream, "join", lambda self, mark=None: mark or join(self))
        else:

            @contextlib.contextmanager
            def behind(self, *tensors):
                with torch.cuda.stream(self._stream):
                    yield

            patch.setattr(SideStream, "behind", behind)
        yield


@ADVERSARIES
def test_a_missing_event_shows(adversary_name):
    """Outputs differ, or an index that is read too early is none, which ends the process."""
    ran = [sys.executable, __file__, adversary_name]
    done = subprocess.run(ran, capture_output=True, text=True, timeout=300)
    assert done.returncode != 0
    assert re.search("outputs differ|device-side assert", done.stderr), done.stderr


def test_the_host_waits_for_nothing():
    coordinator = make_coordinator(tier("gpu"))
    driver = Driver(coordinator)
    driver.begin()
    driver.forward(chunks=[(0, 19)])
    driver.forward(chunks=[(0, 5)])  # compiles what fetches
    coordinator.forward_begin(prefill=[(0, 5)])
    ahead, forward = coordinator.prefill.ahead, coordinator.forward
    new = torch.ones(2, 5, KV_HEADS, DIM, device="cuda")
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        ahead.begin(forward.chunks)
        found = [
            len(k) for path in coordinator.layers for _, k, _ in ahead.blocks(path, 0, 24, *new)
        ]
        coordinator.prefill.join()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert found == [8, 8, 8 + 5] * len(coordinator.layers)
    coordinator.forward_abort()
    driver.close()


if __name__ == "__main__":
    raced(sys.argv[1], partial(broken, sys.argv[1]))
