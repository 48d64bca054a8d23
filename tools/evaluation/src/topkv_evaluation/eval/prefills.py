"""Contexts that are read once for all cells of a task.

While a context is prefilled, all layers attend to all of it, and so their queries, keys and values
are those of every cell. The first cell keeps them; the others store and represent the same chunks,
which takes no forward of the model.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from topkv.decode.layers import Chunk, LayerPath
from topkv.prompts.prefill import Represent
from topkv.types import Index
from topkv_cli.memory import host_memory
from topkv_evaluation.eval.batches import read_context
from topkv_evaluation.eval.tasks import Task
from topkv_transformers.cache import TopkvCache
from topkv_transformers.session import AttachedModel

SHARE = 4
"""Prefills are kept in at most one part in ``SHARE`` of the free host memory."""


@dataclass(frozen=True)
class Kept:
    """Arguments of ``Prefill.keep`` for a chunk in one layer, on the CPU."""

    q: Tensor
    stored: tuple[Tensor, Tensor]
    lse: Tensor

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in (self.q, *self.stored, self.lse))


@dataclass(frozen=True)
class Read:
    """A context that was read.

    Attributes:
        chunks: layers of each chunk, in order.
        best: the best token behind the context.
    """

    chunks: tuple[tuple[Kept, ...], ...]
    best: int


class Prefills:
    """The contexts of one task at a time.

    Args:
        limit: most bytes that are kept; by default a part of the free host memory.

    Attributes:
        forwards: contexts that the model has read so far.
        replayed: contexts that were stored without it.
    """

    def __init__(self, limit: int | None = None) -> None:
        self.left = host_memory().available // SHARE if limit is None else limit
        self.forwards = self.replayed = 0
        self._contexts: tuple[tuple[int, ...], ...] = ()
        self._read: dict[int, Read] = {}

    def read(
        self, handle: AttachedModel, task: Task, index: int, chunk: int
    ) -> tuple[TopkvCache, int]:
        """Return a cache of one row with a context of a task, and the best token behind it.

        Args:
            handle: the attached model.
            task: task of the context.
            index: number of the context.
            chunk: tokens of a forward.
        """
        if task.contexts is not self._contexts:  # of a task that is done
            self.left += sum(map(_bytes, self._read.values()))
            self._contexts, self._read = task.contexts, {}
        if not shares(handle):
            return self._forward(handle, task.contexts[index], chunk)
        if index in self._read:
            self.replayed += 1
            return replay(handle, self._read[index]), self._read[index].best
        with recording(handle, self.left) as chunks:
            cache, best = self._forward(handle, task.contexts[index], chunk)
        if chunks:
            found = Read(tuple(map(tuple, chunks)), best)
            self._read[index] = found
            self.left -= _bytes(found)
        return cache, best

    def _forward(
        self, handle: AttachedModel, context: tuple[int, ...], chunk: int
    ) -> tuple[TopkvCache, int]:
        self.forwards += 1
        cache, logits = read_context(handle, context, chunk)
        return cache, int(logits.argmax())


def _bytes(read: Read) -> int:
    return sum(kept.nbytes for chunk in read.chunks for kept in chunk)


def shares(handle: AttachedModel) -> bool:
    """Return True if layers get the same of a context in every cell: each layer is served by
    topkv, attends to all of the context, and stores it as the model makes it."""
    coordinator, config = handle.coordinator, handle.config
    selectors = [path.selector for path in coordinator.layers if path.selector]
    return (
        len(coordinator.layers) == len(handle.new_cache().layers)
        and coordinator.model.indexer is None
        and not any(selector.selects_prompts for selector in selectors)
        and (config.kv_format, config.host_format) == ("model", "model")
    )


@contextmanager
def recording(handle: AttachedModel, most: int) -> Iterator[list[list[Kept]]]:
    """Keep the arguments of layers meanwhile, by chunk; nothing if that takes too much.

    Args:
        handle: the attached model, whose prefill is recorded.
        most: most bytes.
    """
    prefill, layers = handle.coordinator.prefill, len(handle.coordinator.layers)
    store, chunks, taken = prefill.store, [], 0

    def recorded(path: LayerPath, chunk: Chunk, k: Tensor, v: Tensor) -> Represent:
        represent = store(path, chunk, k, v)

        def kept(q: Tensor, lse: Tensor, index: Index | None) -> None:
            nonlocal taken
            size = sum(tensor.nbytes for tensor in (q, k, v, lse))
            if taken + size <= most:
                if not chunks or len(chunks[-1]) == layers:
                    chunks.append([])
                chunks[-1].append(Kept(_copied(q), (_copied(k), _copied(v)), _copied(lse)))
            taken += size
            represent(q, lse, index)

        return kept

    prefill.store = recorded  # type: ignore[method-assign]
    try:
        yield chunks
    finally:
        del prefill.store  # the method stands again
        if taken > most:
            chunks.clear()


def _copied(tensor: Tensor) -> Tensor:
    return tensor.detach().to("cpu", copy=True)


def replay(handle: AttachedModel, read: Read) -> TopkvCache:
    """Return a cache of one row whose request holds a context that was read before."""
    coordinator, cache = handle.coordinator, handle.new_cache()
    handle.requests.begin(cache.state, 1)
    (slot,) = cache.slots
    try:
        for layers in read.chunks:
            coordinator.forward_begin(prefill=[(slot, len(layers[0].q))])
            _keep(coordinator, layers)
            coordinator.forward_end()
            cache.state.seen += len(layers[0].q)
    except BaseException:
        coordinator.forward_abort()
        cache.close()
        raise
    cache.state.prompt = cache.state.seen
    return cache


def _keep(coordinator: Any, layers: tuple[Kept, ...]) -> None:
    forward, device = coordinator.forward, coordinator.config.device
    (chunk,) = forward.chunks
    for path, kept in zip(coordinator.layers, layers, strict=True):
        q, k, v, lse = (each.to(device) for each in (kept.q, *kept.stored, kept.lse))
        coordinator.prefill.store(path, chunk, k, v)(q, lse, None)
        forward.called.add(path.view.layer)
        forward.attended.add(path.view.layer)  # by another cell
