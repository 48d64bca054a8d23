"""Every class that is served generates as its stock model does, over any budget that covers all,
and over a small one as the model that attends to what was selected.

``make test`` runs one class of each group, ``make test-models`` the others.
"""

from __future__ import annotations

import pytest
import torch
import transformers
from kit_case import TransformersCase
from model_cases import config_of, model_of, names_of
from transformers import DynamicCache

import topkv
from topkv.errors import CapabilityError
from topkv.testing.engine.bench import SWAPPING, Bench
from topkv.testing.kit import subject_of
from topkv.testing.tiers import tier
from topkv_transformers import support

FIRST, MORE, STEPS = 31, 11, 8
CALLS = {"single": ((0,), None), "padded": ((0, 17, 1), None), "chunked": ((0, 17, 1), 9)}


def talk(tiny, check, model, cache, pads, chunk):
    """Two turns over one cache: the tokens, and logits of both."""
    first, more = tiny.prompt(FIRST, pads), tiny.prompt(MORE, (0,) * len(pads), seed=1)
    ids, mask, logits = first["input_ids"], first["attention_mask"], []
    for _ in range(2):
        prompt = {"input_ids": ids, "attention_mask": mask}
        sequences, made, _ = check.run(
            model, prompt, STEPS, past_key_values=cache, prefill_chunk_size=chunk
        )
        logits.append(made)
        ids, chunk = torch.cat([sequences, more["input_ids"]], 1), None
        mask = torch.nn.functional.pad(mask, (0, ids.shape[1] - mask.shape[1]), value=1)
    return sequences, torch.cat(logits, 1)


@pytest.mark.parametrize("name", names_of("dense", "experts"))
def test_a_covering_budget_is_the_stock_model(tiny, check, name):
    model = model_of(name, tiny.device)
    calls = list(CALLS.values())
    stock = [talk(tiny, check, model, DynamicCache(config=model.config), *each) for each in calls]
    with topkv.attach(model, tiny.settings(max_requests=3)) as handle:
        for call, (sequences, logits) in zip(calls, stock, strict=True):
            cache = handle.new_cache()
            ours = talk(tiny, check, model, cache, *call)
            apart = (ours[1] - logits).abs().max() / logits.abs().max()
            assert torch.equal(ours[0], sequences), f"logits are {apart:.1e} apart"
            assert apart < 1e-4
            cache.close()
        check.all_free(handle)


@pytest.mark.parametrize("name", names_of("dense", "experts"))
def test_a_small_budget_is_the_model_over_what_was_selected(name):
    case = TransformersCase(lambda: model_of(name))
    bench = Bench(subject_of("transformers", "engine", tier("cpu"), case))
    prompts = bench.prompts((61, 6, 37))
    with bench.attached(**SWAPPING) as attached:
        tokens = attached.generate(prompts, STEPS, chunk=23)
        ask = (attached.twin, prompts[0], tokens[0], torch.float64)
        allowed = attached.allowed(61, STEPS)
        selected, dense = (case.dense_logits(*ask, each) for each in (allowed, None))
    assert (selected - dense).abs().max() > 1e-2 * dense.abs().max(), "nothing is shown"


def make(name, **options):
    """A model whose class is not served."""
    values = {"hidden_size": 256, "num_attention_heads": 4, "num_key_value_heads": 2}
    kind = getattr(transformers, f"{name}ForCausalLM")
    torch.manual_seed(0)
    return kind(kind.config_class(**{**config_of("Llama").to_dict(), **values, **options})).eval()


def test_a_class_that_nobody_compared_is_refused(tiny, check, monkeypatch):
    """DiffLlama shows why: nothing else speaks against it, and its tokens would be wrong."""
    model = make("DiffLlama", head_dim=64).to(tiny.device)
    with pytest.raises(CapabilityError, match=r"class DiffLlamaForCausalLM .* open an issue"):
        topkv.attach(model, tiny.settings())
    prompt = tiny.prompt(FIRST)
    stock = check.run(model, prompt, STEPS)[1]
    monkeypatch.setattr(support, "group_of", lambda model: "dense")
    with topkv.attach(model, tiny.settings()):
        ours = check.run(model, prompt, STEPS)[1]
    assert (ours - stock).abs().max() > 0.1 * stock.abs().max()


def test_a_mask_of_the_model_itself_is_refused_when_it_comes(tiny, check, monkeypatch):
    """Doge makes a mask of its values: another class that only the list keeps out."""
    model = make("Doge", head_dim=64).to(tiny.device)
    monkeypatch.setattr(support, "group_of", lambda model: "dense")
    with topkv.attach(model, tiny.settings()) as handle:
        with pytest.raises(CapabilityError, match=r"DogeAttention asks .* attention_mask"):
            check.run(model, tiny.prompt(FIRST), STEPS)
        check.all_free(handle)


def test_classes_derived_from_one_that_is_served_are_served(tiny):
    class Mine(transformers.LlamaForCausalLM):
        pass

    model = Mine(config_of("Llama")).eval().to(tiny.device)
    topkv.attach(model, tiny.settings()).detach()


@pytest.mark.parametrize("name", ["Mellum", "Qwen2Moe"])
def test_a_window_that_no_layer_has_is_no_reason(tiny, name):
    """Classes state a window whose layers are all full; one layer that slides is refused."""
    assert config_of(name).sliding_window is not None
    assert support.refusals(model_of(name)) == []
    layers = ["full_attention", "sliding_attention"]
    (reason,) = support.refusals(model_of(name, layer_types=layers))
    assert "layer types ['sliding_attention']" in reason
