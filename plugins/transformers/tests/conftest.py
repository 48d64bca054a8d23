"""Tiny random models, prompts, and a float64 oracle for their logits."""

from __future__ import annotations

import copy
import os
import re
import sys
from pathlib import Path

import pytest
import torch

sys.path.append(str(Path(__file__).parent))  # recorded is beside the tests

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from recorded import Recorder  # noqa: E402
from transformers import (  # noqa: E402
    AttentionInterface,
    AttentionMaskInterface,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)
from transformers.masking_utils import sdpa_mask  # noqa: E402

from topkv_testing.integrity import check_integrity  # noqa: E402
from topkv_transformers import capture  # noqa: E402

FAMILIES = {
    "llama": (LlamaConfig, LlamaForCausalLM),
    "qwen2": (Qwen2Config, Qwen2ForCausalLM),
    "qwen3": (Qwen3Config, Qwen3ForCausalLM),
    "mistral": (MistralConfig, MistralForCausalLM),
}
PAD, VOCABULARY = 0, 96
EPS = torch.finfo(torch.float32).eps


class Tiny:
    """Makes models and prompts on one device."""

    def __init__(self, device):
        self.device = torch.device(device)

    def config(self, family="llama", layers=2, **options):
        # Weights far larger than a trained model's: attention is sharp, so that a key that
        # is missed or read twice shows in the logits.
        values = {
            "vocab_size": VOCABULARY,
            "hidden_size": 256 if family == "qwen2" else 64,
            "intermediate_size": 96,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": 640,
            "initializer_range": 0.15 if family == "qwen2" else 0.3,
            "pad_token_id": PAD,
            "bos_token_id": 1,
            "eos_token_id": None,
        }
        if family != "qwen2":  # Qwen2 has hidden_size / heads
            values["head_dim"] = 64
        if family == "mistral":
            values["sliding_window"] = None
        return FAMILIES[family][0](**{**values, **options})

    def model(self, family="llama", seed=0, config=None, **options):
        torch.manual_seed(seed)
        config = config or self.config(family, **options)
        return FAMILIES[family][1](config).eval().to(self.device)

    def prompt(self, tokens, pads=(0,), seed=0):
        """``input_ids`` and ``attention_mask`` of rows that are padded on the left."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, VOCABULARY, (len(pads), tokens), generator=generator)
        mask = torch.arange(tokens) >= torch.tensor(pads)[:, None]
        ids = ids.masked_fill(~mask, PAD).to(self.device)
        return {"input_ids": ids, "attention_mask": mask.long().to(self.device)}

    def settings(self, **changes):
        """A budget that covers every sequence of these tests; changes make it smaller."""
        return {
            "algorithm": "quest",
            "backend": "triton_attention",
            "unit": 4,
            "budget": 640,
            "buffer": 640,
            "ring_tokens": 8,
            "page_tokens": 16,
            "max_requests": 4,
            "max_tokens": 1024,
            "max_request_tokens": 640,
            "dense_layers": [],
            "prefill_block_tokens": 32,
            "poison": True,
            **changes,
        }


def pytest_generate_tests(metafunc):
    if "tiny" in metafunc.fixturenames:
        skip = pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
        gpu = pytest.param("cuda", marks=[pytest.mark.gpu, skip])
        metafunc.parametrize("tiny", ["cpu", gpu], indirect=True)


@pytest.fixture
def tiny(request):
    return Tiny(request.param)


def run(model, prompt, steps=24, **options):
    """Greedy ``generate``: sequences, and logits ``[B, steps, V]`` in float64."""
    options = {"do_sample": False, "max_new_tokens": steps, **prompt, **options}
    output = model.generate(output_logits=True, return_dict_in_generate=True, **options)
    logits = torch.stack(output.logits, 1).double()
    return output.sequences, logits, output.past_key_values


def oracle(model, sequences, prompt, dtype=torch.float64, allowed=None):
    """Logits ``[B, steps, V]`` of the generated tokens, by one dense forward.

    Args:
        model: not attached.
        allowed: of each layer bool ``[B, Hkv, T, T]``: the columns that a query may attend;
            causal attention if None.
    """
    twin = copy.deepcopy(model).to(dtype)
    count = prompt["input_ids"].shape[1]
    new = sequences.shape[1] - count
    mask = torch.nn.functional.pad(prompt["attention_mask"], (0, new - 1), value=1)
    positions = (mask.cumsum(-1) - 1).clamp(min=0)
    if allowed is not None:
        AttentionInterface.register("recorded", _recorded)
        AttentionMaskInterface.register("recorded", sdpa_mask)
        twin.config._attn_implementation = "recorded"
        for layer, columns in zip(twin.model.layers, allowed, strict=True):
            layer.self_attn.allowed = columns
    with torch.no_grad():
        logits = twin(sequences[:, :-1], attention_mask=mask, position_ids=positions).logits
    return logits[:, count - 1 :].double()


def _recorded(module, query, key, value, attention_mask, scaling, **kwargs):
    group = query.shape[1] // key.shape[1]
    key, value = (tensor.repeat_interleave(group, 1) for tensor in (key, value))
    allowed = module.allowed.repeat_interleave(group, 1)
    scores = (query @ key.transpose(2, 3) * scaling).masked_fill(~allowed, float("-inf"))
    return (scores.softmax(-1) @ value).transpose(1, 2).contiguous(), None


def assert_close(ours, stock, truth, times=2):
    """Ours is no further from the truth than twice the stock model, and a few roundings."""
    error, stock_error = (ours - truth).abs().max(), (stock - truth).abs().max()
    band = 8 * EPS * truth.abs().max()
    assert error <= times * stock_error + band, f"{error:.2e} against {stock_error:.2e} of stock"


def assert_all_free(handle):
    """No request is left, and both tiers add up."""
    coordinator = handle.coordinator
    assert coordinator.requests.free == coordinator.config.max_requests
    assert coordinator.manager.host.used == 0
    check_integrity(coordinator)


@pytest.fixture(scope="session")
def check():
    """The functions above, for test modules."""

    class Check:
        pass

    for function in (run, oracle, assert_close, assert_all_free):
        setattr(Check, function.__name__.removeprefix("assert_"), staticmethod(function))
    return Check


@pytest.fixture
def steps(monkeypatch):
    """Queries of each decode step of the coordinator of a handle, in a list for each call."""

    def watched(handle):
        found = []
        begin = handle.coordinator.forward_begin

        def counted(*args, **kwargs):
            if kwargs.get("decode"):
                found.append(kwargs["queries"])
            return begin(*args, **kwargs)

        monkeypatch.setattr(handle.coordinator, "forward_begin", counted)
        return found

    return watched


@pytest.fixture
def recording(monkeypatch):
    """Settings under which steps are recorded; on a CPU by a recorder of operators."""
    if not CUDA:
        kept = capture.refusals

        def refusals(decoder, config):
            # The recorder takes any plugin.
            named = kept(decoder, config)
            return [each for each in named if not re.search("CUDA graphs|a plugin", each)]

        monkeypatch.setattr(capture, "refusals", refusals)
        monkeypatch.setattr(capture, "CudaRecorder", Recorder)
    return {"capture": "auto"}
