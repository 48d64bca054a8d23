"""The conformance suite of storages.

An author sets ``StorageOptions``: how an empty storage is made::

    from topkv_testing.storages import StorageOptions, StorageTests


    class TestMine(StorageTests):
        @pytest.fixture
        def plugin(self):
            return "mine"

        @pytest.fixture
        def options(self, tmp_path):
            numbers = itertools.count()
            return StorageOptions(lambda: {"path": tmp_path / str(next(numbers))}, reopens=True)

Objects are compared with a dict, byte by byte, and so is the memory beside every place.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from threading import Barrier, BrokenBarrierError
from typing import Any

import numpy as np
import pytest
from attrs import frozen
from hypothesis import strategies as st

from topkv_prefixes.calls import answer_of
from topkv_prefixes.objects import HEADER, write_header
from topkv_prefixes.settings import keeps_quotas
from topkv_prefixes.storage import OWNER_BYTES, Place, Storage, StorageSetup
from topkv_testing.kit import Data, KitTests, Subject, drawn

MOST_BYTES = 3 * 4096
"""Bytes of the largest object of the suite."""

BESIDE = 0xA5
"""Byte between and around the parts of a place."""


@frozen
class StorageOptions:
    """Options that an author gives the suite; the fixture ``options`` returns it.

    Attributes:
        params: parameters of a new and empty storage, other ones at each call.
        reopens: a storage that is made with the parameters of another holds the same objects,
            also while the other is open.
    """

    params: Callable[[], Mapping[str, Any]] = dict
    reopens: bool = False


class Memory:
    """Parts of a place with other bytes around them.

    Args:
        cuts: bytes of each part.
        content: what they hold; by default what is beside them.
    """

    def __init__(self, cuts: Sequence[int], content: bytes | None = None) -> None:
        self.room = np.full(sum(cuts) + 7 * (len(cuts) + 1), BESIDE, dtype=np.uint8)
        self.place: list[np.ndarray] = []
        self.outside = np.ones(len(self.room), dtype=bool)
        at = 7
        for cut in cuts:
            self.place.append(self.room[at : at + cut])
            self.outside[at : at + cut] = False
            at += cut + 7
        if content is not None:
            self.room[~self.outside] = np.frombuffer(content, dtype=np.uint8)

    @property
    def content(self) -> bytes:
        """Bytes of the parts, one behind the other."""
        return self.room[~self.outside].tobytes()

    def check(self) -> None:
        """Assert that nothing beside the parts was written."""
        assert (self.room[self.outside] == BESIDE).all(), "memory beside the place was written"


def key_of(number: int) -> bytes:
    """A key of 32 bytes."""
    return number.to_bytes(2, "big") * 16


def content_of(number: int, size: int) -> bytes:
    """Bytes that no other object begins with."""
    return np.random.default_rng(number).bytes(size)


def page_of(key: bytes, number: int, size: int) -> bytes:
    """An object as the core makes it: a header, and bytes that no other object has."""
    header = np.zeros(HEADER, dtype=np.uint8)
    body = np.frombuffer(content_of(number, size - HEADER), dtype=np.uint8)
    write_header(header, key, bytes(32), [body])
    return header.tobytes() + body.tobytes()


cuts = st.lists(st.sampled_from([1, 2, 3, 64, 511, 1000, 4096]), min_size=1, max_size=3)
keys = st.integers(0, 7).map(key_of)


class Bench:
    """A storage beside a dict.

    Args:
        subject: the storage.
        params: parameters of a storage that may hold objects; a new storage by default.
        quotas: bytes by owner; owners without an item have no quota.
    """

    most = MOST_BYTES

    def __init__(
        self,
        subject: Subject,
        params: Mapping[str, Any] | None = None,
        quotas: Mapping[bytes, int] | None = None,
    ) -> None:
        options = subject.options or StorageOptions()
        self.params = options.params() if params is None else params
        memory = np.zeros(self.most, dtype=np.uint8)
        made, quota_of = subject.params(self.params), None
        if quotas is not None:
            quota_of = quotas.get
        self.storage: Storage = subject.make(StorageSetup(made, self.most, memory, quota_of))
        self.objects: dict[bytes, bytes] = {}

    def ask(self, hook: str, *arguments: Any) -> Any:
        """Call a hook; assert that its answer has the form that the core expects."""
        answer = getattr(self.storage, hook)(*arguments)
        try:
            return answer_of(hook, arguments, answer)
        except TypeError as error:
            raise AssertionError(f"{hook}: {error}") from error

    def content(self, key: bytes, number: int, size: int) -> bytes:
        """The bytes that are stored under a key."""
        return content_of(number, size)

    def put(self, keys: Sequence[bytes], sizes: Sequence[Sequence[int]], seed: int) -> None:
        """Store objects, whose memory is then used for something else."""
        memories = [
            Memory(cuts, self.content(key, seed * 100 + number, sum(cuts)))
            for number, (key, cuts) in enumerate(zip(keys, sizes, strict=True))
        ]
        contents = [memory.content for memory in memories]
        done = self.ask("put", keys, [memory.place for memory in memories])
        assert done == [True] * len(keys), f"put answered {done!r} for {len(keys)} keys"
        for key, memory, content in zip(keys, memories, contents, strict=True):
            assert memory.content == content, "put has changed what it was to store"
            memory.room[:] = 0
            self.objects.setdefault(key, content)

    def get(self, keys: Sequence[bytes], sizes: Sequence[Sequence[int]]) -> None:
        """Get objects that are there and others, into places that fit and others."""
        memories = [Memory(cuts) for cuts in sizes]
        places: list[Place] = [memory.place for memory in memories]
        done = self.ask("get", keys, places)
        expected = [
            len(self.objects.get(key, b"")) == sum(cuts)
            for key, cuts in zip(keys, sizes, strict=True)
        ]
        assert done == expected, f"get answered {done}, expected {expected}"
        for key, memory, found in zip(keys, memories, done, strict=True):
            memory.check()
            assert not found or memory.content == self.objects[key], "get gave other bytes"
            memory.room[:] = 0  # the storage must not hold these bytes

    def get_all(self) -> None:
        """Get every object, cut in another way than it was put."""
        halves = [(len(each) // 2, -(-len(each) // 2)) for each in self.objects.values()]
        self.get([*self.objects], [[half for half in pair if half] for pair in halves])

    def exists(self, keys: Sequence[bytes]) -> None:
        present = [key in self.objects for key in [*keys, b""]]
        found = self.ask("exists", keys)
        assert found == present.index(False), f"exists gave {found} for {present[:-1]}"

    def delete(self, keys: Sequence[bytes]) -> None:
        self.storage.delete(keys)
        for key in keys:
            self.objects.pop(key, None)

    def usage(self) -> None:
        used, least = self.ask("usage"), sum(map(len, self.objects.values()))
        assert used.objects == len(self.objects), f"{used}, and {len(self.objects)} were stored"
        assert used.bytes >= least, f"{used}, and {least} bytes were stored"


class Owners(Bench):
    """Objects of ``SIZE`` bytes of several owners, one of whom may have four. They have headers,
    by which a storage can check that an object is its own before it removes it.

    Args:
        subject, params: as of ``Bench``.
    """

    MINE, OTHER, FREE = (bytes([n]) * OWNER_BYTES for n in (1, 2, 3))
    SIZE = HEADER + 1000
    CUTS = (HEADER, 400, 600)
    most = 5 * SIZE

    def __init__(self, subject: Subject, params: Mapping[str, Any] | None = None) -> None:
        super().__init__(subject, params, {self.MINE: 4 * self.SIZE, self.OTHER: 9 * self.SIZE})

    def content(self, key: bytes, number: int, size: int) -> bytes:
        return page_of(key, number, size)

    def key(self, owner: bytes, number: int) -> bytes:
        return owner + number.to_bytes(32 - OWNER_BYTES, "big")

    def fill(self, numbers: Sequence[int]) -> None:
        """Store one after another for the owner with the small quota, and look at what is left."""
        for number in numbers:
            key = self.key(self.MINE, number)
            self.put([key], [self.CUTS], number)
            left = [each for each in self.objects if self.storage.exists([each])]
            assert key in left, "what was just stored is gone, and its quota had room for it"
            own = [each for each in left if each.startswith(self.MINE)]
            assert len(own) <= 4, f"{len(own)} objects are kept, and the quota is that of 4"
            self.objects = {each: self.objects[each] for each in left}
            others = {self.key(owner, n) for owner in (self.OTHER, self.FREE) for n in range(6)}
            assert others <= {*left}, "an object of another owner went"
            self.get_all()


class StorageTests(KitTests):
    """Every test of a storage; the contract is ``topkv_prefixes.storage``. The fixture ``options``
    gives ``StorageOptions``."""

    kind = "storage"

    @pytest.fixture
    def options(self) -> StorageOptions:
        """How an empty storage is made."""
        return StorageOptions()

    @drawn(cpu=40, interpret=1)
    def test_it_holds_what_a_dict_would(self, subject: Subject, data: Data) -> None:
        """Puts, gets, deletes and questions in any order; gets cut into other parts than puts."""
        bench = Bench(subject)
        for number in range(data.draw(st.integers(1, 8), "calls")):
            some = data.draw(st.lists(keys, max_size=4, unique=True), "keys")
            sizes = [data.draw(cuts, "parts") for _ in some]
            match data.draw(st.sampled_from(["put", "put", "get", "delete", "exists"])):
                case "put":
                    bench.put(some, sizes, number)
                case "get":
                    bench.get(some, sizes)
                    bench.get_all()
                case "delete":
                    bench.delete(some)
                case "exists":
                    bench.exists(some)
            bench.usage()
        bench.get_all()
        bench.storage.close()

    def test_the_first_put_stays(self, subject: Subject) -> None:
        """A second put answers that the object is there, and does not replace it."""
        bench = Bench(subject)
        for seed in (1, 2):
            bench.put([key_of(1), key_of(2)], [[100], [70, 30]], seed)
            bench.get_all()
            bench.usage()
        bench.storage.close()

    def test_each_key_of_a_batch_is_answered(self, subject: Subject) -> None:
        """Keys that are absent, or of another length, leave the others alone."""
        bench = Bench(subject)
        bench.put([key_of(n) for n in (0, 2, 4, 6)], [[n + 1] for n in range(4)], 1)
        bench.get([key_of(n) for n in range(8)], [[n // 2 + 1] for n in range(8)])
        for size in (1, 2, 3, 4, 5):
            bench.get([key_of(n) for n in range(8)], [[size]] * 8)
        for hook in ("get", "put"):
            assert bench.ask(hook, [], []) == []
        bench.storage.close()

    def test_what_exists_ends_at_the_first_hole(self, subject: Subject) -> None:
        """Keys before the first missing one are counted; of no keys none exists."""
        bench = Bench(subject)
        bench.put([key_of(n) for n in (0, 1, 3)], [[5]] * 3, 1)
        for order in ([], [0], [0, 1], [0, 1, 2, 3], [2, 0], [3, 1, 0, 2]):
            bench.exists([key_of(n) for n in order])
        bench.storage.close()

    def test_threads_get_their_own_bytes(self, subject: Subject) -> None:
        """Eight at a time, each over keys of its own and one that all of them share."""
        bench, together = Bench(subject), Barrier(8)

        def life(thread: int) -> None:
            try:
                turns(thread)
            except BaseException:
                together.abort()  # nobody waits for this one
                raise

        def turns(thread: int) -> None:
            content, shared = content_of(thread, 9000), content_of(99, 9000)
            for turn in range(4):
                own = 8 * turn + thread + 1
                for number, expected in ((own, content), (0, shared)):
                    memory, read = Memory([4000, 5000], expected), Memory([9000])
                    together.wait(60)
                    assert list(bench.storage.put([key_of(number)], [memory.place])) == [True]
                    assert list(bench.storage.get([key_of(number)], [read.place])) == [True]
                    assert read.content == expected, "a thread got the bytes of another one"
                    read.check()

        with ThreadPoolExecutor(8) as pool:
            lives = [pool.submit(life, thread) for thread in range(8)]
        failures = [life.exception() for life in lives]
        for failure in sorted(filter(None, failures), key=lambda e: type(e) is BrokenBarrierError):
            raise failure
        assert bench.storage.usage().objects == 33
        bench.storage.close()

    def test_another_one_finds_what_was_stored(self, subject: Subject) -> None:
        """While the first storage is open and when it is closed; where the options say so."""
        if subject.options is None or not subject.options.reopens:
            pytest.skip(f"{subject.entry.name} does not say that it can be opened again")
        first = Bench(subject)
        first.put([key_of(1), key_of(2)], [[300], [40]], 1)
        second = Bench(subject, first.params)
        second.objects = first.objects
        second.get_all()
        second.put([key_of(2), key_of(3)], [[40], [50]], 2)
        first.delete([key_of(1)])
        for bench in (first, second):
            bench.get_all()
            bench.usage()
        first.storage.close()
        second.put([key_of(4)], [[60]], 3)
        second.storage.close()
        third = Bench(subject, first.params)
        third.objects = first.objects
        third.exists([key_of(n) for n in (2, 3, 4, 1)])
        third.get_all()
        third.usage()
        third.storage.close()

    def test_an_owner_stays_within_its_quota(self, subject: Subject) -> None:
        """An owner loses its own objects alone, also those that another storage stored for it."""
        if not keeps_quotas(subject.entry):
            pytest.skip(f"{subject.entry.name} does not say that it keeps quotas")
        bench = Owners(subject)
        for owner in (bench.OTHER, bench.FREE):
            bench.put([bench.key(owner, n) for n in range(6)], [bench.CUTS] * 6, owner[0])
        bench.fill(range(9))
        key = bench.key(bench.MINE, 99)
        large = Memory([4 * bench.SIZE + 1], page_of(key, 99, 4 * bench.SIZE + 1))
        assert list(bench.storage.put([key], [large.place])) == [False]
        assert not bench.storage.exists([key])
        bench.get_all()
        if subject.options is not None and subject.options.reopens:
            other = Owners(subject, bench.params)
            for number in range(10, 18):
                one, two = (bench, other) if number % 2 else (other, bench)
                one.objects = two.objects
                one.fill([number])
            other.storage.close()
        bench.storage.close()

    def test_two_that_are_empty_share_nothing(self, subject: Subject) -> None:
        """Storages of other parameters hold other objects."""
        one, two = Bench(subject), Bench(subject)
        one.put([key_of(1)], [[10]], 1)
        two.get([key_of(1)], [[10]])
        two.usage()
        one.storage.close()
        two.storage.close()
