"""A second thread is refused before it changes anything, wherever the first one is."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch

import topkv
from topkv.errors import RequestError

GREEDY = {"max_new_tokens": 8, "do_sample": False}


class Gate:
    """Holds whoever comes by until it is opened."""

    def __init__(self):
        self.reached, self.opened = threading.Event(), threading.Event()

    def __call__(self, *_):
        self.reached.set()
        self.opened.wait()


@contextmanager
def held(gate, hook, call):
    """``call`` in another thread, which waits at the gate. Yields its future."""
    with ThreadPoolExecutor(1) as other:
        future = other.submit(call)
        future.add_done_callback(lambda _: gate.reached.set())
        try:
            gate.reached.wait()
            assert not future.done(), future.exception()
            yield future
        finally:
            gate.opened.set()
            hook.remove()


def gate_at(model, layer=1):
    gate = Gate()
    return gate, model.model.layers[layer].register_forward_pre_hook(gate)


@pytest.mark.parametrize("first", ["generate", "forward"])
@pytest.mark.parametrize(
    "second", ["generate", "forward", "plain", "crop", "fork", "detach", "abandon", "close"]
)
def test_a_second_thread_changes_nothing(tiny, check, first, second):
    model, prompt = tiny.model(), tiny.prompt(20, (0, 4))
    with torch.no_grad():
        plain, sequences = model(**prompt).logits, model.generate(**prompt, **GREEDY)
    with topkv.attach(model, tiny.settings(max_requests=8)) as handle:
        mine = handle.new_cache()
        model.generate(**prompt, past_key_values=mine, **GREEDY)

        def forward():
            with torch.no_grad():
                return model(**prompt, past_key_values=handle.new_cache()).logits

        calls = {
            "generate": lambda: model.generate(**prompt, **GREEDY),
            "forward": forward,
            "plain": lambda: model(**prompt),
            "crop": lambda: mine.crop(-2),
            "fork": mine.fork,
            "detach": handle.detach,
            "abandon": handle.abandon,
        }
        with held(*gate_at(model), calls[first]) as future:
            if second == "close":  # cannot be refused, and has to wait
                mine.close()
            else:
                with pytest.raises(RequestError, match="one thread at a time"):
                    calls[second]()
                assert mine.get_seq_length() == 27
        result = future.result()
        if first == "generate":
            assert torch.equal(result, sequences)
        else:
            torch.testing.assert_close(result[:, 4:], plain[:, 4:], rtol=1e-4, atol=1e-4)
        assert model.config._attn_implementation == "sdpa"
        assert torch.equal(model.generate(**prompt, **GREEDY), sequences)
        mine.close()
        del result, future
        check.all_free(handle)
    with torch.no_grad():
        assert torch.equal(model(**prompt).logits, plain)


def test_threads_take_turns(tiny, check):
    """One after the other they may, also after one that died in a forward."""
    model, prompt = tiny.model(), tiny.prompt(20, (0, 4))
    stock = model.generate(**prompt, **GREEDY)
    with topkv.attach(model, tiny.settings()) as handle:

        def dies():
            def interrupt(*_):
                raise KeyboardInterrupt

            hook = model.model.layers[1].register_forward_pre_hook(interrupt)
            with pytest.raises(KeyboardInterrupt), torch.no_grad():
                model(**prompt, past_key_values=handle.new_cache())
            hook.remove()

        for _ in range(2):
            with ThreadPoolExecutor(1) as other:
                other.submit(dies).result()
            with ThreadPoolExecutor(1) as other:
                ours = other.submit(lambda: model.generate(**prompt, **GREEDY)).result()
            assert torch.equal(ours, stock)
            assert torch.equal(model.generate(**prompt, **GREEDY), stock)
        check.all_free(handle)


def test_models_that_share_a_config_in_two_threads(tiny):
    """The model that ends first names its own attention again, while the other one still runs."""
    config = tiny.config()
    models = [tiny.model(seed=seed, config=config) for seed in (1, 2)]
    prompt = tiny.prompt(20, (0, 4))
    handles = [topkv.attach(model, tiny.settings()) for model in models]

    def forward(number):
        with torch.no_grad():
            models[number](**prompt, past_key_values=handles[number].new_cache())

    gate, hook = gate_at(models[0])
    with held(gate, hook, lambda: forward(0)) as first:
        with held(*gate_at(models[1]), lambda: forward(1)) as second:
            gate.opened.set()
            first.result()
        with pytest.raises(RequestError, match="share one config"):
            second.result()
    assert config._attn_implementation == "sdpa"
    for handle in handles:
        handle.detach()
    assert config._attn_implementation == "sdpa"


def test_a_plain_call_of_another_thread_names_nothing(tiny, recording, monkeypatch):
    """The plain call began while a forward was open, and comes to its layers behind the end."""
    model, prompt = tiny.model(), tiny.prompt(20)
    with torch.no_grad():
        plain = model.model(**prompt).last_hidden_state
    with topkv.attach(model, tiny.settings(**recording)) as handle:
        main, reached, ended = threading.current_thread(), threading.Event(), threading.Event()
        attention, futures = handle.requests.attention, []
        names = attention.name_ours

        def name_ours():
            if threading.current_thread() is not main:
                reached.set()
                ended.wait()
            names()

        def elsewhere():
            with torch.no_grad():
                return model.model.forward(**prompt)  # which no hook refuses

        def start(*_):
            if threading.current_thread() is main:
                futures.append(other.submit(elsewhere))
                futures[0].add_done_callback(lambda _: reached.set())
                reached.wait()

        monkeypatch.setattr(attention, "name_ours", name_ours)
        with ThreadPoolExecutor(1) as other:
            hook = model.model.layers[1].register_forward_pre_hook(start)
            with torch.no_grad():
                model(**prompt, past_key_values=handle.new_cache())
            hook.remove()
            ended.set()
        assert len(futures) == 1
        assert model.config._attn_implementation == "sdpa"
        with torch.no_grad():
            assert torch.equal(model.model(**prompt).last_hidden_state, plain)
