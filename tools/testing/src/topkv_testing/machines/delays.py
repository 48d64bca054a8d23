"""Delay work on side streams, so that a missing wait shows; or do without a side stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from attrs import define
from torch import Tensor

from topkv.coordinator import SparseCoordinator
from topkv.decode.layers import LayerPath
from topkv.decode.loads import Loads
from topkv.prompts.history import Block, StoredHistory

CLOCK_HZ = 2_000_000_000
"""Upper bound of the clock of the multiprocessors of any GPU that this runs on."""


@define
class Delays:
    """How many times something was delayed; a test that delays nothing proves nothing."""

    count: int = 0


@contextmanager
def delayed_copies(seconds: float = 0.1) -> Iterator[Delays]:
    """Put a pause in front of whatever is queued under ``torch.cuda.stream(side_stream)``.

    Every copy on the offload stream then ends long after the call that queued it; who reads its
    target without having waited reads stale bytes. The pause is queued on the side
    stream alone. Run the code once without the delay first: the first run compiles kernels and
    allocates pinned memory, both of which wait for the whole device and hide a missing one.

    Args:
        seconds: least length of each pause.

    Yields:
        The number of pauses so far.
    """
    delays = Delays()
    cycles = int(seconds * CLOCK_HZ)
    context: Any = torch.cuda.StreamContext
    enter = context.__enter__

    def late(self: Any) -> Any:
        result = enter(self)
        stream = self.stream
        if stream is not None and stream != torch.cuda.default_stream(stream.device):
            torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]
            delays.count += 1
        return result

    context.__enter__ = late
    try:
        yield delays
    finally:
        context.__enter__ = enter
        torch.cuda.synchronize()


def fetched_in_time(coordinator: SparseCoordinator) -> SparseCoordinator:
    """Fetch the history of prompts when it is attended, on the stream that attends it.

    Nothing overlaps then, and outputs are the same to the last bit.
    """
    config, ahead = coordinator.config, coordinator.prefill.ahead

    def blocks(path: LayerPath, slot: int, start: int, k: Tensor, v: Tensor) -> Iterator[Block]:
        sizes = (config.prefill_block_tokens, config.model.dtype, config.device)
        own = path.format.unpack(k, v, config.model.dtype)
        if not start:
            yield 0, *own
        for first, *held in StoredHistory(path, slot, 0, start, *sizes):
            last = first + len(held[0]) == start
            k, v = map(torch.cat, zip(held, own, strict=True)) if last else held
            yield first, k, v

    instead: dict[str, Any] = {"begin": lambda chunks: None, "blocks": blocks}
    for name, call in instead.items():
        setattr(ahead, name, call)
    return coordinator


def loaded_in_time(coordinator: SparseCoordinator) -> SparseCoordinator:
    """Load layers that share a selection in their turn, on the stream that attends.

    Nothing overlaps then, and outputs are the same to the last bit.
    """
    for path in coordinator.layers:
        if path.selector:
            path.loads = Loads(path)
    return coordinator
