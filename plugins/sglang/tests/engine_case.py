"""SGLang as the engine suite of the conformance kit wants to see it, see ``served_case``."""

from __future__ import annotations

import torch

from plugins.sglang.tests.inside import Inside
from tools.engines.tests import served_case
from tools.engines.tests.served_case import ServedCase
from topkv.entries import Capabilities, PluginEntry
from topkv_sglang.engine import SglangEngine


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


class WithLogits(Inside):
    """An engine that keeps the logits of each token of each request.

    Args:
        arguments: of SGLang.
    """

    def __init__(self, **arguments):
        super().__init__(**arguments)
        self.chunk = self.scheduler.chunked_prefill_size
        self.process, self.engine._process = self.engine._process, self.keep_logits
        self.logits = {}

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

    def generate(self, prompts, steps, chunk):
        """Return tokens and logits of prompts that run at a time.

        Args:
            chunk: tokens of a piece of a prompt; SGLang cuts at pages, so one at least.
        """
        page, self.logits = self.scheduler.page_size, {}
        pages = chunk and max(chunk // page, 1) * page
        self.scheduler.chunked_prefill_size = pages or self.chunk
        tokens = self.answer(prompts, steps)
        return tokens, torch.stack([torch.stack(self.logits[name]) for name in self.asked])


class SglangCase(ServedCase):
    """See ``ServedCase``."""

    def run(self, served, prompts, steps, chunk):
        return served.generate(prompts, steps, chunk)
