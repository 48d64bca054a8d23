"""Steps of mixed models: recorded once windows are full, and states have begun."""

from __future__ import annotations

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from model_cases import SLIDING, model_of, names_of

import topkv
from topkv_transformers import recorded_stock
from topkv_transformers.classes import CLASSES
from topkv_transformers.state import CacheState
from topkv_transformers.stock import StockLayers

SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False}
EAGER = {**SPARSE, "capture": "off"}
WINDOWS = ["Gemma3", "GptOss", "Cohere2"]
STATES = ["Qwen3Next", "Lfm2", "Bamba", "NemotronH"]


def slides(name):
    return any(name in CLASSES[group] for group in ("windows", "sinks", "softcap"))


def mixed(name, device):
    sliding = {"layer_types": SLIDING, "sliding_window": 12} if slides(name) else {}
    return model_of(name, device, **sliding)


def turn(model, cache, ids, mask, steps):
    """Logits ``[B, steps, V]`` of further tokens, all tokens, and the mask of them."""
    output = model.generate(
        input_ids=ids, attention_mask=mask, past_key_values=cache, do_sample=False,
        min_new_tokens=steps, max_new_tokens=steps, output_logits=True,
        return_dict_in_generate=True,
    )  # fmt: skip
    grown = torch.nn.functional.pad(mask, (0, steps), value=1)
    return torch.stack(output.logits, 1), output.sequences, grown


