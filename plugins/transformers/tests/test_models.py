"""Every class that is served generates as its stock model does, over any budget that covers all,
and over a small one as the model that attends to what was selected.

``make test`` runs one class of each group, ``make test-models`` the others.
"""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from kit_case import TransformersCase
from model_cases import CONTRARY, SLIDING, config_of, model_of, names_of
from transformers import DynamicCache

import topkv
from topkv.errors import CapabilityError, ConfigError
from topkv_testing.engine.bench import SWAPPING, Bench
from topkv_testing.kit import subject_of
from topkv_testing.tiers import tier
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


def assert_equal_to_stock(tiny, check, name, **options):
    model = model_of(name, tiny.device, **options)
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
            assert cache.stock_bytes == 0
        check.all_free(handle)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name", names_of("dense", "experts", "windows", "sinks", "softcap", "states", "latent")
)
def test_a_covering_budget_is_the_stock_model(tiny, check, name):
    assert_equal_to_stock(tiny, check, name)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", names_of("windows", "sinks", "softcap"))
def test_windows_wider_than_the_prompt(tiny, check, name):
    assert_equal_to_stock(tiny, check, name, sliding_window=36)


@pytest.mark.parametrize("name", ["DeepseekV2", "Mistral4"])
def test_replayed_steps_of_latent_rows_are_those_of_python(tiny, check, recording, name):
    """Complex angles, and queries that grow with their position."""
    model, prompt = model_of(name, tiny.device), tiny.prompt(FIRST, (0, 17, 1))
    outputs = []
    for how in ({"capture": "off"}, recording):
        with topkv.attach(model, tiny.settings(**how)) as handle:
            outputs.append(check.run(model, prompt, STEPS))
            assert handle.capture.replayed == (STEPS - 2 if how is recording else 0)
    for eager, replayed in zip(*(output[:2] for output in outputs), strict=True):
        assert torch.equal(eager, replayed)


@pytest.mark.parametrize("sharp", [1, 40])
def test_sinks_at_extremes_are_those_of_float64(tiny, check, sharp):
    """Heads see nothing but their sink, or none of it, in prompts and steps; the softmax of keys
    may itself be all on one key."""
    model = model_of("GptOss", tiny.device, num_attention_heads=6, num_key_value_heads=2)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.self_attn.q_proj.weight.mul_(sharp)
            layer.self_attn.sinks.copy_(torch.tensor([-1e30, -80.0, 0.0, 80.0, 1e4, 1e30]))
    case, prompts = TransformersCase(lambda: copy.deepcopy(model)), [[*range(2, 47)]]
    with topkv.attach(copy.deepcopy(model), tiny.settings()) as handle:
        tokens, logits = case.generate(handle.model, prompts, STEPS, chunk=19)
    ask = (model, prompts[0], tokens[0])
    truth, stock = (case.dense_logits(*ask, kind) for kind in (torch.float64, torch.float32))
    assert logits.isfinite().all()
    check.close(logits[0], stock, truth, times=3)


@pytest.mark.parametrize("name", ["Mellum", "Qwen3"])
def test_classes_of_full_layers_may_slide_in_some(tiny, check, name):
    window = {"sliding_window": 9, "use_sliding_window": True, "layer_types": SLIDING[:2]}
    assert_equal_to_stock(tiny, check, name, **window)


@pytest.mark.sampled(5)
@pytest.mark.parametrize(
    "name", names_of("dense", "experts", "windows", "sinks", "states", "latent")
)
def test_a_small_budget_is_the_model_over_what_was_selected(name):
    if name in CONTRARY:
        pytest.skip("the stock model contradicts itself, so its whole forward is no oracle")
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
        with pytest.raises(CapabilityError, match="DogeAttention asks for its own attention"):
            check.run(model, tiny.prompt(FIRST), STEPS)
        check.all_free(handle)


def test_classes_derived_from_one_that_is_served_are_served(tiny):
    class Mine(transformers.LlamaForCausalLM):
        pass

    model = Mine(config_of("Llama")).eval().to(tiny.device)
    topkv.attach(model, tiny.settings()).detach()


WRAPPERS = {"Gemma3": "Gemma3", "Llava": "Llama"}


