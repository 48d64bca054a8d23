"""The requests of vLLM's scheduler: what its ``SchedulerOutput`` says of each."""

from __future__ import annotations

from typing import Any

from topkv import SparseCoordinator
from topkv_engines.requests import Requests


class ScheduledRequests(Requests):
    """Requests by vLLM's ids; they have slots as long as vLLM lets them run.

    Args:
        coordinator: with ``pages: engine``.
        group: number of the blocks among those that vLLM has for each request.

    Attributes:
        prompts: tokens of the prompt of each, kept while it is preempted.
        drafted: tokens of each in the open step that vLLM has drafted, where it has any.
    """

    def __init__(self, coordinator: SparseCoordinator, group: int = 0) -> None:
        super().__init__(coordinator)
        self.group = group
        self.prompts: dict[str, int] = {}
        self.drafted: dict[str, list[int]] = {}

    def schedule(self, step: Any) -> None:
        """Begin a step: end, begin and extend requests as the scheduler has decided.

        Args:
            step: vLLM's ``SchedulerOutput``.
        """
        cached = step.scheduled_cached_reqs
        for name in (*step.finished_req_ids, *(step.preempted_req_ids or ())):
            self.end(name)
        for name in step.finished_req_ids:
            self.prompts.pop(name, None)
        for name in (*cached.resumed_req_ids, *(new.req_id for new in step.scheduled_new_reqs)):
            self.end(name)
        for new in step.scheduled_new_reqs:
            tokens = new.prompt_embeds if new.prompt_token_ids is None else new.prompt_token_ids
            self.prompts[new.req_id] = prompt = len(tokens)
            # For model runner V2 one that resumes is new, and all that it had stands here.
            prefill = len(getattr(new, "prefill_token_ids", None) or ()) or prompt
            self.begin(new.req_id, new.block_ids[self.group], new.num_computed_tokens, prefill)
        for name, blocks, computed, generated in zip(
            cached.req_ids,
            cached.new_block_ids,
            cached.num_computed_tokens,
            cached.num_output_tokens,
            strict=True,
        ):
            pages = blocks[self.group] if blocks else []
            if name in cached.resumed_req_ids:
                self.begin(name, pages, computed, self.prompts[name] + generated)
            else:
                self.extend(name, pages, computed)
        self.drafted = step.scheduled_spec_decode_tokens
        self.open(step.num_scheduled_tokens)