@pytest.mark.sampled(12)
@pytest.mark.parametrize("pads", [(0,), (0, 21, 1)], ids=["single", "padded"])
@pytest.mark.parametrize(
    "tokens",
    [pytest.param(5, id="filling"), pytest.param(40, id="full", marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("name", names_of("windows", "sinks", "softcap", "states"))
def test_replayed_steps_are_those_of_python(tiny, recording, name, tokens, pads):
    """A prompt that fills no window is decoded by Python until all are full, in each row."""
    model, prompt = mixed(name, tiny.device), tiny.prompt(max(tokens, 1 + max(pads)), pads)

    def lived(settings):
        with topkv.attach(model, tiny.settings(**settings, max_requests=3)) as handle:
            cache = handle.new_cache()
            logits, *_ = turn(model, cache, *prompt.values(), 30)
            held = [each.clone() for each in cache.state.stock.tensors]
            return logits, held, handle.capture

    plain, held, off = lived(EAGER)
    ours, ours_held, report = lived(SPARSE | recording)
    assert torch.equal(ours, plain)
    assert all(map(torch.equal, ours_held, held))
    assert off.replayed == 0
    assert not report.eager
    real = prompt["input_ids"].shape[1] - max(pads)
    filling = max(0, 12 - real) if slides(name) else 0
    # The prompt brings the first token, and the first step of those recorded runs in Python.
    assert report.replayed == 28 - filling > 0


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [*WINDOWS, *STATES])
def test_caches_in_turn_forks_and_further_turns(tiny, recording, name):
    """The cache whose windows a recording holds changes from step to step."""
    model = mixed(name, tiny.device)
    first, second = tiny.prompt(30, (0,)), tiny.prompt(25, (0,), seed=3)

    def lives(settings):
        reported = []
        with topkv.attach(model, tiny.settings(**settings, max_requests=6)) as handle:
            caches = [handle.new_cache(), handle.new_cache()]
            rows = [[*first.values()], [*second.values()]]
            for steps in (7, 3, 4):
                for number, cache in enumerate(caches):
                    logits, *rows[number] = turn(model, cache, *rows[number], steps)
                    reported.append(logits)
                if steps == 3:  # goes on from the middle of what its source goes on to
                    caches.append(caches[0].fork())
                    rows.append(list(rows[0]))
            return reported, handle.capture.replayed

    plain, none = lives(EAGER)
    ours, replayed = lives(SPARSE | recording)
    assert none == 0 < replayed
    assert len(ours) == len(plain) == 7
    assert all(map(torch.equal, ours, plain))


def test_a_step_whose_head_fails_counts_as_it_does_in_python(tiny, recording):
    """A cache that goes back to before a step finds windows as they were."""
    model, prompt = mixed("Gemma3", tiny.device), tiny.prompt(30)

    def lived(settings):
        with topkv.attach(model, tiny.settings(**settings)) as handle, torch.no_grad():
            cache, reported = handle.new_cache(), []

            def step(ids):
                placed = torch.full_like(ids, cache.state.seen)
                return model(ids, position_ids=placed, past_key_values=cache).logits

            ids = model(**prompt, past_key_values=cache).logits[:, -1:].argmax(-1)
            for number in range(6):
                if number == 4:
                    hook = model.lm_head.register_forward_pre_hook(fail)
                    with pytest.raises(ZeroDivisionError):
                        step(ids)
                    hook.remove()
                reported.append(step(ids))
                ids = reported[-1].argmax(-1)
            before, kept = cache.state.seen, cache.state.stock.keep()
            reported.append(step(ids))
            handle.requests.truncate(cache.state, before, kept)
            reported.append(step(ids))
            assert torch.equal(reported[-1], reported[-2])
            return torch.cat(reported), handle.capture.replayed

    def fail(*_):
        raise ZeroDivisionError

    plain, _ = lived(EAGER)
    ours, replayed = lived(SPARSE | recording)
    assert torch.equal(ours, plain)
    assert replayed == 8


ACTIONS = st.lists(
    st.tuples(
        st.sampled_from(["step"] * 5 + ["python", "unplaced", "back", "fork", "end"]),
        st.integers(0, 5),
    ),
    min_size=8,
    max_size=24,
)


def lives(model, tiny, actions, settings):
    """Logits of all steps of caches that take turns, and how many steps were replayed."""
    reported, ids = [], torch.arange(40, device=tiny.device)[None] % 90 + 2
    with topkv.attach(model, tiny.settings(**settings, max_requests=5)) as handle, torch.no_grad():

        def fresh():
            cache = handle.new_cache()
            model(ids[:, : 30 if len(reported) % 2 else 9], past_key_values=cache)
            return [cache, None]

        caches = [fresh()]
        for number, (action, which) in enumerate(actions):
            each = caches[which % len(caches)]
            cache, before = each
            state = cache.state
            if action == "fork" and len(caches) < 4:
                caches.append([cache.fork(), None])
            elif action == "end":
                cache.close()
                each[:] = fresh()
            elif action == "back" and before:
                handle.requests.truncate(state, *before)
                each[1] = None
            else:
                each[1] = state.seen, state.stock.keep()
                token = ids[:, number : number + 1]
                more = {"output_hidden_states": True} if action == "python" else {}
                if action != "unplaced":
                    more["position_ids"] = torch.full_like(token, state.seen)
                reported.append(model(token, past_key_values=cache, **more).logits)
        return reported, handle.capture


def compare(tiny, recording, name, examples, phases=tuple(hypothesis.Phase)):
    model, replayed = mixed(name, tiny.device), []

    @given(ACTIONS)
    @hypothesis.settings(max_examples=examples, deadline=None, phases=phases)
    def check(actions):
        plain, _ = lives(model, tiny, actions, EAGER)
        ours, report = lives(model, tiny, actions, SPARSE | recording)
        assert (report.off, report.eager) == ([], {})
        replayed.append(report.replayed)
        assert all(map(torch.equal, ours, plain))

    check()
    assert sum(replayed) > examples


@pytest.mark.slow
@pytest.mark.parametrize("name", ["Gemma3", pytest.param("Bamba", marks=pytest.mark.nightly)])
def test_caches_in_any_order(tiny, recording, name):
    compare(tiny, recording, name, 25)


def never_taken(self, state):
    self.fixed = self.fixed or [each.clone() for each in state.stock.tensors]


def shared(self, state):
    self._given, tensors = self.fixed, iter(self.fixed)
    for layer in state.stock:
        layer.__dict__ = recorded_stock._with(vars(layer), tensors)
        if isinstance(layer, recorded_stock.DynamicSlidingWindowLayer):
            layer.cumulative_length += 1


FIXED = recorded_stock.FixedStock
BROKEN = {
    "what another cache holds": ("Gemma3", FIXED, "take", never_taken),
    "a step whose token is forgotten": ("Gemma3", FIXED, "end", lambda self: None),
    "what caches share": ("Gemma3", FIXED, "give", shared),
    "what Python wrote": ("Bamba", recorded_stock, "in_place", lambda layer: False),
}


@pytest.mark.slow
@pytest.mark.parametrize("what", BROKEN)
def test_broken_windows_are_noticed(tiny, recording, monkeypatch, what):
    """The test above fails with broken windows, or it would say little."""
    name, *broken = BROKEN[what]
    monkeypatch.setattr(*broken)
    with pytest.raises(AssertionError):
        compare(tiny, recording, name, 25, [hypothesis.Phase.generate])


def test_windows_are_full_when_padding_has_left_them():
    class Layer(recorded_stock.DynamicSlidingWindowLayer):
        pass

    state = CacheState(StockLayers(lambda: [Layer(8), None]))
    state.begin([0, 1])
    (layer,) = state.stock
    for seen, pads, full in ((7, 0, False), (8, 0, True), (10, 3, False), (11, 3, True)):
        state.seen = layer.cumulative_length = seen
        state.padding[:] = [0, pads]
        assert recorded_stock.are_steady(state) is full
    layer.record_past = True
    assert not recorded_stock.are_steady(state)


@pytest.mark.parametrize(
    ("begun", "steady"), [([], True), ([True], True), ([False, True], False), ([False], True)]
)
def test_states_are_steady_once_they_have_begun(begun, steady):
    """States that took nothing of a prompt are steady too: some layers keep an unused cache."""

    class Layer:
        pass

    state = CacheState(StockLayers(lambda: [Layer(), None]))
    state.begin([0])
    (layer,) = state.stock
    layer.has_previous_state = dict(enumerate(begun))
    state.seen = 9
    assert recorded_stock.are_steady(state) is steady
