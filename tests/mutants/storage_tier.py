"""Mutants of what stands between the host pool and a storage."""

from __future__ import annotations

import hashlib

from tests.mutants.lifecycle import LifecycleMutant, nothing
from topkv import prefixes
from topkv.kv.prefix import PrefixPages
from topkv.storage import fetching, sessions
from topkv.storage.opened import OpenedStorage
from topkv.storage.places import PagePlaces
from topkv.storage.tier import StorageTier
from topkv.testing.machines.handed_over import (
    run_cut_short,
    run_handed_over,
)
from topkv.testing.machines.handed_over import (
    run_damaged as run_damaged_session,
)
from topkv.testing.machines.storage import run_evicted, run_overtaken, run_reloaded
from topkv.testing.tiers import Tier

_withdraw, _ask = PrefixPages.withdraw, OpenedStorage.ask


def run_damaged(on: Tier) -> None:
    """What is stored is damaged."""
    run_reloaded(on, damage=True)


def unchecked(header, body, key, fingerprint):
    """Whatever comes is the page."""


def poisoned_first(self, pages, keys):
    """Pages are poisoned before they are copied."""
    self.requests.manager.poison(pages)
    if self.storage:
        self.storage.evicted(pages, keys)


def all_unwritten(self, pages, written):
    """Nobody asks whether a page was written."""
    return [True] * len(pages)


def withdrawn_in_silence(self, pages):
    """A page that is written counts as the same."""
    written = self.written.copy()
    _withdraw(self, pages)
    self.written[:] = written


def key_of_number(self, number):
    """Objects of a session have the keys of those of any other."""
    return hashlib.sha256(number.to_bytes(8, "big")).digest()


def asked_for_all_but_deletes(self, head, hook, *arguments):
    """Nothing is removed."""
    return None if hook == "delete" else _ask(self, head, hook, *arguments)


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
        *(sessions, "problem_of", unchecked, run_damaged_session),
    ),
    LifecycleMutant(
        "the objects of a session are those of another one",
        *(sessions._Asking, "key", key_of_number, run_handed_over),
    ),
    LifecycleMutant(
        "what was stored of a session that was cut short stays",
        *(OpenedStorage, "ask", asked_for_all_but_deletes, run_cut_short),
    ),
]
