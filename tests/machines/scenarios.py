"""Short lives of requests, driven by hand through the lifecycle machine.

Each is a situation that random histories meet too seldom. ``run_scenario`` runs one; after each
call the invariants of the lifecycle machine are checked.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

from tests.machines.lifecycle import Lives, lifecycle_machine
from topkv.plugins import PluginRegistry
from topkv_testing.machines.delays import delayed_copies
from topkv_testing.machines.lifecycle_model import LAYERS, MOST_TOKENS, Forward
from topkv_testing.tiers import Tier

Scenario = Callable[[Lives], None]


def run_scenario(
    scenario: Scenario,
    on: Tier,
    transfer: str = "zero_copy",
    registry: PluginRegistry | None = None,
    make: Callable[..., type[Any]] = lifecycle_machine,
    **start: Any,
) -> None:
    """Run a scenario on a fresh machine.

    Args:
        on, transfer, registry: as for ``machine_of``.
        make: the machine; ``lifecycle_machine``, ``latent_machine`` or ``machine_of`` of another.
        start: of the machine's ``start``.
    """
    machine = make(on, transfer, registry)()
    machine.start(**start)
    try:
        scenario(machine)
        machine.everything_is_in_place()
        machine.teardown()
    finally:
        machine.coordinator.close()


def _decode(machine: Lives, slot: int, steps: int) -> None:
    for _ in range(steps):
        machine.decode_alone(slot)
        machine.everything_is_in_place()


def a_prompt_fills_up_the_unit_that_decode_began(machine: Lives) -> None:
    machine.prefill_alone(0, 4)
    _decode(machine, 0, 2)
    machine.prefill_alone(0, 6)
    _decode(machine, 0, 6)


def a_long_request_rolls_back_and_goes_on(machine: Lives) -> None:
    """Roll back behind the buffer, where the ring bound decides what is read from where."""
    machine.prefill_alone(0, 30)
    _decode(machine, 0, 5)
    for back in (1, 3, 2):
        machine.roll_back(0, back)
        machine.everything_is_in_place()
        _decode(machine, 0, 4)


def an_abort_at_the_edge_of_a_unit(machine: Lives) -> None:
    """Drop a token that has recycled a ring slot of a request that keeps its length."""
    unit = machine.groups[0].unit
    machine.prefill_alone(0, 6 * unit)
    for stop in (LAYERS, 1):
        machine.decode_alone(0, stop=stop)
        machine.everything_is_in_place()
        machine.roll_back(0, unit)
        machine.everything_is_in_place()
        machine.forward(Forward(rows=[0], append=[False], widest=7))
        _decode(machine, 0, 2 * unit)


def twins_share_pages_and_part(machine: Lives) -> None:
    """Fork inside a page, at the edge of one, and after a rollback into a shared one."""
    machine.prefill_alone(0, 5)
    _decode(machine, 0, 2)
    for back in (0, 1, 2):
        machine.roll_back(0, back)
        twin = machine.fork_request(0)
        machine.everything_is_in_place()
        assert twin is not None
        machine.roll_back(twin, back)
        for alike in (True, False):
            machine.forward(Forward(rows=[0, twin], widest=6, alike=alike))
            machine.everything_is_in_place()
        machine.coordinator.request_end(twin)
        machine.forget(twin)


def drafts_are_appended_and_rejected(machine: Lives) -> None:
    """Verify as many tokens as a row can have, over edges of units and pages, drop a forward, and
    reject all numbers of them, in two requests at once."""
    most = machine.coordinator.config.max_queries
    machine.prefill_alone(0, 3)
    other = machine.begin_request()
    machine.prefill_alone(other, 6)
    for turn in range(most + 2):
        for stop in (1, None):
            append = [most, 1 + turn % most]
            machine.forward(Forward([0, other], append, widest=12, stop=stop, queries=most))
            machine.everything_is_in_place()
        kept = {0: 1 + turn % 3, other: append[1]}
        machine.reject(
            {
                slot: machine.live[slot].length - count + min(count, kept[slot])
                for slot, count in zip((0, other), append, strict=True)
            }
        )
        machine.everything_is_in_place()


def requests_take_turns_in_a_slot(machine: Lives) -> None:
    """Nothing that one request leaves behind shows in the next one."""
    for tokens in (17, 2, 9):
        machine.prefill_alone(0, tokens)
        _decode(machine, 0, 3)
        machine.coordinator.request_end(0)
        machine.forget(0)
        machine.everything_is_in_place()
        assert machine.begin_request() == 0


def the_last_page_goes_to_one_of_two(machine: Lives) -> None:
    """A forward that lacks one of two pages takes neither: one to grow, one to copy."""
    machine.prefill_alone(0, 3 * machine.pages.page_tokens)
    twin = machine.fork_request(0)
    assert twin is not None
    machine.roll_back(twin, 1)
    for _ in range(2):
        machine.reserve_for(machine.begin_request(), MOST_TOKENS)
    assert machine.pages.free == 1
    assert machine.forward(Forward(rows=[0, twin])) is None
    machine.everything_is_in_place()
    machine.decode_alone(twin)


def a_request_ends_while_others_decode(machine: Lives) -> None:
    """End a request after the first layer, in the step that fills its unit."""
    unit = machine.groups[0].unit
    other = machine.begin_request()
    machine.prefill_alone(0, 2 * unit - 1)
    machine.prefill_alone(other, 5)
    for stop in (None, 2):
        machine.forward(Forward(rows=[other, -1, 0], ends={0: 0}, stop=stop))
        machine.everything_is_in_place()
        machine.begin_request()
        machine.prefill_alone(0, unit - 1)


def a_prompt_comes_in_chunks_beside_decode(machine: Lives) -> None:
    """Equal chunks; another request decodes meanwhile, then two, one of which only looks."""
    other = machine.begin_request()
    machine.prefill_alone(other, 9)
    for _ in range(3):
        machine.forward(Forward(rows=[-1, other], chunks=[(0, 6)]))
        machine.everything_is_in_place()
    third, fourth = machine.begin_request(), machine.begin_request()
    chunks = [(third, 5), (fourth, 7)]
    machine.forward(Forward(rows=[0, -1, other], append=[False, False, True], chunks=chunks))
    machine.everything_is_in_place()
    machine.forward(Forward(rows=[fourth, 0, third, other]))


def prompts_go_on_after_cuts(machine: Lives) -> None:
    """Nothing stays in the prompt buffer that was taken back, dropped, or another request's."""
    machine.prefill_alone(0, 9)
    machine.roll_back(0, 2)
    _decode(machine, 0, 3)
    machine.prefill_alone(0, 4)
    machine.prefill_alone(0, 4, stop=LAYERS)
    _decode(machine, 0, 4)
    machine.prefill_alone(0, 3)
    other = machine.begin_request()
    for slot in (other, 0, other):
        machine.prefill_alone(slot, 9)
        machine.everything_is_in_place()


