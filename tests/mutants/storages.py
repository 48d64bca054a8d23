"""Storages with one bug each, and the test of the suite that sees each."""

from __future__ import annotations

import itertools
import time

from attrs import evolve

from tests.mutants.harness import Mutant, name_of
from topkv.plugins.discovery import hookimpl
from topkv_prefixes.storage import StorageUsage
from topkv_testing.models.storage_doubles import SHELF, ShelfParams, ShelfStorage
from topkv_testing.storages import StorageOptions, StorageTests

_numbers = itertools.count()
OPTIONS = StorageOptions(lambda: {"shelf": f"mutants {next(_numbers)}"}, reopens=True)


class KeepsViews(ShelfStorage):
    """Keeps the memory that an object was put from."""

    def _put(self, key, place):
        if len(place) > 1:
            return super()._put(key, place)
        self.shelf.objects.setdefault(key, place[0])
        return True


class LastWins(ShelfStorage):
    """A second put takes the place of the first."""

    def _put(self, key, place):
        self.shelf.objects.pop(key, None)
        return super()._put(key, place)


class AnyLength(ShelfStorage):
    """A longer object fills a shorter place."""

    def _get(self, key, place):
        found, size = self.shelf.objects.get(key, b""), sum(map(len, place))
        if len(found) < size:
            return False
        self.shelf.objects[key] = found[:size]
        done = super()._get(key, place)
        self.shelf.objects[key] = found
        return done


class FirstPartAlone(ShelfStorage):
    """The parts of a place behind the first hold what they held."""

    def _get(self, key, place):
        kept = [part.copy() for part in place[1:]]
        done = super()._get(key, place)
        for part, old in zip(place[1:], kept, strict=True):
            part[:] = old
        return done


class StopsAtAHole(ShelfStorage):
    """Nothing is answered behind the first object that is absent."""

    @hookimpl
    def get(self, keys, places):
        done = super().get(keys, places)
        return done[: done.index(False) + 1] if False in done else done


class AnswersForAll(ShelfStorage):
    """One answer stands for all objects that are put."""

    @hookimpl
    def put(self, keys, places):
        return all(super().put(keys, places))


class SaysWhetherAllAreThere(ShelfStorage):
    """Answers yes or no for what exists."""

    @hookimpl
    def exists(self, keys):
        return super().exists(keys) == len(keys)


class CountsInSilence(ShelfStorage):
    """Usage is nothing."""

    @hookimpl
    def usage(self):
        """Return no usage at all."""


class CountsAll(ShelfStorage):
    """Counts what exists beyond the first hole."""

    @hookimpl
    def exists(self, keys):
        return sum(key in self.shelf.objects for key in keys)


class OneScratch(ShelfStorage):
    """All threads share one buffer."""

    def _get(self, key, place):
        self.scratch = self.shelf.objects.get(key)
        time.sleep(0.002)
        held = dict(self.shelf.objects)
        found = self.scratch
        if found is None or len(found) != sum(map(len, place)):
            return False
        self.shelf.objects[key] = found
        try:
            return super()._get(key, place)
        finally:
            self.shelf.objects[key] = held[key]


class KeepsDeleted(ShelfStorage):
    """Keeps what was deleted."""

    @hookimpl
    def delete(self, keys):
        """Delete nothing."""


class CountsPuts(ShelfStorage):
    """Usage counts what was put twice as two."""

    puts = 0

    def _put(self, key, place):
        self.puts += 1
        return super()._put(key, place)

    @hookimpl
    def usage(self):
        return StorageUsage(super().usage().bytes, self.puts)


class ForgetsAtTheEnd(ShelfStorage):
    """Deletes what was stored when it is closed, although others may have it open."""

    @hookimpl
    def close(self):
        self.shelf.objects.clear()


class OneForAll(ShelfStorage):
    """Storages of other parameters hold the same objects."""

    def __init__(self, setup):
        super().__init__(evolve(setup, params=ShelfParams("mutants")))


class NoQuotas(ShelfStorage):
    """An owner keeps whatever it has stored."""

    def _keep_quota(self, owner):
        """Delete nothing of the owner."""


class AnyoneLoses(ShelfStorage):
    """Room for an owner is made of what was stored first, whoever's it is."""

    def _keep_quota(self, owner):
        quota = self.quota_of(owner) if self.quota_of else None
        own = [each for key, each in self.shelf.objects.items() if key.startswith(owner)]
        if quota is not None and sum(map(len, own)) > quota:
            del self.shelf.objects[next(iter(self.shelf.objects))]


class CountsItsOwn(ShelfStorage):
    """Leaves out what another one has stored for an owner."""

    def __init__(self, setup):
        super().__init__(setup)
        self.old = {*self.shelf.objects}

    def _keep_quota(self, owner):
        held = self.shelf.objects
        self.shelf.objects = {key: one for key, one in held.items() if key not in self.old}
        super()._keep_quota(owner)
        self.shelf.objects = {key: held[key] for key in held
                              if key in self.old or key in self.shelf.objects}  # fmt: skip


def _mutant(broken: type, test: str) -> Mutant:
    clean, entry = (
        evolve(SHELF, name=cls.__name__.lower(), factories=f"{cls.__module__}:{cls.__name__}")
        for cls in (ShelfStorage, broken)
    )
    name = f"test_{test}"
    return Mutant(name_of(broken), StorageTests, name, entry, clean, options=OPTIONS)


MUTANTS = [
    _mutant(KeepsViews, "it_holds_what_a_dict_would"),
    _mutant(LastWins, "the_first_put_stays"),
    _mutant(AnyLength, "each_key_of_a_batch_is_answered"),
    _mutant(FirstPartAlone, "it_holds_what_a_dict_would"),
    _mutant(StopsAtAHole, "each_key_of_a_batch_is_answered"),
    _mutant(AnswersForAll, "each_key_of_a_batch_is_answered"),
    _mutant(SaysWhetherAllAreThere, "what_exists_ends_at_the_first_hole"),
    _mutant(CountsInSilence, "the_first_put_stays"),
    _mutant(CountsAll, "what_exists_ends_at_the_first_hole"),
    _mutant(OneScratch, "threads_get_their_own_bytes"),
    _mutant(KeepsDeleted, "it_holds_what_a_dict_would"),
    _mutant(CountsPuts, "the_first_put_stays"),
    _mutant(ForgetsAtTheEnd, "another_one_finds_what_was_stored"),
    _mutant(NoQuotas, "an_owner_stays_within_its_quota"),
    _mutant(AnyoneLoses, "an_owner_stays_within_its_quota"),
    _mutant(CountsItsOwn, "an_owner_stays_within_its_quota"),
    _mutant(OneForAll, "two_that_are_empty_share_nothing"),
]
