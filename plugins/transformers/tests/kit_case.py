"""The case that the conformance kit asks an engine's author for, for Transformers' models."""

from __future__ import annotations

import copy
import sys

import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    LogitsProcessor,
    LogitsProcessorList,
)
from transformers.masking_utils import sdpa_mask

from topkv_testing.engines import EngineCase
from topkv_transformers.support import attention_modules

PAD, VOCABULARY = 0, 96


class Keep(LogitsProcessor):
    """Keeps the logits of each step; ``generate`` then need not hand its cache to the caller."""

    def __init__(self):
        self.logits = []

    def __call__(self, input_ids, scores):
        self.logits.append(scores.double())
        return scores


class TransformersCase(EngineCase):
    """Case of a model that a function makes.

    The model has two layers or more, and weights far larger than a trained model's, so that a key
    that is missed or read twice shows in the logits.
    """

    tokens = range(2, VOCABULARY)
    chunked = True

    def __init__(self, make):
        self.make = make

    def make_model(self, seed, device):
        torch.manual_seed(seed)
        return self.make().eval().to(device)

    def generate(self, model, prompts, steps, chunk=None):
        longest, keep = max(map(len, prompts)), Keep()
        ids = [[PAD] * (longest - len(prompt)) + prompt for prompt in prompts]
        ids = torch.tensor(ids, device=model.device)
        output = model.generate(
            ids,
            attention_mask=(ids != PAD).long(),
            max_new_tokens=steps,
            do_sample=False,
            prefill_chunk_size=chunk,
            logits_processor=LogitsProcessorList([keep]),
        )
        return output[:, longest:].tolist(), torch.stack(keep.logits, 1)

    def dense_logits(self, model, prompt, new_tokens, dtype, allowed=None):
        twin = copy.deepcopy(model).to(dtype)
        if dtype is torch.float64:  # which grouped matrix products do not take
            twin.config._experts_implementation = "eager"
        if allowed is not None:
            AttentionInterface.register("allowed", _attend_to_allowed)
            AttentionMaskInterface.register("allowed", sdpa_mask)
            twin.config._attn_implementation = "allowed"
            for module, columns in zip(attention_modules(twin), allowed, strict=True):
                module.allowed = columns
        ids = torch.tensor([prompt + new_tokens[:-1]], device=model.device)
        with torch.no_grad():
            return twin(ids).logits[0, len(prompt) - 1 :].double()

    def coordinator(self, handle):
        return handle.coordinator


def _attend_to_allowed(module, query, key, value, attention_mask, scaling, **kwargs):
    if not hasattr(module, "allowed"):  # a layer that topkv leaves alone
        eager = sys.modules[type(module).__module__].eager_attention_forward
        hidden = torch.zeros((), dtype=query.dtype).masked_fill(~attention_mask, float("-inf"))
        return eager(module, query, key, value, hidden, scaling=scaling, **kwargs)
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    allowed = module.allowed.repeat_interleave(group, 0)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, float("-inf"))
    sinks = kwargs.get("s_aux")
    if sinks is not None:
        column = sinks[:, None, None].expand(*scores.shape[:-1], 1)
        scores = torch.cat([scores, column], -1)
    weights = scores.softmax(-1)[..., : key.shape[2]]
    return (weights @ value).transpose(1, 2).contiguous(), None
