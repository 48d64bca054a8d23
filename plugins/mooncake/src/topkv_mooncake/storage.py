"""The storage ``mooncake``: an object is an object of Mooncake Store."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence

import numpy as np
from attrs import field, frozen

from topkv import hookimpl
from topkv.checks import byte_size
from topkv.errors import CapabilityError, ConfigError
from topkv_mooncake.admin import keys_of, sizes_of
from topkv_mooncake.client import (
    ABSENT,
    EXISTS,
    FULL,
    NOT_READY,
    Client,
    Clients,
    MooncakeError,
    meaning,
)
from topkv_mooncake.entry import MooncakeParams
from topkv_mooncake.library import MOONCAKE
from topkv_prefixes.storage import Place, StorageSetup, StorageUsage

MOST_KEYS = 1024
"""Most keys of one call."""

MISFITS, UNKNOWN = (-600, -800), range(-999, -800)
"""Codes of places of another size, and those of masters that do not answer."""

AGAIN_S = (0.001, 0.004, 0.016, 0.064, 0.256)
"""Seconds between the questions for an object that another client is writing."""

logger = logging.getLogger(__name__)


class MooncakeStorage:
    """The contract is ``topkv_prefixes.storage``.

    Parts in the host pool are sent and received in place; the rest goes through registered
    memory of the client.

    Args:
        setup: ``params`` are ``MooncakeParams``.

    Raises:
        ConfigError: no master answers, or it does not take this process.
        CapabilityError: Mooncake is not here, or another one than this is written for.
    """

    def __init__(self, setup: StorageSetup) -> None:
        head, settings = "storage mooncake cannot be opened", setup.params
        library, tried = MOONCAKE.first()
        if library is None:
            raise CapabilityError(head, [MOONCAKE.missing, *tried])
        self._settings: MooncakeParams = settings
        self._pool = setup.memory
        self._buffer = max(byte_size(settings.buffer), setup.object_bytes)
        try:
            self._clients = Clients(library, settings, setup.memory, self._buffer)
        except MooncakeError as error:
            raise ConfigError(head, [str(error)]) from error
        self._config = library.config()
        self._config.replica_num = settings.replicas

    @hookimpl
    def exists(self, keys: Sequence[bytes]) -> int:
        count = 0
        for at in range(0, len(keys), MOST_KEYS):
            names = self._names(keys[at : at + MOST_KEYS])
            with self._clients.use() as client:
                codes = client.call("batch_is_exist", names)
            if bad := [code for code in codes if code < 0]:
                raise _error("exists", bad, len(codes))
            there = [*(code == 1 for code in codes), False].index(False)
            count += there
            if there < len(codes):
                break
        return count

    @hookimpl
    def get(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        return self._in_batches(self._get, keys, places)

    @hookimpl
    def put(self, keys: Sequence[bytes], places: Sequence[Place]) -> Sequence[bool]:
        return self._in_batches(self._put, keys, places)

    @hookimpl
    def delete(self, keys: Sequence[bytes]) -> None:
        for at in range(0, len(keys), MOST_KEYS):
            names = self._names(keys[at : at + MOST_KEYS])
            with self._clients.use() as client:
                codes = client.call("batch_remove", names, force=True)
            if bad := [code for code in codes if code not in (0, ABSENT)]:
                raise _error("delete", bad, len(codes))

    @hookimpl
    def usage(self) -> StorageUsage:
        where, prefix = self._settings.questions, self._settings.namespace + "/"
        keys = [key for key in keys_of(where) if key.startswith(prefix)]
        return StorageUsage(sum(sizes_of(where, keys)), len(keys))

    @hookimpl
    def close(self) -> None:
        self._clients.close()

    def _names(self, keys: Sequence[bytes]) -> list[str]:
        return [f"{self._settings.namespace}/{key.hex()}" for key in keys]

    def _in_batches(
        self,
        do: Callable[[Client, list[str], _Laid], list[bool]],
        keys: Sequence[bytes],
        places: Sequence[Place],
    ) -> list[bool]:
        """Make a call in as many batches as the registered memory needs; return all answers."""
        names, done = self._names(keys), list[bool]()
        for some in self._cut(places):
            with self._clients.use() as client, client.buffer() as buffer:
                laid = _Laid.of(places[some], buffer, self._pool)
                done += do(client, names[some], laid)
        return done

    def _cut(self, places: Sequence[Place]) -> Iterator[slice]:
        """Runs of places whose parts outside of the pool fit the registered memory together."""
        start, size = 0, 0
        for at, place in enumerate(places):
            own = sum(len(part) for part in place if not _within(part, self._pool))
            if at - start == MOST_KEYS or (at > start and size + own > self._buffer):
                yield slice(start, at)
                start, size = at, 0
            size += own
        if start < len(places):
            yield slice(start, len(places))

    # With one client.

    def _get(self, client: Client, names: list[str], laid: _Laid) -> list[bool]:
        codes = self._fetched(client, names, laid)
        for pause in AGAIN_S:
            if NOT_READY not in codes:
                break
            time.sleep(pause)
            codes = self._fetched(client, names, laid)
        wanted = [sum(sizes) for sizes in laid.sizes]
        good = [code == size for code, size in zip(codes, wanted, strict=True)]
        laid.copy_out(good)
        _report("get", _failures(client, names, codes, wanted), good)
        return good

    def _fetched(self, client: Client, names: list[str], laid: _Laid) -> list[int]:
        return client.call("batch_get_into_multi_buffers", names, laid.pointers, laid.sizes)

    def _put(self, client: Client, names: list[str], laid: _Laid) -> list[bool]:
        laid.copy_in()
        codes = client.call(
            "batch_put_from_multi_buffers", names, laid.pointers, laid.sizes, config=self._config
        )
        good = [code in (0, EXISTS) for code in codes]
        _report("put", [code for code in codes if code not in (0, EXISTS, FULL)], good)
        return good


@frozen
class _Laid:
    """Places as Mooncake takes them.

    Attributes:
        pointers, sizes: of the parts of each place, where they are sent from and received.
        staged: of each place, parts outside of the pool, and registered memory for them.
    """

    pointers: list[list[int]] = field(factory=list)
    sizes: list[list[int]] = field(factory=list)
    staged: list[list[tuple[np.ndarray, np.ndarray]]] = field(factory=list)

    @classmethod
    def of(cls, places: Sequence[Place], buffer: np.ndarray, pool: np.ndarray) -> _Laid:
        laid, at = cls(), 0
        for place in places:
            pairs, pointers = [], []
            for part in place:
                sent = part
                if not _within(part, pool):
                    sent = buffer[at : at + len(part)]
                    pairs.append((part, sent))
                    at += len(part)
                pointers.append(sent.ctypes.data)
            laid.pointers.append(pointers)
            laid.sizes.append([len(part) for part in place])
            laid.staged.append(pairs)
        return laid

    def copy_in(self) -> None:
        """Bring what is to be sent into registered memory."""
        for pairs in self.staged:
            for part, sent in pairs:
                sent[:] = part

    def copy_out(self, good: Sequence[bool]) -> None:
        """Bring what was received to its place, of the places that are good."""
        for pairs, right in zip(self.staged, good, strict=True):
            for part, sent in pairs if right else ():
                part[:] = sent


def _within(part: np.ndarray, pool: np.ndarray) -> bool:
    start = part.ctypes.data - pool.ctypes.data
    return start >= 0 and start + part.nbytes <= pool.nbytes


def _failures(
    client: Client, names: Sequence[str], codes: Sequence[int], wanted: Sequence[int]
) -> list[int]:
    """The codes of objects that are there, as far as anybody can know, and did not come."""
    bad: list[int] = []
    for name, code, size in zip(names, codes, wanted, strict=True):
        if code >= 0 or code in (ABSENT, NOT_READY):
            continue
        # A place of another size has these codes, too. Once one has failed, others have.
        if code in MISFITS and not bad and client.size_of(name) not in (size, *UNKNOWN):
            continue
        bad.append(code)
    return bad


def _report(what: str, bad: Sequence[int], good: Sequence[bool]) -> None:
    """Raise if a call has failed altogether; else log what has."""
    if not bad:
        return
    if not any(good):
        raise _error(what, bad, len(good))
    logger.warning("%s", _error(what, bad, len(good)))


def _error(what: str, codes: Sequence[int], count: int) -> MooncakeError:
    reported = ", ".join(meaning(code) for code in dict.fromkeys(codes))
    return MooncakeError(f"{what}: {len(codes)} of {count} objects: {reported}")
