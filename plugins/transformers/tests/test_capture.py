"""Decode steps that are recorded and replayed are those that Python issues, to the last bit."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from transformers import StoppingCriteria, StoppingCriteriaList, TextStreamer

import topkv
from topkv_transformers import capture

SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False}
EAGER = {**SPARSE, "capture": "off"}
OPTIONS = {
    "greedy": {},
    "sampling": {"do_sample": True, "top_k": 20, "temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "no_repeat_ngram_size": 3},
    "several": {"do_sample": True, "num_return_sequences": 2, "top_k": 20},
    "chunks": {"prefill_chunk_size": 9},
    "end": {"eos_token_id": list(range(2, 14)), "min_new_tokens": 5},
    "scores": {"output_scores": True},
}


def generated(model, settings, prompt, steps=24, **options):
    """Sequences and logits of ``generate``, and what was captured."""
    torch.manual_seed(7)
    options = {"do_sample": False, **options}
    with topkv.attach(model, settings) as handle:
        output = model.generate(
            **prompt,
            **options,
            max_new_tokens=steps,
            output_logits=True,
            return_dict_in_generate=True,
        )
        return output.sequences, torch.stack(output.logits, 1), handle.capture


@pytest.mark.sampled(3)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("pads", [(0,), (0, 21, 1)], ids=["single", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_replayed_steps_are_those_of_python(tiny, recording, family, pads, options):
    model, prompt = tiny.model(family, layers=3), tiny.prompt(45, pads)
    settings = tiny.settings(**EAGER, dense_layers=[1], max_requests=6)
    stock, logits, off = generated(model, settings, prompt, **OPTIONS[options])
    ours, ours_logits, report = generated(model, settings | recording, prompt, **OPTIONS[options])
    assert off.off[0] == "the setting capture is 'off'"
    assert torch.equal(ours, stock)
    assert torch.equal(ours_logits, logits)
    # The prompt brings the first token; the next step runs in Python.
    assert report.replayed == logits.shape[1] - 2 > 0
    assert not report.off
    assert not report.eager
    assert report.seconds.keys() == report.graph_bytes.keys() == {(len(ours), 1)}
    assert f"{len(ours)} rows recorded in " in str(report)


def test_a_budget_that_covers_the_sequence_gives_the_stock_model(tiny, check, recording):
    model, prompt = tiny.model(layers=2), tiny.prompt(45, (0, 21, 1))
    sequences, stock, _ = check.run(model, prompt)
    truth = check.oracle(model, sequences, prompt)
    ours, logits, report = generated(model, tiny.settings(**recording), prompt)
    assert torch.equal(ours, sequences)
    assert report.replayed
    check.close(logits.double(), stock, truth)


def test_streamers_criteria_and_embeddings(tiny, recording):
    model, prompt = tiny.model(), tiny.prompt(30)
    embeds = model.get_input_embeddings()(prompt["input_ids"]).detach()

    class Reported(TextStreamer):
        def __init__(self):
            self.ids = []

        def put(self, ids):
            self.ids += ids.flatten().tolist()

        def end(self):
            self.ids.append(None)

    class AtTwelve(StoppingCriteria):
        def __call__(self, ids, scores, **kwargs):
            return torch.full((len(ids),), ids.shape[1] >= 12, device=ids.device)

    def reported(settings):
        streamer = Reported()
        criteria = StoppingCriteriaList([AtTwelve()])
        with topkv.attach(model, settings) as handle:
            model.generate(
                inputs_embeds=embeds,
                attention_mask=prompt["attention_mask"],
                streamer=streamer,
                stopping_criteria=criteria,
                do_sample=False,
                max_new_tokens=20,
            )
            return streamer.ids, handle.capture.replayed

    plain, none = reported(tiny.settings(**EAGER))
    ours, replayed = reported(tiny.settings(**SPARSE, **recording))
    assert ours == plain
    assert none == 0
    assert replayed == len(ours) - 3


def test_further_turns_forks_and_batch_sizes_share_recordings(tiny, recording):
    """Two caches of different sizes in turn, a second turn, a fork and a crop."""
    model = tiny.model("qwen3")
    first, second = tiny.prompt(30, (0,)), tiny.prompt(25, (0, 5), seed=3)

    def lives(settings):
        reported = []

        def go(cache, ids, mask, steps):
            output = model.generate(
                input_ids=ids,
                attention_mask=mask,
                past_key_values=cache,
                do_sample=False,
                max_new_tokens=steps,
                output_logits=True,
                return_dict_in_generate=True,
            )
            reported.append(torch.stack(output.logits, 1))
            return output.sequences, torch.nn.functional.pad(mask, (0, steps), value=1)

        with topkv.attach(model, settings) as handle:
            one, two = handle.new_cache(), handle.new_cache()
            ids_one, mask_one = go(one, *first.values(), 7)
            ids_two, mask_two = go(two, *second.values(), 9)
            twin = one.fork()
            ids_one, mask_one = go(one, ids_one, mask_one, 11)
            go(twin, ids_one[:, :-5], mask_one[:, :-5], 6)
            two.crop(-4)
            go(two, ids_two, mask_two, 5)
            for cache in (one, two, twin):
                cache.close()
            return reported, handle.capture

    plain, _ = lives(tiny.settings(**EAGER, max_requests=6))
    ours, report = lives(tiny.settings(**SPARSE, **recording, max_requests=6))
    assert all(map(torch.equal, ours, plain))
    assert len(ours) == len(plain)
    assert report.seconds.keys() == {(1, 1), (2, 1)}
    assert report.replayed > 20


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("positions", [True, False], ids=["positions", "no_positions"])
def test_a_loop_of_ones_own(tiny, recording, mode, positions):
    model, prompt = tiny.model(), tiny.prompt(21)

    def loop(settings):
        with topkv.attach(model, settings) as handle, mode():
            cache = handle.new_cache()
            logits = [model(**prompt, past_key_values=cache).logits[:, -1:]]
            for step in range(9):
                ids = logits[-1].argmax(-1)
                given = {"position_ids": torch.tensor([[21 + step]], device=ids.device)}
                output = model(ids, past_key_values=cache, **(given if positions else {}))
                assert output.past_key_values is cache
                logits.append(output.logits)
            cache.close()
            return torch.cat(logits), handle.capture.replayed

    plain, _ = loop(tiny.settings(**EAGER))
    ours, replayed = loop(tiny.settings(**SPARSE, **recording))
    assert torch.equal(ours, plain)
    assert replayed == 8


def with_gradients(model, ids, cache):
    with torch.enable_grad():
        return model(ids, past_key_values=cache).logits.detach()


def with_hidden_states(model, ids, cache):
    output = model(ids, past_key_values=cache, output_hidden_states=True)
    assert len(output.hidden_states) == 3
    return output.logits


def as_tuple(model, ids, cache):
    return model(ids, past_key_values=cache, return_dict=False)[0]


def by_embeddings(model, ids, cache):
    embeds = model.get_input_embeddings()(ids)
    return model(inputs_embeds=embeds, past_key_values=cache).logits


@pytest.mark.parametrize(
    ("call", "replayed"),
    [
        (with_gradients, False),
        (with_hidden_states, False),
        (by_embeddings, False),
        (as_tuple, True),
    ],
)
def test_calls_that_are_no_plain_steps_run_in_python(tiny, recording, call, replayed):
    model, prompt = tiny.model(), tiny.prompt(21)

    def loop(settings):
        with topkv.attach(model, settings) as handle, torch.no_grad():
            cache, reported = handle.new_cache(), []
            ids = model(**prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
            for _ in range(4):
                reported.append(model(ids, past_key_values=cache).logits)
            before = handle.capture.replayed
            reported.append(call(model, ids, cache))
            assert (handle.capture.replayed > before) == (
                replayed and settings["capture"] == "auto"
            )
            reported.append(model(ids, past_key_values=cache).logits)
            cache.close()
            return torch.cat(reported)

    plain = loop(tiny.settings(**EAGER))
    assert torch.equal(loop(tiny.settings(**SPARSE, **recording)), plain)


def move(model):
    weight = model.model.layers[0].mlp.up_proj.weight
    weight.data = weight.data.flip(0)


def write(model):
    model.model.layers[0].mlp.up_proj.weight.data.mul_(0.5)


def replace(model):
    model.model.layers[1].mlp.act_fn = torch.nn.Tanh()


def rescale(model):
    model.model.norm.variance_epsilon = 10.0


def hook(model):
    model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out * 0.5)


def wrap(model):
    mlp = model.model.layers[0].mlp
    own = mlp.forward
    mlp.forward = lambda x: own(x) * 2


CHANGES = {move: True, write: True, replace: True, rescale: True, hook: False, wrap: False}


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
@pytest.mark.parametrize("direct", [True, False], ids=["direct", "generate"])
def test_a_changed_module_is_noticed(tiny, recording, change, direct):
    def talk(settings):
        model, prompt = tiny.model(), tiny.prompt(21)
        with topkv.attach(model, settings) as handle:
            cache, reported = handle.new_cache(), []
            for turn in range(2):
                if direct:
                    with torch.no_grad():
                        inputs = tiny.prompt(5, seed=turn)["input_ids"]
                        for ids in inputs.split(1, 1):
                            reported.append(model(ids, past_key_values=cache).logits)
                else:
                    output = model.generate(
                        **prompt,
                        do_sample=False,
                        max_new_tokens=6,
                        output_logits=True,
                        return_dict_in_generate=True,
                    )
                    output.past_key_values.close()
                    reported += output.logits
                if not turn:
                    before = handle.capture.replayed
                    change(model)
            cache.close()
            return reported, handle.capture.replayed - before

    plain, _ = talk(tiny.settings(**EAGER))
    ours, replayed = talk(tiny.settings(**SPARSE, **recording))
    assert all(map(torch.equal, ours, plain))
    assert (replayed > 0) == CHANGES[change]


def test_what_cannot_be_recorded_runs_in_python_and_says_so(tiny, recording):
    def talk(settings):
        model, prompt = tiny.model(), tiny.prompt(21, (0, 4))
        mlp = model.model.layers[1].mlp

        class Syncing(type(mlp)):
            def forward(self, x):
                return super().forward(x) * (2.0 if x.sum().item() > 0 else 0.5)

        mlp.__class__ = Syncing
        return generated(model, settings, prompt)

    stock, logits, _ = talk(tiny.settings(**EAGER))
    with pytest.warns(RuntimeWarning, match="decode step of 2 rows cannot be captured"):
        ours, ours_logits, report = talk(tiny.settings(**SPARSE, **recording))
    assert torch.equal(ours, stock)
    assert torch.equal(ours_logits, logits)
    assert report.eager.keys() == {(2, 1)}
    assert not report.replayed


@pytest.mark.parametrize("at", ["recorded", "replayed"])
def test_an_interrupt_leaves_nothing_behind(tiny, check, recording, monkeypatch, at):
    model, prompt = tiny.model(), tiny.prompt(21)
    with topkv.attach(model, tiny.settings(**EAGER)):
        stock = model.generate(**prompt, do_sample=False, max_new_tokens=9)
    recorder = capture.CudaRecorder()
    interrupts = [True]

    def once(launch):
        def interrupted(*args):
            result = launch(*args)
            if interrupts:
                interrupts.pop()
                raise KeyboardInterrupt
            return result

        return interrupted

    record = once(recorder) if at == "recorded" else lambda body: once(recorder(body))
    monkeypatch.setattr(capture, "CudaRecorder", lambda: record)
    with topkv.attach(model, tiny.settings(**SPARSE, **recording)) as handle:
        with pytest.raises(KeyboardInterrupt):
            model.generate(**prompt, do_sample=False, max_new_tokens=9)
        check.all_free(handle)
        ours = model.generate(**prompt, do_sample=False, max_new_tokens=9)
        assert torch.equal(ours, stock)
        assert handle.capture.replayed
        check.all_free(handle)


def test_detach_gives_the_decoder_back(tiny, recording):
    model = tiny.model()
    with topkv.attach(model, tiny.settings(**recording)):
        assert "forward" in vars(model.model)
    assert "forward" not in vars(model.model)
    model.model.forward = own = model.model.forward
    with topkv.attach(model, tiny.settings(**recording)):
        assert model.model.forward is not own
    assert model.model.forward is own


def test_every_reason_is_named(tiny):
    model = tiny.model()
    model.model.rotary_emb.rope_type = "dynamic"
    with topkv.attach(model, tiny.settings(capture="off")) as handle:
        assert "the setting capture is 'off'" in handle.capture.off
        off = capture.refusals(model.model, evolve(handle.config, capturable=False))
    parts = ["'off'", "a plugin", "'dynamic'"] + ["CUDA graphs"] * (tiny.device.type == "cpu")
    assert len(off) == len(parts)
    assert all(any(part in each for each in off) for part in parts)