def copies_come_late(machine: Lives) -> None:
    """Prompts and decode on a GPU whose side streams lag; see ``delayed_copies``.

    Each pause lasts longer than all of it has taken without one, so that nothing is copied in time
    by luck where the host is busy and slow.
    """
    _lives(machine)
    started = time.perf_counter()
    _lives(machine)
    taken = time.perf_counter() - started
    with delayed_copies(max(0.1, 2 * taken)) as delays:
        _lives(machine)
    assert delays.count, "nothing was delayed: the engine's copies are on no side stream"


def _lives(machine: Lives) -> None:
    """Run forwards between which nothing waits for the device; the checks come at the end."""
    for tokens in (17, 8):
        machine.prefill_alone(0, tokens)
    for _ in range(6):
        machine.decode_alone(0)
    machine.everything_is_in_place()
    machine.coordinator.request_end(0)
    machine.forget(0)
    machine.begin_request()


SCENARIOS: tuple[Scenario, ...] = (
    a_prompt_fills_up_the_unit_that_decode_began,
    a_long_request_rolls_back_and_goes_on,
    an_abort_at_the_edge_of_a_unit,
    twins_share_pages_and_part,
    requests_take_turns_in_a_slot,
    the_last_page_goes_to_one_of_two,
    a_request_ends_while_others_decode,
    a_prompt_comes_in_chunks_beside_decode,
    prompts_go_on_after_cuts,
)
"""Scenarios that run on every tier."""
