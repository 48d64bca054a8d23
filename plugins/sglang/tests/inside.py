"""Engines of SGLang in this process: their scheduler's loop runs here, and is handed requests.

A process of SGLang has one scheduler, and what its parts ask for is the process's. Here several
take turns: each has a context of its own, which is the process's while it runs. So an engine is
there in a moment, and steps are counted where clients would wait.
"""

from __future__ import annotations

import gc
from collections import Counter
from unittest.mock import patch

from plugins.sglang.tests.watch import EVERY, watched
from topkv_testing.integrity import check_integrity

GROUPS = ("TP", "ATTN_TP", "SHARED_EXPERTS_TP", "ATTN_CP", "DCP", "PP", "SELF_PP")
GROUPS += ("MOE_DP", "MOE_EP", "MOE_TP")
"""Names of SGLang's process groups, all of this process alone."""


class Served:
    """Questions of tests to an engine, in this process or another one."""

    def answer(self, prompts, tokens=16, **more):
        """Return the tokens of each prompt; ``tokens`` of each, or of all alike."""
        many = [tokens] * len(prompts) if isinstance(tokens, int) else tokens
        requests = [
            {"prompt": prompt, "tokens": most, **more}
            for prompt, most in zip(prompts, many, strict=True)
        ]
        return [each["tokens"] for each in self.run(requests)]

    def check_nothing_is_held(self):
        """Pages add up, and neither topkv nor SGLang has a request, a page that no cache keeps, or
        a row."""
        state = self.idle()
        self.check_integrity()
        assert state["watched"]["rows"] == 0
        assert state["watched"]["tokens"] == 0
        assert state["topkv"]["requests"] == 0
        assert state["topkv"]["used_pages"] == 0
        return state


class Inside(Served):
    """A scheduler of SGLang in this process.

    Args:
        arguments: of SGLang.

    Attributes:
        session, coordinator: of topkv; None in stock SGLang.
        scheduler: SGLang's.
        seen: steps by their kind.
    """

    def __init__(self, **arguments):
        from sglang.srt.distributed import bootstrap, parallel_state
        from sglang.srt.model_executor import input_buffers
        from sglang.srt.plugins import load_plugins
        from sglang.srt.runtime_context import ParallelContext, RuntimeContext, use_context
        from sglang.srt.server_args import ServerArgs

        from topkv_bench import sglang_cell

        load_plugins()
        bootstrap.reset_parallel_initialised()
        for name in GROUPS:
            setattr(parallel_state, f"_{name}", None)
        self.context, self.use = RuntimeContext(parallel=ParallelContext()), use_context
        # Graphs of a process share buffers by their size; another model's have tokens of its own.
        own = patch.dict(input_buffers._forward_input_buffer_pool, clear=True)
        with self.use(self.context), own:
            given = ServerArgs(**arguments)
            given.resolve_once()
            given.check_server_args()
            with patch.object(sglang_cell, "configure_scheduler_process"):  # it would kill others
                self.engine = sglang_cell.Engine(given)
        self.coordinator, self.scheduler = self.engine.coordinator, self.engine.scheduler
        self.session = getattr(self.scheduler.tp_worker.model_runner, "topkv_session", None)
        self.seen, self.step, self.waiting, self.asked, self.held = Counter(), 0, {}, {}, {}
        self.scheduler.ingest_requests = self._ingest
        self._queue, self.scheduler._add_request_to_queue = (
            self.scheduler._add_request_to_queue,
            self._hold,
        )

    def run(self, requests):
        """Run requests to their end; return what each got.

        Args:
            requests: each with ``prompt`` and ``tokens`` that it may generate; if it arrives
                later, ``wait`` steps of the scheduler; if it is aborted, ``abort`` tokens that it
                has by then.
        """
        self.step, self.held = 0, {}
        self.asked = {f"request-{number:06}": each for number, each in enumerate(requests)}
        self.waiting = dict(self.asked)
        with self.use(self.context):
            try:
                self.engine.loop(self._look)
            except BaseException:
                self.drop_all()
                raise
        return [self._got(name) for name in self.asked]

    def idle(self):
        """Return the state of the scheduler, which has ended what nothing has a row for."""
        from topkv_sglang.metrics import state

        with self.use(self.context):
            self.scheduler.on_idle()
            return {
                "topkv": state(self.session) if self.session else None,
                "watched": {**self.seen, **watched(self.scheduler)},
            }

    def check_integrity(self):
        """Check topkv's pages and maps, where it serves."""
        if self.coordinator is not None:
            check_integrity(self.coordinator)

    def flush(self):
        """Empty the radix cache."""
        with self.use(self.context):
            return self.scheduler.flush_cache()

    def drop_all(self):
        """Forget all requests, as the end of a scheduler's process would."""
        scheduler = self.scheduler
        scheduler.waiting_queue.clear()
        scheduler.chunked_req = None
        scheduler.running_batch = type(scheduler.running_batch)(reqs=[], batch_is_full=False)
        scheduler.last_batch = scheduler.cur_batch_for_debug = None
        self.waiting = {}
        with self.use(self.context):
            assert scheduler.flush_cache()
            scheduler.on_idle()

    def close(self):
        """Give back host memory and whatever else the scheduler has."""
        with self.use(self.context):
            self.scheduler.release_host_resources()
        self.__dict__.clear()
        gc.collect()

    def _ingest(self, stop_at_pause=False):
        """Hand over what is due, and abort what has as many tokens as it may."""
        self.step += 1
        for name in [*self.held]:
            self._abort_if_due(name)
        due = [name for name, each in self.waiting.items() if each.get("wait", 0) < self.step]
        if due:
            self.scheduler.process_input_requests([self._request(name) for name in due])
        elif not self.waiting and self.scheduler.is_fully_idle():
            self.scheduler.gracefully_exit = True
        return []

    def _request(self, name):
        asked = self.waiting.pop(name)
        request = self.engine._request(asked["prompt"], asked["tokens"])
        # Where the end of a text is ignored, SGLang admits as many as need no retraction.
        request.rid, request.sampling_params.ignore_eos = name, False
        return request

    def _hold(self, request, *more, **named):
        self.held[request.rid] = request
        self._queue(request, *more, **named)

    def _abort_if_due(self, name):
        from sglang.srt.managers.io_struct import AbortReq

        most, has = self.asked[name].get("abort"), self.held[name]
        if most is not None and len(has.output_ids) >= most and not has.finished():
            self.scheduler.abort_request(AbortReq(rid=name))

    def _look(self, batch):
        """Count a step, and check topkv's pages and maps now and then."""
        self.seen[batch.forward_mode.name.lower()] += 1
        if self.seen.total() % EVERY == 0:
            self.check_integrity()

    def _got(self, name):
        request = self.held[name]
        reason = request.finished_reason
        return {
            "tokens": [*request.output_ids_through_stop],
            "found": request.cached_tokens,
            "retracted": request.retraction_count,
            "verified": request.spec_verify_ct,
            "ended": {"type": "abort"} if reason is None else reason.to_json(),
        }
