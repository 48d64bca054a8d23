"""Requests: the slot and the pages of each, its length, and what is still to be done for it.

``Requests`` is the one owner of a request. State is arrays over all slots, so that a step handles
all rows at once, and pages are in one table. Engines call ``Requests`` through
``SparseCoordinator``, which refuses most calls while a forward is open.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from topkv.config import LoweredConfig
from topkv.decode.layers import Forward
from topkv.decode.selectors import Own
from topkv.errors import DeviceMemoryError, RequestError, undone_by
from topkv.hooks.transfer import Transfer
from topkv.kv.step import StepUploader
from topkv.memory.manager import SparseKVCacheManager
from topkv.requests.pages import PageTable


class Requests:
    """Host-side state of every request slot. R slots, G groups.

    Args:
        config: sizes.
        manager: the memory of both tiers.
        step: uploads step tensors and pages.
        transfers: transfer engine of each group.
        generated: most tokens that may follow a prompt.
        undo: most tokens that can be taken back.
        shares_prefixes: True if a request can take over the pages of another one's prompt.
        selectors: of all layers that select for themselves.

    Attributes:
        bound: most tokens of a request that decodes, where a stage gives back pages; else None.
        active: bool ``[R]`` the slot holds a request.
        length: int32 ``[R]`` tokens that have been appended.
        high: int32 ``[R]`` the largest length that the ring has seen.
        resident: int32 ``[R]`` 1 where the request may take the fast path, as in ``StepTensors``.
        dirty: bool ``[R]`` the host may lack tokens of the open unit.
        fresh: bool ``[R]`` prompt tokens came since the last ``settle``, or none was called.
        settled: int32 ``[G, R]`` tokens that ``settle`` of a group has seen.
        prompt: int32 ``[R]`` tokens at the last settle that closed a prompt.
        dropped, firm: int32 ``[R]`` tokens that were given back, and the first one behind them.
        buffered: int32 ``[R]`` first tokens that the prompt buffer has, where it is the request's.
        pages: the pages of each request.
    """

    def __init__(
        self,
        config: LoweredConfig,
        manager: SparseKVCacheManager,
        step: StepUploader,
        transfers: Sequence[Transfer],
        generated: int,
        undo: int,
        shares_prefixes: bool,
        selectors: Sequence[Own],
    ) -> None:
        self.config, self.manager, self.step = config, manager, step
        self.transfers, self.selectors = transfers, selectors
        self._following = [selector for selector in selectors if selector.follows]
        self.generated, self.undo = generated, undo
        self.shares_prefixes = shares_prefixes
        self.bound: int | None = None
        slots = config.max_requests
        self.active, self.dirty, self.fresh = np.zeros((3, slots), dtype=bool)
        # One column more than there are slots: slot -1, a padded row, finds zeros there.
        self._uploaded = np.zeros((3, slots + 1), dtype=np.int32)
        self.length, self.high, self.resident = self._uploaded[:, :-1]
        self._counts = np.zeros((4, slots), dtype=np.int32)
        self.prompt, self.dropped, self.firm, self.buffered = self._counts
        self.settled = np.zeros((len(config.groups), slots), dtype=np.int32)
        self.pages = PageTable(config, manager, step)

    @property
    def free(self) -> int:
        """Slots that hold no request."""
        return int((~self.active).sum())

    def begin(self, pages: Sequence[int] = (), length: int = 0) -> int:
        """Take the lowest free slot.

        Args:
            pages: that an engine hands over, see ``add_pages``.
            length: tokens that they hold already, of another request's prompt; whole pages.

        Raises:
            DeviceMemoryError: every slot holds a request.
            RequestError: the pages are not to be had; nothing has changed.
        """
        if self.active.all():
            raise DeviceMemoryError(
                f"all {len(self.active)} request slots are taken; end a request or raise "
                "max_requests"
            )
        slot = int(np.argmin(self.active))
        self.length[slot] = self.high[slot] = 0
        self.settled[:, slot], self._counts[:, slot] = 0, 0
        self.resident[slot] = self.config.resident_fast_path
        self.dirty[slot], self.fresh[slot], self.active[slot] = False, True, True
        with undone_by(self.end, slot):
            self.add_pages(slot, pages)
            if length:
                self.length[slot], self.settled[:, slot] = length, length
                self.restore(slot)
        return slot

    def add_pages(self, slot: int, pages: Sequence[int]) -> None:
        """Give a request further pages, whose ids an engine gives out, in order.

        A page may be held by several requests as long as none writes it. The request lets go of
        its pages when it ends, and of those behind its length when it is truncated.

        Raises:
            RequestError: the ids are not the engine's to give out, or too many; nothing has
                changed.
        """
        self.check(slot)
        if pages:
            self.pages.add(slot, pages)

    def end(self, slot: int) -> None:
        """Give back everything that a request holds.

        The slot stays taken until all is forgotten, so that an end that was cut short can be
        called again.
        """
        self.check(slot)
        self.manager.forget_slot(slot)
        for transfer in self.transfers:
            transfer.reset(slot)
        self.pages.shrink(slot, 0)
        self.active[slot] = False
        self.length[slot] = self.high[slot] = 0

    def check(self, slot: int) -> None:
        """Refuse a slot that holds no request."""
        if not 0 <= slot < len(self.active) or not self.active[slot]:
            raise RequestError(
                f"slot {slot} holds no request; active slots are "
                f"{np.flatnonzero(self.active).tolist()}"
            )

    def rollback(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Take back the newest tokens of requests, as far as their rings reach; all or none.

        Lengths change and nothing else: the pages stay with the requests.

        Args:
            slots, lengths: int64 ``[n]``, of which a request stands in ``slots`` once.

        Raises:
            RequestError: the tail unit of a new length has left the ring; use ``truncate``.
        """
        self._check_lengths(slots, lengths)
        for group in self.manager.groups:
            low = (self.high[slots] - 1) // group.unit - group.ring_slots + 1
            gone = (low > 0) & ((lengths - 1) // group.unit < low)
            if group.residency == "sparse" and gone.any():
                at = int(gone.argmax())
                raise RequestError(
                    f"rollback of slot {slots[at]} to {lengths[at]} tokens reaches behind the "
                    f"ring, which starts at token {low[at] * group.unit}; truncate can go there"
                )
        self._cut(slots, lengths)
        self.dirty[slots] = True

    def truncate(self, slot: int, length: int) -> None:
        """Cut a request to ``length`` tokens and forget every device copy. Cold."""
        one = np.array([slot]), np.array([length])
        self._check_lengths(*one)
        self.flush(slot)
        self._cut(*one)
        self.pages.shrink(slot, self.pages.needed(length))
        self.restore(slot)

    def fork(self, slot: int) -> int:
        """Begin a request with the same tokens. Cold.

        Full pages are shared, the open page is copied with its representations, and state
        that is keyed by slot is copied.

        Raises:
            DeviceMemoryError, HostMemoryError: no room; nothing has changed.
        """
        self.check(slot)
        length = int(self.length[slot])
        twin = self.begin()
        with undone_by(self.end, twin):
            self.flush(slot)
            pages = self.pages.needed(length)
            self.pages.add(twin, self.pages.of(slot)[:pages])
            for values in (self.length, self.fresh, self.settled, self._counts):
                values[..., twin] = values[..., slot]
            if length % self.config.page_tokens:
                self.pages.own_page(twin, pages - 1)
            self.manager.copy_slot(slot, twin)
            for rows in [rows for each in self.selectors for rows in each.kept().values()]:
                rows[twin] = rows[slot]
            self.restore(twin)
        return twin

    def flush(self, slot: int) -> None:
        """Move the open unit to the host, so that all tokens are there. Cold."""
        self.check(slot)
        if self.dirty[slot]:
            self.pages.upload()
            self.manager.synchronize()
            length, high = int(self.length[slot]), int(self.high[slot])
            for transfer in self.transfers:
                transfer.flush(slot, length, high, bool(self.resident[slot]))
            self.dirty[slot] = False

    def restore(self, slot: int) -> None:
        """Forget what the device has of a request; fill the ring and, where the request fits, the
        buffer from the host, which has all."""
        fast, self.buffered[slot] = self.config.resident_fast_path, 0
        self.high[slot], self.resident[slot] = self.length[slot], fast
        self.pages.upload()
        self.manager.synchronize()
        for transfer in self.transfers:
            transfer.restore(slot, int(self.length[slot]), fast)

    def _check_lengths(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Refuse slots without a request or named twice, lengths that they do not have, and to
        take back more than an algorithm can."""
        if slots.shape != lengths.shape or len(np.unique(slots)) < len(slots):
            raise RequestError(
                f"expected each slot once and a length for each, got slots {slots.tolist()} and "
                f"lengths {lengths.tolist()}"
            )
        known = (slots >= 0) & (slots < len(self.active)) & self.active.take(slots, mode="clip")
        if not known.all():
            self.check(int(slots[known.argmin()]))
        lost = self.length[slots] - lengths
        wrong = (lost < 0) | (lengths < 0)
        if wrong.any():
            at = int(wrong.argmax())
            raise RequestError(
                f"length must be between 0 and {self.length[slots[at]]}, got {lengths[at]}"
            )
        if (most := int(lost.max(initial=0))) > self.undo:
            raise RequestError(
                f"an algorithm can take back the last {self.undo} tokens of what it has "
                f"accumulated, and {most} were asked for; begin the request anew"
            )

    def _cut(self, slots: np.ndarray, lengths: np.ndarray) -> None:
        """Shorten requests; one that loses a part of its prompt is settled again later."""
        for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
            self.manager.host.withdraw(self.pages.behind(slot, length))
        self.length[slots] = lengths
        self.settled[:, slots] = np.minimum(self.settled[:, slots], lengths)
        self.buffered[slots] = np.minimum(self.buffered[slots], lengths)
        self.fresh[slots] |= lengths < self.prompt[slots]
        self._follow(slots)

    def _follow(self, slots: np.ndarray) -> None:
        """Let algorithms that derive state of decoded tokens follow requests that lost some."""
        for selector in self._following:
            for slot in slots.tolist():
                selector.truncated(slot, int(self.length[slot]))

    def own_pages(self, forward: Forward) -> None:
        """Lease the pages that a forward writes, and copy those that are shared; all or none."""
        writers, length = forward.writers, self.length
        lacking = self.pages.without_page(writers, length[writers] + forward.drafted).tolist()
        writes = [(slot, int((writers == slot).sum())) for slot in dict.fromkeys(lacking)]
        writes += [(chunk.slot, chunk.tokens) for chunk in forward.chunks]
        if writes:  # rare in a step that decodes
            self.pages.own(
                [(slot, int(length[slot]), int(length[slot]) + n) for slot, n in writes]
            )

    def upload(self, slots: np.ndarray, appended: np.ndarray, queries: int) -> None:
        """Upload decode rows and what they append, as in ``Forward``, and the pages."""
        self.pages.upload()
        self.step.upload(slots, self._counted(slots, appended), appended, queries)

    def _counted(self, slots: np.ndarray, appended: np.ndarray) -> np.ndarray:
        """Return length, high and resident, int32 ``[3, B]``, with the tokens that rows append."""
        counted: np.ndarray = self._uploaded.take(slots, axis=1)
        length, high, _ = counted
        length += appended
        np.maximum(high, length, out=high)
        return counted

    def advance(self, forward: Forward) -> None:
        """Count the tokens of a forward that has ended."""
        self._uploaded[:, forward.rows] = self._counted(forward.rows, forward.appended)
        self.dirty[forward.writers] = True
        for chunk in forward.chunks:
            self.length[chunk.slot] += chunk.tokens
            self.fresh[chunk.slot] |= chunk.tokens > 0
            self.high[chunk.slot] = max(self.high[chunk.slot], self.length[chunk.slot])

    def restore_all(self, slots: Iterable[int]) -> None:
        """Refill ring and buffer of requests from the host, which has everything. Cold.

        Maps may name units that were never loaded, and a chunk may have overwritten the ring.
        """
        for slot in slots:
            self.flush(slot)
            self.restore(slot)
            self._follow(np.array([slot]))
