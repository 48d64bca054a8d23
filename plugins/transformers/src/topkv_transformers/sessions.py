"""Caches that go on in another process without reading their prompt, through a storage
(``topkv_prefixes.stored``)."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np

from topkv import SparseCoordinator
from topkv.errors import CapabilityError, ConfigError, RequestError
from topkv.messages import shown
from topkv_prefixes import suspended
from topkv_prefixes.stored import StoredSession
from topkv_transformers.cache import TopkvCache
from topkv_transformers.requests import CacheRequests


def _checked(where: object) -> StoredSession:
    if isinstance(where, StoredSession):
        return where
    reason = (
        f"it must be a session of StoredSessions, got {shown(where)}; for a folder open "
        "StoredSessions('files', {'path': ...}), and name one of its sessions"
    )
    raise ConfigError("there is no such session", [reason])


def suspend(cache: TopkvCache, where: StoredSession) -> None:
    """Write a cache, and close it.

    Args:
        where: a session of a storage, of which there must be none.

    Raises:
        RequestError: the cache is empty.
        CapabilityError: the model has layers that topkv leaves alone, or has changed since it
            filled the cache, or nobody could see that it changes.
        ConfigError: ``where`` is no session of a storage.
        StorageError: the storage fails, is full, or has a session of this name; the cache is as it
            was.
    """
    place, state = _checked(where), cache.state
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
        place.write(document, _rows(cache.requests.coordinator, state.slots))
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


def resume(requests: CacheRequests, where: StoredSession) -> TopkvCache:
    """A cache of what ``suspend`` wrote, which stays there.

    Raises:
        CapabilityError: it is of another model or configuration; with every reason that was found.
        ConfigError: ``where`` is no session of a storage.
        StorageError: the storage fails, or what it has is damaged or not there.
        DeviceMemoryError, HostMemoryError: no room. Nothing has changed.
    """
    place = _checked(where)
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
