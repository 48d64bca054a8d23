"""An engine that makes its models itself, as the engine suite of the conformance kit wants to see
it: something to attach to.

The folder of its weights stands for a model. It is served by the stock engine while it is not
attached, and by an engine through topkv while it is.
"""

from __future__ import annotations

from abc import abstractmethod
from contextlib import ExitStack, contextmanager
from unittest.mock import patch

import torch
from attrs import define

from topkv import hookimpl
from topkv.errors import CapabilityError
from topkv_testing.engines import EngineCase

VOCABULARY, LONGEST = 96, 128
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 128,
    "intermediate_size": 128,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": LONGEST,
}


@define(eq=False)
class Model:
    """The folder of weights, and who serves them; ``served`` is None for the stock engine."""

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


class Attaching:
    """Mixin of an entry of an engine, which gets something to attach to.

    Attributes:
        serve: gives an engine for a model and a configuration: ``serve(path, config)``.
        places: functions that look up the registry, by their full names.
    """

    serve = None
    places = ()

    @hookimpl
    def refusals(self, model):
        if not isinstance(model, Model):
            return super().refusals(model)
        return [f"{model.path} is served through topkv already"] if model.served else []

    @hookimpl
    def attach(self, model, config):
        if reasons := self.refusals(model):
            raise CapabilityError(f"{type(model).__qualname__} cannot be attached", reasons)
        with looked_up_in(self.registry, self.places):
            model.served = self.serve(model.path, config)
        return Handle(model, model.served.coordinator)


@contextmanager
def looked_up_in(registry, places):
    """Let an engine find the suite's plugins, which nobody has installed."""
    with ExitStack() as stack:
        for place in (*places, "topkv.coordinator.default_registry"):
            stack.enter_context(patch(place, lambda: registry))
        yield


class ServedCase(EngineCase):
    """Case with a folder for models, what saves one, and what gives stock engines of it."""

    tokens = range(2, VOCABULARY)
    chunked = True

    def __init__(self, save_model, folder, stock):
        self.save, self.folder, self.stock = save_model, folder, stock

    def make_model(self, seed, device):
        path = self.folder / f"seed-{seed}"
        if not path.exists():
            self.save(path, seed=seed, **SIZES)
        return Model(str(path), seed)

    def generate(self, model, prompts, steps, chunk=None):
        return self.run(model.served or self.stock(model.path), prompts, steps, chunk)

    @abstractmethod
    def run(self, served, prompts, steps, chunk):
        """See ``generate``, by an engine."""

    def dense_logits(self, model, prompt, new_tokens, dtype, allowed=None):
        from transformers import AttentionInterface, AttentionMaskInterface, AutoModelForCausalLM

        AttentionInterface.register("allowed", attend_to_allowed)
        AttentionMaskInterface.register("allowed", lambda *_, **__: None)
        twin = AutoModelForCausalLM.from_pretrained(model.path, attn_implementation="allowed")
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
