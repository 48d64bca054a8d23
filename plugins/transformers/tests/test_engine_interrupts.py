"""Ctrl-C in the middle of the calls of the coordinator: nothing is lost and nothing stays shut."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from model_cases import model_of

import topkv
from topkv.errors import RequestError
from topkv_testing.integrity import check_integrity

GREEDY = {"max_new_tokens": 8, "do_sample": False}

EAGER = {"capture": "off"}
"""A replayed step calls nothing; ``test_capture.py`` cuts those."""

SECOND = {"attention", "request_begin", "reserve", "fork", "truncate"}
"""Calls that are cut at the second row or layer; others at the first."""

REACHED_BY = {
    "generate": "forward_begin attention offload forward_end request_begin request_end reserve",
    "turn": "forward_begin attention offload forward_end reserve",
    "begin": "forward_begin attention forward_end request_begin",
    "step": "forward_begin attention offload forward_end",
    "fork": "fork",
    "close": "request_end",
}
"""Ways to use a model, and the calls of the coordinator that each comes by."""

PAIRS = [(action, call) for action, calls in REACHED_BY.items() for call in calls.split()]


class Cut:
    """Patch that raises from a call of the coordinator, before or after the call does its work."""

    def __init__(self, coordinator, call, error=KeyboardInterrupt, late=False):
        self.coordinator, self.call, self.error, self.late = coordinator, call, error, late
        self.left = 2 if call in SECOND else 1

    def __enter__(self):
        real = getattr(self.coordinator, self.call)
        setattr(self.coordinator, self.call, partial(self.run, real))

    def __exit__(self, *exception):
        delattr(self.coordinator, self.call)

    def run(self, real, *args, **kwargs):
        self.left -= 1
        if self.left == 0 and not self.late:
            raise self.error
        result = real(*args, **kwargs)
        if self.left == 0:
            raise self.error
        return result


class Talk:
    """Two rows that have had a turn, and the ways to go on with them or beside them."""

    def __init__(self, model, handle, prompt):
        self.model, self.handle, self.prompt = model, handle, prompt
        self.cache = handle.new_cache()
        self.first = model.generate(**prompt, past_key_values=self.cache, **GREEDY)

    def mask(self, columns):
        held = self.prompt["attention_mask"]
        return torch.nn.functional.pad(held, (0, columns - held.shape[1]), value=1)

    def generate(self):
        return self.model.generate(**self.prompt, **GREEDY)

    def turn(self, cache=None):
        ids = torch.cat([self.first, self.first[:, -6:]], 1)
        cache = self.cache if cache is None else cache
        options = {"attention_mask": self.mask(ids.shape[1]), "past_key_values": cache}
        return self.model.generate(ids, **options, **GREEDY)

    def begin(self):
        self.model(**self.prompt, past_key_values=self.handle.new_cache())

    def step(self):
        columns = self.cache.get_seq_length() + 1
        options = {"attention_mask": self.mask(columns), "past_key_values": self.cache}
        return self.model(self.first[:, -1:], **options)

    def fork(self):
        return self.cache.fork()

    def close(self):
        self.cache.fork().close()

    def state(self):
        coordinator = self.handle.coordinator
        lengths = [coordinator.length(slot) for slot in self.cache.slots]
        used = coordinator.manager.host.used
        return coordinator.requests.free, used, lengths, self.cache.get_seq_length()


@pytest.mark.sampled(6)
@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize(
    "error", [KeyboardInterrupt, pytest.param(RuntimeError, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize(("action", "call"), PAIRS)
def test_a_cut_call_leaves_nothing_behind(tiny, action, call, error, late):
    model, prompt = tiny.model(), tiny.prompt(20, (0, 4))
    with topkv.attach(model, tiny.settings(max_requests=5, **EAGER)) as handle, torch.no_grad():
        talk = Talk(model, handle, prompt)
        before = talk.state()
        expected = talk.turn(talk.fork())
        for _ in range(2):
            with Cut(handle.coordinator, call, error, late), pytest.raises(error):
                getattr(talk, action)()
            assert torch.equal(talk.generate(), talk.first)
            assert talk.state() == before
            check_integrity(handle.coordinator)
        assert torch.equal(talk.turn(), expected)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
def test_an_undo_that_is_cut_is_done_later(tiny, late):
    model, prompt = tiny.model(), tiny.prompt(20, (0, 4))
    with topkv.attach(model, tiny.settings(max_requests=3, **EAGER)) as handle, torch.no_grad():
        talk = Talk(model, handle, prompt)
        before = talk.state()
        with Cut(handle.coordinator, "request_end", late=late), pytest.raises(KeyboardInterrupt):
            talk.fork()  # has no slot for the second row, and gives that of the first back
        handle.abandon()
        assert talk.state() == before
        check_integrity(handle.coordinator)


@pytest.mark.parametrize(("action", "call"), PAIRS)
def test_a_model_is_detached_after_a_cut_call(tiny, action, call):
    model, prompt = tiny.model(), tiny.prompt(20, (0, 4))
    stock = model(**prompt).logits
    with topkv.attach(model, tiny.settings(max_requests=5, **EAGER)) as handle, torch.no_grad():
        talk = Talk(model, handle, prompt)
        with Cut(handle.coordinator, call), pytest.raises(KeyboardInterrupt):
            getattr(talk, action)()
    assert model.config._attn_implementation == "sdpa"
    assert torch.equal(model(**prompt).logits, stock)


@pytest.mark.parametrize("late", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("name", [None, "Gemma3", "Qwen3Next"])
def test_a_forward_that_is_cut_as_it_closes_was_or_was_not(tiny, name, late):
    """The forward is in the books of both the coordinator and the cache, or in none."""
    model = model_of(name, tiny.device) if name else tiny.model()
    prompt = tiny.prompt(20, (0, 4))
    with topkv.attach(model, tiny.settings(**EAGER)) as handle, torch.no_grad():
        talk = Talk(model, handle, prompt)
        held, talk.cache = talk.cache, talk.fork()
        expected = talk.step().logits
        after, talk.cache = talk.state()[2:], held
        before = talk.state()[2:]
        cut = Cut(handle.requests, "_close_forward", late=late)
        with cut, pytest.raises(KeyboardInterrupt):
            talk.step()
        handle.abandon()
        assert talk.state()[2:] == (after if late else before)
        check_integrity(handle.coordinator)
        if not late:
            assert torch.equal(talk.step().logits, expected)


@pytest.mark.parametrize("action", ["crop", "fork", "step", "turn"])
def test_any_call_goes_on_after_an_interrupted_forward(tiny, action):
    """KeyboardInterrupt runs no hooks: whatever is called next cleans up."""
    model, prompt = tiny.model(), tiny.prompt(20, (0, 4))
    with topkv.attach(model, tiny.settings(**EAGER)) as handle, torch.no_grad():
        talk = Talk(model, handle, prompt)
        expected = talk.turn(talk.fork())
        with Cut(handle.coordinator, "attention"), pytest.raises(KeyboardInterrupt):
            talk.step()
        if action == "crop":
            talk.cache.crop(-3)
        elif action == "fork":
            talk.cache = talk.fork()
        elif action == "step":
            talk.step()
            talk.cache.crop(-1)
        assert torch.equal(talk.turn(), expected)
        check_integrity(handle.coordinator)


def test_a_crop_that_is_cut_ends_alike_in_all_rows(tiny):
    model, prompt = tiny.model(), tiny.prompt(20, (0, 4))
    with topkv.attach(model, tiny.settings(**EAGER)) as handle, torch.no_grad():
        talk = Talk(model, handle, prompt)
        expected = talk.turn(talk.fork())
        with Cut(handle.coordinator, "truncate"), pytest.raises(KeyboardInterrupt):
            talk.cache.crop(-5)
        assert talk.state()[2:] == ([22, 18], 22)
        assert torch.equal(talk.turn(), expected)


def test_a_forward_that_was_dropped_from_within_is_reported(tiny):
    """The forward's tokens are not in the cache; to return logits as if they were is wrong."""
    model, prompt = tiny.model(), tiny.prompt(20, (0, 4))
    with topkv.attach(model, tiny.settings(**EAGER)) as handle, torch.no_grad():
        talk = Talk(model, handle, prompt)
        expected = talk.turn(talk.fork())
        hook = model.model.layers[1].register_forward_hook(lambda *_: talk.cache.crop(0))
        with pytest.raises(RequestError, match="dropped"):
            talk.step()
        hook.remove()
        assert torch.equal(talk.turn(), expected)
