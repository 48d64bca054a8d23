"""The requests that a worker serves: which slot each has, and where its rows are in a forward.

Every action follows from vLLM's ``SchedulerOutput`` alone, so that all ranks do the same. A
request has a slot from the step that schedules it until the first step after it has ended or was
preempted: as many as vLLM lets run, ``max_num_seqs``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from attrs import define

from topkv import SparseCoordinator
from topkv.errors import RequestError
from topkv_vllm import rows


@define
class Held:
    """A request that has a slot.

    Attributes:
        slot: of the coordinator.
        prefill: tokens that are computed before it decodes: of its prompt, and of what it had
            generated when it was preempted.
    """

    slot: int
    prefill: int


class Requests:
    """Requests of one coordinator by vLLM's ids.

    Args:
        coordinator: with ``pages: engine``.

    Attributes:
        held: requests that have a slot.
        prompts: tokens of the prompt of each, kept while it is preempted.
        tokens: of each request of the step that is open, in the scheduler's order; empty between
            steps.
        computed: tokens of each that earlier steps have computed.
        order: of the rows of the open forward; None where it is vLLM's.
    """

    def __init__(self, coordinator: SparseCoordinator) -> None:
        self.coordinator = coordinator
        self.held: dict[str, Held] = {}
        self.prompts: dict[str, int] = {}
        self.tokens: dict[str, int] = {}
        self.computed: dict[str, int] = {}
        self.order: rows.Order | None = None

    def schedule(self, step: Any) -> None:
        """Begin a step: end, begin and extend requests as the scheduler has decided.

        Args:
            step: vLLM's ``SchedulerOutput``.
        """
        cached = step.scheduled_cached_reqs
        for name in (*step.finished_req_ids, *(step.preempted_req_ids or ())):
            self._end(name)
        for name in step.finished_req_ids:
            self.prompts.pop(name, None)
        for name in (*cached.resumed_req_ids, *(new.req_id for new in step.scheduled_new_reqs)):
            self._end(name)
        self.computed = {}
        for new in step.scheduled_new_reqs:
            tokens = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
            self.prompts[new.req_id] = prompt = len(tokens)
            # For model runner V2 one that resumes is new, and all that it had stands here.
            prefill = len(getattr(new, "prefill_token_ids", None) or ()) or prompt
            self._begin(new.req_id, new.block_ids[0], new.num_computed_tokens, prefill)
        for name, blocks, computed, generated in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            pages = blocks[0] if blocks else []
            if name in cached.resumed_req_ids:
                self._begin(name, pages, computed, self.prompts[name] + generated)
            else:
                self.coordinator.request_add_pages(self.held[name].slot, pages)
                self.computed[name] = computed
        self._take_back()
        self.tokens = step.num_scheduled_tokens

    def _take_back(self) -> None:
        """Take back the drafts that were rejected since: tokens that vLLM counts no more."""
        lengths = {self.held[name].slot: count for name, count in self.computed.items()}
        lengths = {
            slot: count
            for slot, count in lengths.items()
            if 0 < self.coordinator.length(slot) - count < self.coordinator.config.max_queries
        }
        if lengths:
            self.coordinator.rollback([*lengths], [*lengths.values()])

    def decodes(self, name: str) -> bool:
        """Return True if the tokens of a request in the open step are behind its prompt: one, and
        those that were drafted."""
        return self.computed[name] >= self.held[name].prefill

    def settle(self) -> None:
        """Settle, where it is due, requests that decode in the open step, before its forward."""
        rows = [self.held[name].slot for name in self.tokens if self.decodes(name)]
        self.coordinator.settle(rows)

    def has_prompts(self) -> bool:
        """Return True if rows of the open step belong to prompts."""
        return not all(self.decodes(name) for name in self.tokens)

    def pad(self, count: int, queries: int) -> None:
        """Open a forward of requests that are none, and drop the one before."""
        self.order = None
        self.coordinator.forward_abort()
        self.coordinator.forward_begin([-1] * count, queries=queries)

    def forward(self, names: Sequence[str], count: int) -> int:
        """Open the coordinator's forward.

        Args:
            names: the requests in the order of their rows.
            count: requests of a step that only decodes, with those that pad it.

        Returns:
            Rows of the forward, in vLLM's order.

        Raises:
            RequestError: the runner and the scheduler do not agree about a request.
        """
        decoded: list[tuple[int, int]] = []
        prompts: list[tuple[int, int]] = []
        slots: list[int] = []
        chunks: list[tuple[int, int]] = []
        row = 0
        for name in names:
            self._check(name)
            slot, tokens = self.held[name].slot, self.tokens[name]
            if self.decodes(name):
                decoded.append((row, tokens))
                slots.append(slot)
            else:
                prompts.append((row, tokens))
                chunks.append((slot, tokens))
            row += tokens
        append = [tokens for _, tokens in decoded]
        queries, self.order = max(append, default=1), None
        if all(place == (n * queries, queries) for n, place in enumerate(decoded)):
            pads = 0 if chunks else count - len(names)
            self.coordinator.forward_begin(slots + [-1] * pads, chunks, queries=queries)
            return row + pads * queries
        self.coordinator.forward_begin(slots, chunks, append, queries)
        self.order = rows.order(decoded, prompts, queries, self.coordinator.config.device)
        return row

    def _check(self, name: str) -> None:
        """Raise RequestError if topkv does not have the tokens that vLLM counts."""
        length, computed = self.coordinator.length(self.held[name].slot), self.computed[name]
        if length != computed:
            raise RequestError(
                f"request {name} has {length} tokens in topkv and {computed} by vLLM's "
                "scheduler; this is a bug of topkv-vllm, please report it"
            )

    def close(self) -> None:
        """End a step: count its tokens."""
        self.tokens, self.order = {}, None
        forward = self.coordinator.forward
        if forward is not None:
            self.coordinator.forward_end(offloaded=not forward.chunks)

    def abort(self) -> None:
        """Drop a step after an exception: its tokens are not appended."""
        self.tokens, self.order = {}, None
        self.coordinator.forward_abort()

    def _begin(self, name: str, pages: Sequence[int], computed: int, prefill: int) -> None:
        slot = self.coordinator.request_begin(pages, computed)
        self.held[name], self.computed[name] = Held(slot, prefill), computed

    def _end(self, name: str) -> None:
        held = self.held.pop(name, None)
        if held is not None:
            self.coordinator.request_end(held.slot)
