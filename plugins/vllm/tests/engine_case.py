"""vLLM as the engine suite of the conformance kit wants to see it, see ``served_case``."""

from __future__ import annotations

from itertools import count

import torch

from tools.engines.tests import served_case
from tools.engines.tests.served_case import VOCABULARY, ServedCase
from topkv.entries import Capabilities, PluginEntry
from topkv_vllm.engine import VllmEngine

NUMBERS = count()


class Attaching(served_case.Attaching, VllmEngine):
    """The engine with something to attach to."""

    places = ("topkv_vllm.geometry.registry", "topkv_vllm.refusals.registry")


ENTRY = PluginEntry(
    "vllm",
    "engine",
    f"{__name__}:Attaching",
    hook_api=(3, 0),
    capabilities=Capabilities(tiers=("cpu",)),
)


class VllmCase(ServedCase):
    """See ``ServedCase``."""

    def run(self, served, prompts, steps, chunk):
        served.scheduler.scheduler_config.long_prefill_token_threshold = chunk or 0
        names = [f"kit-{next(NUMBERS)}" for _ in prompts]
        try:
            for name, prompt in zip(names, prompts, strict=True):
                served.add(name, prompt, steps, logprobs=-1)
            served.run()
        except BaseException:
            served.engine.abort_request(names)
            served.run()
            raise
        outputs = [served.outputs[name].outputs[0] for name in names]
        return [[*one.token_ids] for one in outputs], torch.stack([logits_of(o) for o in outputs])


def logits_of(output):
    """float64 ``[tokens, V]`` of an output of vLLM, whose log-probabilities are raw logits."""
    rows = [
        [reported[token].logprob for token in range(VOCABULARY)] for reported in output.logprobs
    ]
    return torch.tensor(rows, dtype=torch.float64)
