"""Mutants of what stands between the host pool and a storage."""

from __future__ import annotations

from tests.mutants.lifecycle import LifecycleMutant, nothing
from topkv import prefixes
from topkv.kv.prefix import PrefixPages
from topkv.storage import fetching
from topkv.storage.places import PagePlaces
from topkv.storage.tier import StorageTier
from topkv.testing.machines.storage import run_evicted, run_overtaken, run_reloaded
from topkv.testing.tiers import Tier

_withdraw = PrefixPages.withdraw


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
]
