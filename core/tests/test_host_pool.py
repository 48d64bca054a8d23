"""The pages of the host tier."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from tests.machines.host_pool import HostKVPoolMachine, HostPoolMachine


@pytest.mark.parametrize("machine", [HostPoolMachine, HostKVPoolMachine])
def test_pages(machine):
    run_state_machine_as_test(
        machine, settings=settings(max_examples=200, stateful_step_count=25, deadline=None)
    )
