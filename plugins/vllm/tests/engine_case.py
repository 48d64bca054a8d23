"""vLLM as the engine suite of the conformance kit wants to see it: something to attach to.

vLLM makes its models itself, so the folder of its weights stands for a model here. A model is
served by stock vLLM while it is not attached, and by an engine through topkv while it is.
"""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from itertools import count
from unittest.mock import patch

import torch
from attrs import define

from topkv import hookimpl
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import CapabilityError
from topkv_testing.engines import EngineCase
from topkv_vllm import engine_args
from topkv_vllm.engine import VllmEngine

VOCABULARY = 96
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 128,
}
NUMBERS = count()


@define(eq=False)
class Model:
    """The folder of weights, and who serves them; ``served`` is None for stock vLLM."""

    path: str
    seed: int
    served: object = None


@define(eq=False)
class Handle:
    """Handle that ``attach`` gives."""

    model: Model
    coordinator: object

    def detach(self):
        self.model.served = None


class Attaching(VllmEngine):
    """The engine with something to attach to.

    Attributes:
        serve: gives an engine of these arguments: ``serve(**arguments)``.
    """

    serve = None

    @hookimpl
    def refusals(self, model):
        if not isinstance(model, Model):
            return super().refusals(model)
        return [f"{model.path} is served through topkv already"] if model.served else []

    @hookimpl
    def attach(self, model, config):
        if reasons := self.refusals(model):
            raise CapabilityError(f"{type(model).__qualname__} cannot be attached", reasons)
        with looked_up_in(self.registry):
            made = self.serve(**engine_args(config, model=model.path))
        model.served = made
        return Handle(model, made.session.coordinator)


ENTRY = PluginEntry(
    "vllm",
    "engine",
    f"{__name__}:Attaching",
    hook_api=(3, 0),
    capabilities=Capabilities(tiers=("cpu",)),
)


@contextmanager
def looked_up_in(registry):
    """Let the worker find the suite's plugins, which nobody has installed."""
    places = ("topkv_vllm.geometry.registry", "topkv_vllm.refusals.registry")
    with ExitStack() as stack:
        for place in (*places, "topkv.coordinator.default_registry"):
            stack.enter_context(patch(place, lambda: registry))
        yield


class VllmCase(EngineCase):
    """Case with a folder for models, arguments of stock vLLM, and ``serve``, see above."""

    tokens = range(2, VOCABULARY)
    chunked = True

    def __init__(self, save_model, folder, beside, serve):
        self.save, self.folder, self.beside, self.serve = save_model, folder, beside, serve

    def make_model(self, seed, device):
        path = self.folder / f"seed-{seed}"
        if not path.exists():
            self.save(path, seed=seed, **SIZES)
        return Model(str(path), seed)

    def generate(self, model, prompts, steps, chunk=None):
        served = model.served or self.serve(model=model.path, max_model_len=128, **self.beside)
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

    def dense_logits(self, model, prompt, new_tokens, dtype, allowed=None):
        from transformers import AttentionInterface, AttentionMaskInterface, Qwen3ForCausalLM

        AttentionInterface.register("allowed", attend_to_allowed)
        AttentionMaskInterface.register("allowed", lambda *_, **__: None)
        twin = Qwen3ForCausalLM.from_pretrained(model.path, attn_implementation="allowed")
        twin = twin.to(dtype).eval()
        ids = torch.tensor([prompt + new_tokens[:-1]])
        causal = torch.ones((ids.shape[1], ids.shape[1]), dtype=torch.bool).tril()
        for number, layer in enumerate(twin.model.layers):
            heads = layer.self_attn.config.num_key_value_heads
            layer.self_attn.allowed = allowed[number] if allowed else causal.expand(heads, -1, -1)
        with torch.no_grad():
            return twin(ids).logits[0, len(prompt) - 1 :].double()

    def coordinator(self, handle):
        return handle.coordinator


def attend_to_allowed(module, query, key, value, attention_mask, scaling, **kwargs):
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    allowed = module.allowed.repeat_interleave(group, 0)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def logits_of(output):
    """float64 ``[tokens, V]`` of an output of vLLM, whose log-probabilities are raw logits."""
    rows = [
        [reported[token].logprob for token in range(VOCABULARY)] for reported in output.logprobs
    ]
    return torch.tensor(rows, dtype=torch.float64)
