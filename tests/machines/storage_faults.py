"""Storages that answer wrongly, and children of a fork: no caller waits for a thread for ever."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from threading import Thread
from typing import Any

from tests.machines.storage import read, scene
from topkv_testing.tiers import Tier

LONGEST_S = 20
"""Seconds allowed for calls that take milliseconds, on a machine that has other work."""


def in_time(do: Callable[[], object]) -> None:
    """Run something that may hang on a thread of its own, for ``LONGEST_S`` at most."""
    errors: list[BaseException] = []

    def job() -> None:
        try:
            do()
        except BaseException as error:
            errors.append(error)

    thread = Thread(target=job, daemon=True)
    thread.start()
    thread.join(LONGEST_S)
    assert not thread.is_alive(), "it hangs"
    if errors:
        raise errors[0]


def in_a_child(life: Callable[[], object]) -> bool:
    """Return True if a child of a fork ends ``life`` in time."""
    child = get_context("fork").Process(target=life)
    child.start()
    child.join(LONGEST_S)
    child.kill()
    child.join()
    return child.exitcode == 0


def _true(*arguments: Any) -> Any:
    return True


def _exit(*arguments: Any) -> Any:
    raise SystemExit(3)


def run_answered_wrongly(on: Tier) -> None:
    """A storage that gives one answer for all pages, or ends its thread, has failed each time, and
    the coordinator can be closed."""
    for answer, said in ((_true, "put: TypeError: expected true or"), (_exit, "put: SystemExit")):
        with scene(on) as (_, make, rows):
            coordinator = make()
            stored: Any = coordinator.keeper.storage
            stored._storage.put = answer
            try:
                for prompt in (1, 2):
                    read(coordinator, [prompt] * 12, rows[0])
                in_time(stored.wait)
                counts = coordinator.keeper.counts.storage
                assert counts is not None
                assert (counts.failed, counts.stored, counts.dropped) == (2, 0, 6)
                assert said in stored.reason
                in_time(coordinator.close)
            finally:
                stored._writers.close()  # or whoever hangs would for ever


def run_forked(on: Tier) -> None:
    """A child computes its prompts, and closes; the parent goes on."""
    if on.name == "gpu":
        return  # no child of a process that has used a GPU can use it
    with scene(on, fetch="wait_complete") as (_, make, rows):
        coordinator = make()
        _, expected = read(coordinator, [1] * 12, rows[0])
        coordinator.keeper.storage.wait()

        def life() -> None:
            coordinator.keeper.forget(stored=False)
            found, ours = read(coordinator, [1] * 12, rows[0])
            assert found == 0
            assert ours.equal(expected)
            coordinator.close()

        assert in_a_child(life), "the child hangs, or fails"
        coordinator.keeper.forget(stored=False)
        found, _ = read(coordinator, [1] * 12, rows[0])
        assert found == 12
        coordinator.close()