@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapper_of_a_text_model_is_refused_with_how_to_attach_it(tiny, check, name):
    kind, text = getattr(transformers, f"{name}ForConditionalGeneration"), WRAPPERS[name]
    seen = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    seen |= {"num_attention_heads": 2, "image_size": 28, "patch_size": 14}
    config = kind.config_class(text_config=config_of(text), vision_config=seen)
    torch.manual_seed(0)
    model = kind(config).eval().to(tiny.device)
    with pytest.raises(
        CapabilityError, match=f"wraps a model of text.*{text}ForCausalLM"
    ) as reported:
        topkv.attach(model, tiny.settings())
    prompt = tiny.prompt(FIRST, (0, 17))
    stock = check.run(model, prompt, STEPS)
    said = {"torch": torch, "transformers": transformers, "model": model}
    make, rest = str(reported.value).split("; then ")
    exec(make[make.index("with torch") :], said)
    exec("; ".join(rest.split(", ")[:2]), said)
    with topkv.attach(said["text"], tiny.settings()) as handle:
        ours = check.run(said["text"], prompt, STEPS)
        assert handle.coordinator.transfers_of().hits
    assert torch.equal(ours[0], stock[0])
    assert (ours[1] - stock[1]).abs().max() < 1e-4 * stock[1].abs().max()


@pytest.mark.parametrize("name", ["Mellum", "Qwen2Moe"])
def test_a_window_that_no_layer_has_is_no_reason(tiny, name):
    """Classes state a window whose layers are all full; where all slide there is nothing to do."""
    assert config_of(name).sliding_window is not None
    assert support.refusals(model_of(name)) == []
    (reason,) = support.refusals(model_of(name, layer_types=["sliding_attention"] * 2))
    assert "no layer attends to everything" in reason


def test_what_attach_says_of_a_mixed_model(tiny):
    """Layers are numbered over those that topkv serves, and beams are refused."""
    model = model_of("Gemma3", tiny.device)
    with topkv.attach(model, tiny.settings()) as handle:
        assert handle.shape.num_layers == 2
        cache = handle.new_cache()
        with pytest.raises(CapabilityError, match="reorder_cache"):
            cache.reorder_cache(torch.tensor([0]))
        model(**tiny.prompt(9), past_key_values=cache)
        held = 2 * 2 * cache.layers[0].keys.untyped_storage().nbytes()  # of all that was appended
        assert cache.stock_bytes == held > 0
        before = handle.coordinator.memory()
        assert handle.memory().left == handle.memory().device - before.device == held
        twin = cache.fork()
        assert handle.memory().left == held, "a copy shares what is not written in place"
        model(tiny.prompt(1)["input_ids"], past_key_values=twin)
        assert held < handle.memory().left == cache.stock_bytes + twin.stock_bytes
        cache.close()
        del twin
        assert handle.memory().left == 0
    with pytest.raises(CapabilityError, match="2 of 4 layers keep a cache of their own"):
        topkv.attach(model, tiny.settings(compile=True))


def test_kinds_of_layers_that_are_not_known_are_refused():
    (reason,) = support.refusals(make("FalconH1"))[1:2]
    assert "layer types ['hybrid']" in reason


def test_a_softcap_is_never_ignored(tiny, monkeypatch):
    """Refused are backends without softcap, layers left alone, and classes that only state one."""
    case = TransformersCase(lambda: model_of("Gemma2"))
    bench = Bench(subject_of("transformers", "engine", tier("cpu"), case))
    with pytest.raises(ConfigError, match="does not cap attention logits"), bench.attached():
        pass
    model = model_of("Gemma2", tiny.device)
    model.config._attn_implementation = "sdpa"
    with pytest.raises(CapabilityError, match="attn_implementation='eager'"):
        topkv.attach(model, tiny.settings())
    model = model_of("Granite", tiny.device)
    model.config.attn_logit_softcapping = 30.0
    with pytest.raises(CapabilityError, match="attn_logit_softcapping"):
        topkv.attach(model, tiny.settings())
    model.config._attn_implementation = "eager"
    monkeypatch.setattr(support, "group_of", lambda model: "softcap")
    reported = pytest.raises(CapabilityError, match="GraniteAttention asks for its own softcap")
    with topkv.attach(model, tiny.settings()) as handle, reported:
        model(**tiny.prompt(9), past_key_values=handle.new_cache())
