"""Latent rows and index keys come back from a storage as they were."""

from __future__ import annotations

import pytest
import torch

from topkv_testing.models.storage_doubles import SHELVES

BELOW = {"name": "shelf", "params": {"shelf": "dsa"}, "least_tokens": 16, "fetch": "wait_complete"}


@pytest.fixture(autouse=True)
def tidy():
    yield
    SHELVES.clear()


def logits_of(model, prompt):
    output = model.generate(
        **prompt,
        max_new_tokens=8,
        do_sample=False,
        output_logits=True,
        return_dict_in_generate=True,
    )
    output.past_key_values.close()
    return torch.stack(output.logits, 1)


@pytest.mark.parametrize("kv_format", ["model", "fp8"])
@pytest.mark.parametrize("family", ["deepseek", "glm"])
def test_a_reload_decodes_as_a_hit_in_host_memory(dsa, family, kv_format):
    whole = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128}
    model = dsa.model(family, **(whole if kv_format == "fp8" else {}))
    model = model.bfloat16() if kv_format == "fp8" else model
    prompt = dsa.prompt(70, [0])
    pages = {"name": "prefixes", "params": {"storage": BELOW}}
    settings = {"pages": pages, "kv_format": kv_format}
    with dsa.attach(model, **settings):
        logits_of(model, prompt)
        expected = logits_of(model, prompt)
    with dsa.attach(model, **settings) as handle:
        ours = logits_of(model, prompt)
        assert handle.prefixes.counts.storage.found == 64
    torch.testing.assert_close(ours, expected, rtol=0, atol=0)
