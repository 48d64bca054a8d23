"""Prompts of ``generate`` that take over what a storage keeps, in the next process too."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
import torch

import topkv
from topkv_testing.integrity import check_integrity

SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False}

ALGORITHMS = {
    "quest": {},
    "snapkv": {"params": {"window": 8, "generated": 24}, "unit": 1, "budget": 64, "buffer": 64},
    "streaming_llm": {"unit": 1, "budget": 64, "buffer": 64},
    "pariskv": {"unit": 1, "budget": 64, "buffer": 64},
    "double_sparsity": {"unit": 1, "budget": 64, "buffer": 64},
}


def generated(model, ids, steps=12):
    """Sequences and logits of greedy ``generate``."""
    output = model.generate(
        input_ids=ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=steps,
        output_logits=True,
        return_dict_in_generate=True,
        do_sample=False,
    )
    output.past_key_values.close()
    return output.sequences, torch.stack(output.logits, 1)


@pytest.fixture
def settings(tiny, tmp_path):
    def settings(storage=(), **options):
        asked = {"name": "files", "params": {"path": str(tmp_path / "pages")}, "least_tokens": 16}
        asked |= {"fetch": "wait_complete", **dict(storage)}
        pages = {"name": "prefixes", "params": {"storage": asked}}
        return {**tiny.settings(**SPARSE), "pages": pages, **options}

    return settings


def calibrated(path, last=7):
    """A file of the channels of three layers with two kv-heads each."""
    rows = [[float(channel in (*range(7), last)) for channel in range(64)]] * 2
    head = {"format": "topkv-double-sparsity-1", "kind": "importance"}
    path.write_text(json.dumps({**head, "layers": {str(layer): rows for layer in range(3)}}))
    return str(path)


def test_other_channels_in_a_file_of_the_same_name_find_nothing(tiny, settings, tmp_path):
    model, ids = tiny.model("qwen3", layers=2), tiny.prompt(70)["input_ids"]
    for last, found in ((7, 0), (9, 0), (9, 64)):
        path = calibrated(tmp_path / "channels.json", last)
        config = settings(algorithm="double_sparsity", **ALGORITHMS["double_sparsity"])
        config["params"] = {"calibration": path, "channels": 8}
        with topkv.attach(model, config) as handle:
            generated(model, ids)
            assert handle.prefixes.counts.storage.found == found


@pytest.mark.parametrize("host_format", ["model", "fp8"])
@pytest.mark.parametrize("algorithm", [*ALGORITHMS])
def test_a_reload_decodes_as_a_hit_in_host_memory(
    tiny, settings, tmp_path, algorithm, host_format
):
    """Logits agree to the bit, with a resident layer beside; the prompt ends within a page."""
    model, ids = tiny.model("qwen3", layers=3), tiny.prompt(150)["input_ids"]
    config = settings(dense_layers=[0], host_format=host_format, algorithm=algorithm)
    config |= ALGORITHMS[algorithm]
    if algorithm == "double_sparsity":
        config["params"] = {"calibration": calibrated(tmp_path / "channels.json"), "channels": 8}
    with topkv.attach(model, config) as handle:
        cold = generated(model, ids)
        expected = generated(model, ids)
        assert handle.prefixes.counts.found == 128 + 16 * (algorithm != "snapkv")
        assert handle.prefixes.counts.storage.found == 0
    # An element in the middle of two codes becomes either, by what precedes it in its chunk.
    near = 2e-4 if host_format == "model" else 5e-3
    torch.testing.assert_close(expected[1], cold[1], rtol=near, atol=near)
    with topkv.attach(model, config) as handle:
        reloaded = generated(model, ids)
        counts = handle.prefixes.counts
        assert counts.storage.found == counts.found > 0
        assert counts.storage.fetched_bytes > 0
        check_integrity(handle.coordinator)
    for ours, other in zip(reloaded, expected, strict=True):
        torch.testing.assert_close(ours, other, rtol=0, atol=0)


def test_rows_of_a_batch_that_begin_otherwise(tiny, settings):
    model = tiny.model()
    one, two = (tiny.prompt(70, seed=seed)["input_ids"] for seed in (1, 2))
    with topkv.attach(model, settings()):
        alone = [generated(model, ids) for ids in (one, two)]
    with topkv.attach(model, settings(max_requests=2)) as handle:
        both = generated(model, torch.cat([one, two]))
        assert handle.prefixes.counts.storage.found == 2 * 64
    for row, (ids, logits) in enumerate(alone):
        assert torch.equal(both[0][row], ids[0])
        torch.testing.assert_close(both[1][row], logits[0], rtol=2e-4, atol=2e-4)


def test_what_was_prefetched_is_taken_without_waiting(tiny, settings):
    model, ids = tiny.model(), tiny.prompt(70)["input_ids"]
    with topkv.attach(model, settings()):
        generated(model, ids)
    with topkv.attach(model, settings({"fetch": "best_effort"})) as handle:
        generated(model, tiny.prompt(30, seed=3)["input_ids"])
        handle.prefixes.prefetch(ids)
        while handle.coordinator.keeper.poll():
            pass
        generated(model, ids)
        assert handle.prefixes.counts.storage.found == 64


def test_other_weights_and_other_models_find_nothing(tiny, settings):
    model, ids = tiny.model(), tiny.prompt(70)["input_ids"]
    with topkv.attach(model, settings()) as handle:
        generated(model, ids)
        changes = (
            lambda: model.model.layers[0].self_attn.v_proj.weight[3, 5].mul_(1.5),
            lambda: model.model.layers[1].mlp.up_proj.weight.mul_(-1),
            lambda: setattr(model.model.layers[1].input_layernorm, "variance_epsilon", 0.5),
        )
        for change in changes:
            with torch.no_grad():
                change()
            generated(model, ids)
            assert handle.prefixes.counts.found == 0
    model.config.rope_parameters = {**model.config.rope_parameters, "rope_theta": 77.0}
    with topkv.attach(tiny.model(config=model.config), settings()) as handle:
        generated(handle.model, ids)
        assert handle.prefixes.counts.found == 0


def test_a_write_that_leaves_no_trace_is_noticed_when_all_is_forgotten(tiny, settings):
    model, ids = tiny.model(), tiny.prompt(70)["input_ids"]
    with topkv.attach(model, settings()) as handle:
        generated(model, ids)
        handle.coordinator.keeper.storage.wait()
        model.model.layers[0].self_attn.k_proj.weight.data[0, 0] += 1
        handle.prefixes.forget()
        generated(model, ids)
        assert handle.prefixes.counts.found == 0


PROCESS = """
import json, sys, torch, topkv
from transformers import LlamaConfig, LlamaForCausalLM

