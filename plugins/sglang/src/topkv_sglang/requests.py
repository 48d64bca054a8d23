"""The requests of SGLang's scheduler: what its batches say of each."""

from __future__ import annotations

from typing import Any

from attrs import frozen

from topkv import SparseCoordinator
from topkv.errors import RequestError
from topkv_engines.requests import Requests
from topkv_sglang.rows import Rows


@frozen
class Step:
    """A forward, by what the scheduler knows of it on the host. Lists are of its requests.

    Attributes:
        rows: of the requests in the pool, in the order of the batch.
        computed: tokens of each that are there already.
        tokens: that each appends.
        prefill: tokens of each that are read before it decodes, those that it had generated
            before a retraction included.
    """

    rows: list[int]
    computed: list[int]
    tokens: list[int]
    prefill: list[int]

    @classmethod
    def of(cls, batch: Any) -> Step:
        """Read a step off SGLang's ``ScheduleBatch``."""
        rows = batch.req_pool_indices_cpu.tolist()
        prefill = [len(request.full_untruncated_fill_ids) for request in batch.reqs]
        if batch.forward_mode.is_decode():
            computed = [length - 1 for length in batch.seq_lens_cpu.tolist()]
            return cls(rows, computed, [1] * len(rows), prefill)
        if batch.forward_mode.is_target_verify():
            drafts = batch.spec_info.draft_token_num
            return cls(rows, batch.seq_lens_cpu.tolist(), [drafts] * len(rows), prefill)
        return cls(rows, [*batch.prefix_lens], [*batch.extend_lens], prefill)


class ScheduledRequests(Requests):
    """Requests by their rows in SGLang's pool; they have slots as long as they have rows.

    Args:
        coordinator: with ``pages: engine``.
        rows: SGLang's pool.

    Attributes:
        pages: number of the pages of each.
        found: tokens that requests began with, found by the radix cache.
        replaced: pages that were replaced by equal ones of the radix cache.
    """

    def __init__(self, coordinator: SparseCoordinator, rows: Rows) -> None:
        super().__init__(coordinator)
        self.rows = rows
        self.pages: dict[int, int] = {}
        self.found = self.replaced = 0
        self._generations: dict[int, int] = {}

    def schedule(self, step: Step) -> None:
        """Begin a step. Rows that were given back come first, for their pages may be another
        request's by now; then pages that were replaced, which others are to hold too."""
        self.release()
        self._replace()
        for row, computed, tokens, prefill in zip(
            step.rows, step.computed, step.tokens, step.prefill, strict=True
        ):
            self._take(row, computed, computed + tokens, prefill)
        self.open(dict(zip(step.rows, step.tokens, strict=True)))

    def release(self) -> None:
        """End requests whose rows were given back. Between forwards."""
        for row in self.rows.ended:
            self.end(row)
            self.pages.pop(row, None)
        self.rows.ended.clear()

    def _replace(self) -> None:
        """Hold the pages that the radix cache has put in place of others."""
        for row, (first, end) in self.rows.replaced.items():
            held = self.held.get(row)
            if held is not None:
                pages = self.rows.pages(row, first, end * self.rows.page)
                self.coordinator.request_replace_pages(held.slot, first, pages)
                self.replaced += len(pages)
        self.rows.replaced.clear()

    def _take(self, row: int, computed: int, length: int, prefill: int) -> None:
        """Begin a request, or go on with one, with pages for ``length`` tokens.

        Raises:
            RequestError: the row is another request's now, and nobody has said that it was given
                back.
        """
        generation = int(self.rows.req_generation[row])
        first = self.pages.get(row, 0)
        pages = self.rows.pages(row, first, length)
        if row not in self.held:
            self.begin(row, pages, computed, prefill)
            self._generations[row] = generation
            self.found += computed
        elif self._generations[row] != generation:
            raise RequestError(
                f"row {row} of SGLang's pool was given to another request without a word; this is "
                "a bug of topkv, please report it"
            )
        else:
            self.extend(row, pages, computed)
        self.pages[row] = first + len(pages)
