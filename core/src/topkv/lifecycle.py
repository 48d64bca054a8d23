"""The calls that an engine makes per request: begin, end, reserve, rollback, truncate, fork."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from attrs import frozen

from topkv.config import LoweredConfig
from topkv.errors import HostMemoryError, RequestError
from topkv.kv.manager import SparseKVCacheManager
from topkv.prefill import Prefill
from topkv.requests import RequestTracker


@frozen
class Admission:
    """Answer of ``can_admit``: truthy when there is room, else with the reasons."""

    reasons: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return not self.reasons


class RequestCalls:
    """The part of ``SparseCoordinator`` that handles requests between forwards."""

    config: LoweredConfig
    manager: SparseKVCacheManager
    tracker: RequestTracker
    prefill: Prefill
    transfers: list[Any]
    _forward_open: bool
    _generated: int
    _ending: list[int]

    def request_begin(self) -> int:
        """Take a request slot. Raises DeviceMemoryError if none is free."""
        return self.tracker.begin()

    def request_end(self, slot: int) -> None:
        """Give back everything that the request holds; also for abort.

        During a forward it takes effect at ``forward_end``: later layers still write that row.
        """
        self.tracker.check(slot)
        if self._forward_open:
            if slot not in self._ending:
                self._ending.append(slot)
            return
        # The slot stays taken until all is forgotten: an end that was cut short is called again.
        self.manager.forget_slot(slot)
        for transfer in self.transfers:
            transfer.reset(slot)
        self.manager.poison(self.tracker.pages[slot])
        self.manager.host.release(self.tracker.end(slot))

    def can_admit(self, tokens: int, requests: int = 1) -> Admission:
        """Whether ``requests`` new requests of ``tokens`` tokens each would find room.

        Buffers, rings, maps, representations and resident pages are allocated for
        ``max_requests`` and ``max_tokens`` when the coordinator is made, so what can run out
        are slots and pages.
        """
        reasons = []
        if requests > self.tracker.free:
            reasons.append(f"{requests} request slots are needed and {self.tracker.free} are free")
        if tokens > self.config.max_request_tokens:
            reasons.append(
                f"{tokens} tokens exceed max_request_tokens = {self.config.max_request_tokens}"
            )
        pages = requests * -(-tokens // self.config.page_tokens)
        if pages > self.manager.host.free:
            reasons.append(f"{pages} host pages are needed and {self.manager.host.free} are free")
        return Admission(tuple(reasons))

    def reserve(self, slot: int, tokens: int) -> None:
        """Lease the pages for ``tokens`` further tokens now.

        Raises:
            HostMemoryError: they are not to be had; the request is as it was.
            RequestError: the algorithm has no room for so many tokens after the prompt.
        """
        self._between_forwards("reserve")
        self.tracker.check(slot)
        if not self.tracker.fresh[slot]:  # else they may all be prompt
            self._check_generated(np.asarray([slot]), tokens)
        self.manager.lease([(slot, int(self.tracker.length[slot]) + tokens)])

    def rollback(self, slot: int, length: int) -> None:
        """Take back the newest tokens, as far as the ring reaches: a change of length.

        The pages stay with the request.

        Raises:
            RequestError: the tail unit of the new length has left the ring; use ``truncate``.
        """
        self._between_forwards("rollback")
        self._check_length(slot, length)
        for store in self.manager.stores:
            group = store.group
            low = (int(self.tracker.high[slot]) - 1) // group.unit - group.ring_slots + 1
            if group.residency == "sparse" and low > 0 and (length - 1) // group.unit < low:
                raise RequestError(
                    f"rollback to {length} tokens reaches behind the ring, which starts at token "
                    f"{low * group.unit}; truncate can go there"
                )
        self.tracker.cut(slot, length)
        self.tracker.dirty[slot] = True

    def truncate(self, slot: int, length: int) -> None:
        """Cut a request to ``length`` tokens and forget every device copy. Cold."""
        self._between_forwards("truncate")
        self._check_length(slot, length)
        self.flush(slot)
        self.tracker.cut(slot, length)
        self.manager.shrink(slot, length)
        self._restore(slot)

    def fork(self, slot: int) -> int:
        """A new request with the same tokens. Cold.

        Full pages are shared, the open page is copied with its representations, and state
        that is keyed by slot is copied.

        Raises:
            DeviceMemoryError, HostMemoryError: no room; nothing has changed.
        """
        self._between_forwards("fork")
        self.tracker.check(slot)
        length = int(self.tracker.length[slot])
        partial = length % self.config.page_tokens != 0
        if partial and not self.manager.host.free:
            raise HostMemoryError(
                "fork needs one free host page for the open page and none is free; end requests "
                "or raise max_tokens"
            )
        twin = self.tracker.begin()
        try:
            self._copy(slot, twin, length)
        except BaseException:
            self.request_end(twin)
            raise
        return twin

    def _copy(self, slot: int, twin: int, length: int) -> None:
        """Give a fork the pages of its request and what is keyed by its slot."""
        self.flush(slot)
        pages = self.tracker.pages[slot][: -(-length // self.config.page_tokens)]
        self.manager.host.share(pages)
        self.tracker.pages[twin] = list(pages)
        self.tracker.copy(slot, twin)
        self.manager.uploader.write_page_row(twin, 0, pages)
        if length % self.config.page_tokens:
            self.manager.own_page(twin, len(pages) - 1)
        for pools in self.manager.representations:
            pools.copy_slot(slot, twin)
        self.prefill.copy(slot, twin)
        self._restore(twin)

    def flush(self, slot: int) -> None:
        """Move the open unit to the host, so that all tokens are there. Cold."""
        self.tracker.check(slot)
        if self.tracker.dirty[slot]:
            self.manager.uploader.upload_pages()
            self._synchronize()
            tracker = self.tracker
            state = (int(tracker.high[slot]), bool(tracker.resident[slot]))
            for transfer in self.transfers:
                transfer.flush(slot, int(tracker.length[slot]), *state)
            self.tracker.dirty[slot] = False

    def length(self, slot: int) -> int:
        """Tokens of a request."""
        self.tracker.check(slot)
        return int(self.tracker.length[slot])

    def _restore(self, slot: int) -> None:
        """Fill ring and, where the request fits, buffer from the host, which has all tokens."""
        tracker = self.tracker
        tracker.high[slot] = tracker.length[slot]
        tracker.resident[slot] = self.config.resident_fast_path
        self.manager.uploader.upload_pages()
        self._synchronize()
        for transfer in self.transfers:
            transfer.restore(slot, int(tracker.length[slot]), self.config.resident_fast_path)

    def _check_length(self, slot: int, length: int) -> None:
        self.tracker.check(slot)
        if not 0 <= length <= self.tracker.length[slot]:
            raise RequestError(
                f"length must be between 0 and {self.tracker.length[slot]}, got {length}"
            )

    def _check_generated(self, slots: np.ndarray, tokens: int) -> None:
        """Refuse tokens that an algorithm which chooses once could not attend."""
        tracker = self.tracker
        prompt = np.where(tracker.fresh[slots], tracker.length[slots], tracker.prompt[slots])
        over = slots[tracker.length[slots] - prompt + tokens > self._generated]
        if len(over):
            raise RequestError(
                f"slots {over.tolist()} would have more than {self._generated} tokens after their "
                "prompt, and the algorithm has room for no more; raise its parameter 'generated', "
                "or let it drop the oldest of them"
            )

    def _between_forwards(self, call: str) -> None:
        if self._forward_open:
            raise RequestError(f"{call} during a forward; call forward_end first")

    def _synchronize(self) -> None:
        if self.config.device.type == "cuda":
            torch.cuda.synchronize(self.config.device)