torch.manual_seed(0)
sizes = {"hidden_size": 256, "intermediate_size": 64, "num_attention_heads": 4, "head_dim": 64}
sizes |= {"num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 99}
model = LlamaForCausalLM(LlamaConfig(max_position_embeddings=512, **sizes)).eval()
ids = torch.arange(150)[None] * 7 % 99
with topkv.attach(model, json.loads(sys.argv[1])) as handle:
    for _ in range(int(sys.argv[2])):
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=8,
            output_logits=True, return_dict_in_generate=True,
        )
        output.past_key_values.close()
    counts = handle.prefixes.counts
    logits = torch.stack(output.logits, 1).tolist()
    print(json.dumps([counts.found, counts.storage.found, logits]))
"""


@pytest.mark.slow
def test_another_process_decodes_what_the_first_would_have(settings):
    """Hand-over: the first computes the prompt, the second takes its pages and decodes."""
    config = json.dumps({**settings(), "dense_layers": []})

    def process(times):
        done = subprocess.run(
            [sys.executable, "-c", PROCESS, config, str(times)],
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout.splitlines()[-1])

    found, fetched, expected = process(2)
    assert (found, fetched) == (144, 0)
    found, fetched, logits = process(1)
    assert (found, fetched) == (144, 144)
    assert logits == expected
