"""Mutants of the code between the host pool and a storage."""

from __future__ import annotations

import hashlib
import time
from threading import get_ident

from tests.machines.handed_over import (
    run_cut_short,
    run_handed_over,
    run_interrupted,
)
from tests.machines.handed_over import (
    run_damaged as run_damaged_session,
)
from tests.machines.storage import run_evicted, run_overtaken, run_reloaded
from tests.machines.storage_faults import run_answered_wrongly, run_forked
from tests.mutants.lifecycle import LifecycleMutant, nothing
from topkv_prefixes import calls, fetching, prefixes, stored
from topkv_prefixes.calls import Calls
from topkv_prefixes.opened import OpenedStorage
from topkv_prefixes.pages import PrefixPages
from topkv_prefixes.places import PagePlaces
from topkv_prefixes.tier import StorageTier
from topkv_testing.tiers import Tier

_leave = Calls.leave_to_parent
_withdraw, _ask = PrefixPages.withdraw, OpenedStorage.ask


def run_damaged(on: Tier) -> None:
    """Run with damaged objects in the storage."""
    run_reloaded(on, damage=True)


def unchecked(header, body, key, fingerprint):
    """Any bytes are taken for the page."""


def poisoned_first(self, pages, keys):
    """Pages are poisoned before they are copied."""
    self.requests.manager.poison(pages)
    if self.storage:
        self.storage.evicted(pages, keys)


def all_unwritten(self, pages, written):
    """Nobody asks whether a page was written."""
    return [True] * len(pages)


def withdrawn_in_silence(self, pages):
    """A page that is written counts as unwritten."""
    written = self.written.copy()
    _withdraw(self, pages)
    self.written[:] = written


def key_of_number(self, number):
    """Objects of a session have the keys of the objects of any other."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def asked_for_all_but_deletes(self, head, hook, *arguments):
    """Nothing is removed."""
    return None if hook == "delete" else _ask(self, head, hook, *arguments)


def any_answer(hook, arguments, answer):
    """Answers may have any form."""
    return answer


def first_hook_alone(self, hook, *arguments):
    """An exit is no failure of a storage, and ends the thread."""
    with self.changed:
        self._since[get_ident()] = time.monotonic()
    try:
        return getattr(self._storage, hook)(*arguments)
    finally:
        with self.changed:
            self._since.pop(get_ident())


def goes_on(self):
    """A child waits for the threads of its parent."""
    _leave(self)
    self.forked = False


MUTANTS = [
    LifecycleMutant(
        "what a storage gives is believed",
        *(fetching, "problem_of", unchecked, run_damaged),
    ),
    LifecycleMutant(
        "representations and resident layers are not brought back",
        *(PagePlaces, "unstage", nothing, run_reloaded),
    ),
    LifecycleMutant(
        "pages that leave the host are poisoned before they are stored",
        *(prefixes.Prefixes, "_evicted", poisoned_first, run_evicted),
    ),
    LifecycleMutant(
        "a page that is written while it waits is stored as what it was",
        *(StorageTier, "_unwritten", all_unwritten, run_overtaken),
    ),
    LifecycleMutant(
        "a page that is withdrawn counts as unwritten",
        *(PrefixPages, "withdraw", withdrawn_in_silence, run_overtaken),
    ),
    LifecycleMutant(
        "what the objects of a session hold is believed",
        *(stored, "problem_of", unchecked, run_damaged_session),
    ),
    LifecycleMutant(
        "the objects of a session are those of another one",
        *(stored._Asking, "key", key_of_number, run_handed_over),
    ),
    LifecycleMutant(
        "what was stored of a session that was cut short stays",
        *(OpenedStorage, "ask", asked_for_all_but_deletes, run_cut_short),
    ),
    LifecycleMutant(
        "a storage may answer as it likes",
        *(calls, "answer_of", any_answer, run_answered_wrongly),
    ),
    LifecycleMutant(
        "what a storage raises is not counted as its own",
        *(Calls, "__call__", first_hook_alone, run_answered_wrongly),
    ),
    LifecycleMutant(
        "the child of a fork asks the storage of its parent",
        *(Calls, "leave_to_parent", goes_on, run_forked),
    ),
    LifecycleMutant(
        "the head of a session that was interrupted stays",
        *(stored.StoredSession, "_is", nothing, run_interrupted),
    ),
]
