"""An attached model is the stock model where the budget covers the sequence."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache, TextStreamer

import topkv
from topkv.errors import RequestError

SINGLE, PADDED = (0,), (0, 21, 1)
PROMPTS = {"single": (SINGLE, None), "padded": (PADDED, None), "chunked": (PADDED, 9)}
FAST = pytest.mark.parametrize("fast", [True, False], ids=["fast", "planned"])


def compare(tiny, check, family, settings, pads=PADDED, chunk=None, steps=24, layers=2):
    model = tiny.model(family, layers=layers)
    prompt = tiny.prompt(45, pads)
    sequences, stock, _ = check.run(model, prompt, steps)
    truth = check.oracle(model, sequences, prompt)
    with topkv.attach(model, tiny.settings(**settings)) as handle:
        ours = check.run(model, prompt, steps, prefill_chunk_size=chunk)
        assert torch.equal(ours[0], sequences)
        check.close(ours[1], stock, truth)
        ours[2].close()
        check.all_free(handle)


@FAST
@pytest.mark.parametrize("prompt", PROMPTS)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_budget_covers_the_sequence(tiny, check, family, prompt, fast):
    pads, chunk = PROMPTS[prompt]
    compare(tiny, check, family, {"resident_fast_path": fast}, pads, chunk)


@pytest.mark.parametrize("family", ["qwen2", "mistral"])
def test_the_other_families(tiny, check, family):
    compare(tiny, check, family, {})


@pytest.mark.parametrize("residency", ["resident", "streamed"])
@pytest.mark.parametrize("chunk", [None, 9])
def test_dense_layers(tiny, check, residency, chunk):
    settings = {"dense_layers": [0, 2], "dense_residency": residency}
    compare(tiny, check, "llama", settings, chunk=chunk, layers=3)


@pytest.mark.parametrize("residency", ["resident", "streamed"])
def test_all_layers_dense_need_no_budget(tiny, check, residency):
    settings = {"budget": 8, "buffer": 8, "layers": {"0-": residency}}
    compare(tiny, check, "llama", settings)


def test_shared_selection_and_units_of_one(tiny, check):
    compare(tiny, check, "llama", {"scope": "shared", "unit": 1, "ring_tokens": 4})


@pytest.mark.parametrize("pads", [SINGLE, PADDED], ids=["single", "padded"])
@pytest.mark.parametrize("whole", [True, False], ids=["all_ids", "new_ids"])
def test_second_turn(tiny, check, pads, whole):
    model = tiny.model("qwen3")
    first, more = tiny.prompt(30, pads), tiny.prompt(17, (0,) * len(pads), seed=1)

    def talk(cache):
        sequences, _, cache = check.run(model, first, 12, past_key_values=cache)
        columns = []
        hook = model.model.embed_tokens.register_forward_pre_hook(
            lambda module, args: columns.append(args[0].shape[1])
        )
        ids = torch.cat([sequences, more["input_ids"]], 1)
        mask = torch.nn.functional.pad(first["attention_mask"], (0, ids.shape[1] - 30), value=1)
        turn = {"input_ids": ids if whole else ids[:, -18:], "attention_mask": mask}
        sequences, logits, _ = check.run(model, turn, 12, past_key_values=cache)
        hook.remove()
        assert columns == [18] + [1] * 11
        if not whole:
            sequences = torch.cat([ids[:, :-18], sequences], 1)
        return sequences, logits, {"input_ids": ids, "attention_mask": mask}

    sequences, stock, prompt = talk(DynamicCache(config=model.config))
    truth = check.oracle(model, sequences, prompt)
    for fast in (True, False):
        with topkv.attach(model, tiny.settings(resident_fast_path=fast)) as handle:
            cache = handle.new_cache()
            ours, logits, _ = talk(cache)
            assert torch.equal(ours, sequences)
            check.close(logits, stock, truth)
            cache.close()
            check.all_free(handle)


def test_second_turn_in_chunks(tiny, check):
    """Equal where the stock model is right. Transformers 5.17 appends the first turn again there:
    that is refused, and the cache keeps its first turn."""
    model, first = tiny.model(), tiny.prompt(30, (0, 8))

    def turn(cache, ids, **options):
        mask = torch.nn.functional.pad(first["attention_mask"], (0, ids.shape[1] - 30), value=1)
        prompt = {"input_ids": ids, "attention_mask": mask}
        return check.run(model, prompt, 10, past_key_values=cache, **options)[0]

    stock_cache = DynamicCache(config=model.config)
    ids = turn(stock_cache, first["input_ids"])
    longer = torch.cat([ids, ids[:, -9:]], 1)
    stock = turn(copy.deepcopy(stock_cache), longer)
    turn(stock_cache, longer, prefill_chunk_size=4)
    stock_is_right = stock_cache.get_seq_length() == stock.shape[1] - 1
    with topkv.attach(model, tiny.settings(resident_fast_path=False)) as handle:
        cache = handle.new_cache()
        turn(cache, first["input_ids"])
        if stock_is_right:
            assert torch.equal(turn(cache, longer, prefill_chunk_size=4), stock)
        else:
            with pytest.raises(RequestError, match="attention_mask"):
                turn(cache, longer, prefill_chunk_size=4)
            assert cache.get_seq_length() == 39


def test_direct_calls_of_the_model(tiny, check):
    """Chunks of any size, the last of one token, and a first one that is all padding for a row."""
    model, prompt = tiny.model(), tiny.prompt(29, (0, 12, 3))
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    positions = (mask.cumsum(-1) - 1).clamp(min=0)

    def decode(cache):
        logits, start = [], 0
        with torch.no_grad():
            for end in (1, 7, 28, 29):
                output = model(
                    ids[:, start:end],
                    attention_mask=mask[:, :end],
                    position_ids=positions[:, start:end],
                    past_key_values=cache,
                )
                start = end
            step = positions[:, -1:]
            for count in range(1, 9):
                logits.append(output.logits[:, -1])
                step = step + 1
                output = model(
                    logits[-1].argmax(-1, keepdim=True),
                    attention_mask=torch.nn.functional.pad(mask, (0, count), value=1),
                    position_ids=step,
                    past_key_values=cache,
                )
        return torch.stack(logits, 1).double()

    stock = decode(DynamicCache(config=model.config))
    sequences = torch.cat([ids, stock.argmax(-1)], 1)
    truth = check.oracle(model, sequences, prompt)
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        check.close(decode(cache), stock, truth)
        assert cache.get_seq_length() == 37
        lengths = [handle.coordinator.length(slot) for slot in cache.slots]
        assert lengths == [37, 25, 34]


def test_positional_arguments_and_gradients(tiny):
    """A forward in eval mode with gradients enabled works, and builds no graph in the pools."""
    model, prompt = tiny.model(), tiny.prompt(11)
    stock = model(**prompt).logits
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        hidden = model.model(prompt["input_ids"], None, None, cache).last_hidden_state
        torch.testing.assert_close(model.lm_head(hidden), stock, rtol=1e-4, atol=1e-4)
        assert not any(store.buffer.requires_grad for store in handle.coordinator.manager.stores)


def test_sampling_with_the_same_seed(tiny):
    model, prompt = tiny.model(), tiny.prompt(20, (0, 5))
    options = {**prompt, "do_sample": True, "top_k": 20, "temperature": 0.8, "max_new_tokens": 16}

    def sample(**more):
        torch.manual_seed(3)
        return model.generate(**options, **more)

    stock, twice = sample(), sample(num_return_sequences=2)
    with topkv.attach(model, tiny.settings()) as handle:
        assert torch.equal(sample(), stock)
        assert torch.equal(sample(num_return_sequences=2), twice)
        assert handle.coordinator.requests.free == 4


def test_streamer(tiny):
    class Tokens(TextStreamer):
        def __init__(self):
            self.tokens = []

        def put(self, value):
            self.tokens += value.flatten().tolist()

        def end(self):
            self.tokens.append("end")

    model, prompt = tiny.model(), tiny.prompt(20)
    stock, ours = Tokens(), Tokens()
    model.generate(**prompt, streamer=stock, max_new_tokens=12, do_sample=False)
    with topkv.attach(model, tiny.settings()):
        model.generate(**prompt, streamer=ours, max_new_tokens=12, do_sample=False)
    assert ours.tokens == stock.tokens
    assert ours.tokens[-1] == "end"


@pytest.mark.parametrize("given", ["ids", "embeds", "inferred_mask", "nothing"])
def test_other_ways_to_give_a_prompt(tiny, given):
    model, prompt = tiny.model(), tiny.prompt(20, (0, 5))
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    options = {"max_new_tokens": 8, "do_sample": False}

    def call():
        if given == "ids":
            return model.generate(ids[:1], **options)
        if given == "embeds":
            embeds = model.get_input_embeddings()(ids)
            return model.generate(inputs_embeds=embeds, attention_mask=mask, **options)
        if given == "inferred_mask":
            return model.generate(ids, **options)
        return model.generate(**options)

    stock = call()
    with topkv.attach(model, tiny.settings()) as handle:
        assert torch.equal(call(), stock)
        assert handle.coordinator.requests.free == 4


def test_rows_that_end_early(tiny, check):
    """A finished row is fed padding until the last one ends, as in the stock model."""
    model, prompt = tiny.model(), tiny.prompt(20, (0, 3, 7))
    sequences, _, _ = check.run(model, prompt, 16)
    options = {**prompt, "max_new_tokens": 16, "do_sample": False}
    options["eos_token_id"] = int(sequences[1, 24])
    stock = model.generate(**options)
    with topkv.attach(model, tiny.settings()):
        assert torch.equal(model.generate(**options), stock)


def test_fork_and_crop(tiny, check):
    """Copies and shortened caches go on as the stock cache does."""
    model, prompt = tiny.model(), tiny.prompt(30, (0, 6))

    def talk(cache):
        sequences, _, cache = check.run(model, prompt, 13, past_key_values=cache)
        twin = copy.deepcopy(cache)
        cache.crop(-9)
        outputs = []
        for columns, each in ((sequences[:, :35], cache), (sequences[:, :43], twin)):
            mask = torch.nn.functional.pad(
                prompt["attention_mask"], (0, columns.shape[1] - 30), value=1
            )
            turn = {"input_ids": columns, "attention_mask": mask}
            outputs.append(check.run(model, turn, 10, past_key_values=each)[:2])
        return outputs

    stock = talk(DynamicCache(config=model.config))
    with topkv.attach(model, tiny.settings(max_requests=4)) as handle:
        for (sequences, logits), (expected, truth) in zip(
            talk(handle.new_cache()), stock, strict=True
        ):
            assert torch.equal(sequences, expected)
            torch.testing.assert_close(logits, truth, rtol=1e-4, atol=1e-4)


def test_a_row_cropped_within_its_padding_may_have_more_of_it(tiny):
    model, prompt = tiny.model(), tiny.prompt(20, (0, 8))
    ids, mask = prompt["input_ids"], prompt["attention_mask"]
    with topkv.attach(model, tiny.settings()) as handle, torch.no_grad():
        cache = handle.new_cache()
        model(ids[:, :3], attention_mask=mask[:, :3], past_key_values=cache)
        cache.crop(-2)
        model(ids[:, 1:], attention_mask=mask, past_key_values=cache)
        assert [handle.coordinator.length(slot) for slot in cache.slots] == [20, 12]
