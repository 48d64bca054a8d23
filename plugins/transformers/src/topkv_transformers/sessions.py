"""Caches that go on in another process without reading their prompt: in a folder
(``folders.py``), or in a storage (``topkv_prefixes.stored``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from os import PathLike
from typing import Any, Protocol

import numpy as np
from torch import Tensor

from topkv import SparseCoordinator
from topkv.errors import CapabilityError, RequestError
from topkv_prefixes import suspended
from topkv_prefixes.stored import Rows, StoredSession
from topkv_transformers.cache import TopkvCache
from topkv_transformers.folders import SessionFolder
from topkv_transformers.requests import CacheRequests


class Found(Protocol):
    """A session that a place holds."""

    @property
    def document(self) -> dict[str, Any]: ...

    def request(self, row: int) -> dict[str, Any]: ...

    def blocks(self, row: int) -> Iterable[Mapping[str, Tensor]]: ...


class Place(Protocol):
    """Place in which a session is, or is to be."""

    def write(self, document: Mapping[str, Any], rows: Rows) -> None: ...

    def read(self) -> Found: ...


Where = str | PathLike[str] | StoredSession
"""A folder, or a session of a storage."""


def place_of(where: Where) -> Place:
    return where if isinstance(where, StoredSession) else SessionFolder(where)


def suspend(cache: TopkvCache, where: Where) -> None:
    """Write a cache, and close it.

    Args:
        where: a folder, which is made if it is not there, and whose session is replaced; or a
            session of a storage, of which there must be none.

    Raises:
        RequestError: the cache is empty.
        CapabilityError: the model has layers that topkv leaves alone, or has changed since it
            filled the cache, or nobody could see that it changes.
        ConfigError: there can be no folder of this name.
        OSError: the folder cannot be written; cache and folder are as they were.
        StorageError: the storage fails, is full, or has a session of this name, or the folder has
            a file of the manifest's name that is not of topkv; the cache is as it was.
    """
    state = cache.state
    if not state.slots:
        raise RequestError("the cache is empty: there is nothing to suspend")
    if others := len(list(state.stock)):
        why = f"{others} layers keep states of their own, which no session holds yet"
        raise CapabilityError("this cache cannot be suspended", [why])
    with cache.requests.exclusive():
        if why := _why_of_another(cache):
            raise CapabilityError("this cache cannot be suspended", why)
        document = {
            "weights": cache.requests.watch.digest(),
            "seen": state.seen,
            "prompt": state.prompt,
            "padding": state.padding.tolist(),
        }
        place_of(where).write(document, _rows(cache.requests.coordinator, state.slots))
        cache.close()


def _why_of_another(cache: TopkvCache) -> list[str]:
    """Reasons why the rows of a cache may belong to another state of the model than now."""
    model = cache.requests.watch.look()
    if cache.state.fed is not model:
        return [
            "weights, flags or adapters of the model have changed since the cache was filled; "
            "suspend it before such a change, or read its prompt again behind it"
        ]
    return model.unsure


def _rows(coordinator: SparseCoordinator, slots: Iterable[int]) -> Iterator[Any]:
    for slot in slots:
        numbers, blocks = suspended.suspend(coordinator, slot)
        yield numbers.as_dict(), blocks


def resume(requests: CacheRequests, where: Where) -> TopkvCache:
    """A cache of what ``suspend`` wrote, which stays there.

    Raises:
        CapabilityError: it is of another model or configuration, or, in a folder, damaged or
            not there; with every reason that was found.
        StorageError: the storage fails, or what it has is damaged or not there.
        DeviceMemoryError, HostMemoryError: no room. Nothing has changed.
    """
    place = place_of(where)
    found = place.read()
    model = requests.watch.look()
    why = list(model.unsure)
    if not why and found.document["weights"] != requests.watch.digest():
        why = ["it was suspended with other weights, flags or adapters than those of this model"]
    if why:
        raise CapabilityError(f"the session {place} cannot be resumed", why)
    cache = TopkvCache(requests)

    def row(number: int) -> int:
        state = suspended.Suspended(**found.request(number))
        return suspended.resume(requests.coordinator, state, found.blocks(number))

    requests.begin(cache.state, len(found.document["rows"]), row)
    state = cache.state
    state.feed(model)
    state.seen, state.prompt = found.document["seen"], found.document["prompt"]
    state.padding = np.asarray(found.document["padding"], dtype=np.int64)
    return cache
