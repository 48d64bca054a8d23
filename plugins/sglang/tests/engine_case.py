"""SGLang as the engine suite of the conformance kit wants to see it, see ``served_case``.

A process of SGLang has one scheduler, and what its parts ask for is the process's. Here several
take turns in one process: each has a context of its own, which is the process's while it runs.
"""

from __future__ import annotations

from unittest.mock import patch

import torch

from tools.engines.tests import served_case
from tools.engines.tests.served_case import ServedCase
from topkv.entries import Capabilities, PluginEntry
from topkv_sglang.engine import SglangEngine

GROUPS = ("TP", "ATTN_TP", "SHARED_EXPERTS_TP", "ATTN_CP", "DCP", "PP", "SELF_PP")
GROUPS += ("MOE_DP", "MOE_EP", "MOE_TP")
"""Names of SGLang's process groups, all of this process alone."""


class Attaching(served_case.Attaching, SglangEngine):
    """The engine with something to attach to."""

    places = ("topkv_sglang.geometry.registry", "topkv_sglang.refusals.registry")


ENTRY = PluginEntry(
    "sglang",
    "engine",
    f"{__name__}:Attaching",
    hook_api=(3, 0),
    capabilities=Capabilities(tiers=("cpu",)),
)


class Scheduler:
    """A scheduler of SGLang in this process.

    Args:
        arguments: of SGLang.

    Attributes:
        coordinator, requests: of topkv; None in stock SGLang.
        logits: of each token of each request, by name.
    """

    def __init__(self, **arguments):
        from sglang.srt.distributed import bootstrap, parallel_state
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context
        from sglang.srt.server_args import ServerArgs

        from topkv_bench import sglang_cell

        load_plugins()
        bootstrap.reset_parallel_initialised()
        for name in GROUPS:
            setattr(parallel_state, f"_{name}", None)
        self.context, self.use = RuntimeContext(parallel=ParallelContext()), use_context
        with self.use(self.context):
            given = ServerArgs(**arguments)
            given.resolve_once()
            given.check_server_args()
            with patch.object(sglang_cell, "configure_scheduler_process"):  # it would kill others
                self.engine = sglang_cell.Engine(given)
        self.coordinator, self.scheduler = self.engine.coordinator, self.engine.scheduler
        session = getattr(self.scheduler.tp_worker.model_runner, "topkv_session", None)
        self.requests = session and session.requests
        self.chunk = self.scheduler.chunked_prefill_size
        self.process, self.engine._process = self.engine._process, self.keep_logits
        self.logits, self.tokens = {}, {}

    def keep_logits(self, batch, result):
        """Keep the logits of requests that have a token from a step, not a piece of a prompt."""
        rows, before = result.logits_output.next_token_logits, {}
        for request in batch.reqs:
            before[request.rid] = len(request.output_ids)
        requests = [*batch.reqs]
        self.process(batch, result)
        for request, row in zip(requests, rows, strict=True):
            if len(request.output_ids) > before[request.rid]:
                self.logits.setdefault(request.rid, []).append(row.double())
                self.tokens[request.rid] = [*request.output_ids]

    def generate(self, prompts, steps, chunk):
        """Return tokens and logits of prompts that run at a time.

        Args:
            chunk: tokens of a piece of a prompt; SGLang cuts at pages, so one at least.
        """
        page = self.scheduler.page_size
        pages = chunk and max(chunk // page, 1) * page
        self.scheduler.chunked_prefill_size = pages or self.chunk
        with self.use(self.context):
            try:
                names = [self.engine.send(prompt, steps) for prompt in prompts]
                self.engine.loop(lambda batch: None)
            except BaseException:
                self.drop_all()
                raise
        tokens = [self.tokens.pop(name) for name in names]
        return tokens, torch.stack([torch.stack(self.logits.pop(name)) for name in names])

    def idle(self):
        """Let the scheduler end what nothing has a row for any more."""
        with self.use(self.context):
            self.scheduler.on_idle()

    def drop_all(self):
        """Forget all requests, as the end of a scheduler's process would."""
        scheduler = self.scheduler
        scheduler.waiting_queue.clear()
        scheduler.chunked_req = None
        scheduler.running_batch = type(scheduler.running_batch)(reqs=[], batch_is_full=False)
        scheduler.last_batch = scheduler.cur_batch_for_debug = None
        self.engine._sent = []
        assert scheduler.flush_cache()
        scheduler.on_idle()


class SglangCase(ServedCase):
    """See ``ServedCase``."""

    def run(self, served, prompts, steps, chunk):
        return served.generate(prompts, steps, chunk)
