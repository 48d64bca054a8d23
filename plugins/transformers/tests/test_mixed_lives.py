"""Random lives of caches of mixed models: chunks, tokens, copies, cuts, interrupts, ends.

Whatever came before, a forward gives the logits of the stock model over all tokens at once. A
cache cannot be cropped to what a layer has forgotten; the error says so, and nothing changes.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)
from model_cases import model_of

import topkv
from topkv.errors import CapabilityError
from topkv_prefixes.stored import StoredSessions

pytestmark = pytest.mark.slow

WINDOW, LONGEST, MOST = 24, 70, 3
SETTINGS = {"max_requests": 2 * MOST, "max_tokens": 1920, "ring_tokens": 32}


@pytest.fixture(autouse=True)
def one_thread():
    """Linear attention is thousands of tiny products a forward: threads that share a core, as in
    a container that has a part of a machine, wait for each other at every one of them."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


class Interruption(Exception):
    """Raised between two layers."""


class Lives(RuleBasedStateMachine):
    """Caches of two rows each, the second of which is padded; subclasses name the class of model.

    Attributes:
        caches: of each cache the padded tokens that it has seen, ``[2, n]``.
    """

    name, options = "", {}

    @initialize(pads=st.integers(0, 9), unit=st.sampled_from([1, 4]), fast=st.booleans())
    def attach(self, pads, unit, fast):
        self.tiny, self.pads = self.kit, pads
        self.model = model_of(self.name, **self.options)
        self.twin = model_of(self.name, **self.options)
        settings = self.tiny.settings(unit=unit, resident_fast_path=fast, **SETTINGS)
        self.handle = topkv.attach(self.model, settings)
        self.generator = torch.Generator().manual_seed(pads)
        self.caches = []

    def tokens(self, count, seen):
        new = torch.randint(2, 96, (2, count), generator=self.generator)
        columns = torch.arange(seen, seen + count)
        new[1, columns < self.pads] = 0
        return new

    def given(self, ids, start=0):
        mask = torch.ones_like(ids)
        mask[1, : self.pads] = 0
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        return {
            "input_ids": ids[:, start:],
            "attention_mask": mask,
            "position_ids": positions[:, start:],
        }

    def pick(self, data):
        return data.draw(st.integers(0, len(self.caches) - 1), "cache")

    @precondition(lambda self: len(self.caches) < MOST)
    @rule()
    def begin(self):
        self.caches.append((self.handle.new_cache(), self.tokens(0, 0)))

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.sampled_from([1, 1, 1, 2, 7, 12, 23, 24, 25]))
    @torch.no_grad()
    def forward(self, data, count):
        at = self.pick(data)
        cache, seen = self.caches[at]
        start = seen.shape[1]
        if start + count > LONGEST:
            return
        ids = torch.cat([seen, self.tokens(count, start)], 1)
        ours = self.model(**self.given(ids, start), past_key_values=cache).logits
        truth = self.twin(**self.given(ids)).logits[:, start:]
        real = self.given(ids)["attention_mask"][:, start:].bool()
        apart = (ours - truth)[real].abs().max() / truth.abs().max()
        assert apart < 1e-3, f"logits are {apart:.1e} apart"
        self.caches[at] = (cache, ids)

    @precondition(lambda self: self.caches)
    @rule(data=st.data(), count=st.sampled_from([1, 9]), layer=st.integers(0, 3))
    @torch.no_grad()
    def interrupt(self, data, count, layer):
        """A forward that does not come to its end leaves nothing, in no layer."""
        cache, seen = self.caches[self.pick(data)]
        ids = torch.cat([seen, self.tokens(count, seen.shape[1])], 1)

        def fail(*_):
            raise Interruption

        hook = self.model.model.layers[layer].register_forward_hook(fail)
        try:
            with pytest.raises(Interruption):
                self.model(**self.given(ids, seen.shape[1]), past_key_values=cache)
        finally:
            hook.remove()

    @precondition(lambda self: any(seen.shape[1] > self.pads for _, seen in self.caches))
    @rule(data=st.data(), steps=st.integers(1, 4))
    def interrupt_generate(self, data, steps):
        """A call that fails after several forwards takes all of them back."""
        filled = [each for each in self.caches if each[1].shape[1] > self.pads]
        cache, seen = data.draw(st.sampled_from(filled), "cache")
        ids = torch.cat([seen, self.tokens(3, seen.shape[1])], 1)
        given = self.given(ids)
        left = [steps]

        def fail(*_):
            left[0] -= 1
            if not left[0]:
                raise Interruption

        hook = self.model.model.layers[2].register_forward_hook(fail)
        try:
            with pytest.raises(Interruption):
                self.model.generate(
                    given["input_ids"],
                    attention_mask=given["attention_mask"],
                    past_key_values=cache,
                    max_new_tokens=steps,
                    do_sample=False,
                )
        finally:
            hook.remove()

    @precondition(lambda self: 0 < len(self.caches) < MOST)
    @rule(data=st.data())
    def fork(self, data):
        cache, seen = self.caches[self.pick(data)]
        self.caches.append((cache.fork(), seen))

    @precondition(lambda self: any(len(seen[0]) for _, seen in self.caches))
    @rule(data=st.data())
    def crop(self, data):
        filled = [at for at, (_, seen) in enumerate(self.caches) if len(seen[0])]
        at = data.draw(st.sampled_from(filled), "cache")
        cache, seen = self.caches[at]
        length = seen.shape[1]
        removed = data.draw(st.integers(1, length), "removed")
        if removed < length and (not self.windows or length >= WINDOW):
            with pytest.raises(CapabilityError, match="cannot be cropped"):
                cache.crop(-removed)
            return
        cache.crop(-removed)
        self.caches[at] = (cache, seen[:, : length - removed])

    @precondition(lambda self: self.caches)
    @rule(data=st.data())
    def close(self, data):
        at = self.pick(data)
        cache, _ = self.caches.pop(at)
        cache.close()
        assert cache.stock_bytes == 0

    @invariant()
    def lengths_agree(self):
        for cache, seen in getattr(self, "caches", ()):
            assert cache.get_seq_length() == seen.shape[1]

    def teardown(self):
        if hasattr(self, "handle"):
            for cache, _ in self.caches:
                cache.close()
            self.check.all_free(self.handle)
            self.handle.detach()


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ["Cohere2", "Qwen3Next", "Lfm2"])
def test_lives_of_mixed_caches(tiny, check, name):
    if tiny.device.type != "cpu":
        pytest.skip("what is shown is bookkeeping")

    class Machine(Lives):
        kit = tiny
        windows = name == "Cohere2"
        options = {"sliding_window": WINDOW} if windows else {}

    Machine.name, Machine.check = name, check
    run_state_machine_as_test(Machine, settings=settings(max_examples=25, stateful_step_count=25))


def test_pages_alone_hold_no_prefix_and_no_session(tiny, tmp_path):
    model = model_of("Gemma3", tiny.device)
    with pytest.raises(CapabilityError, match="layers keep states of their own"):
        topkv.attach(model, tiny.settings(pages="prefixes"))
    with topkv.attach(model, tiny.settings()) as handle:
        cache = handle.new_cache()
        prompt = tiny.prompt(20)
        model.generate(**prompt, past_key_values=cache, do_sample=False, max_new_tokens=2)
        with (
            StoredSessions("files", {"path": tmp_path}) as stored,
            pytest.raises(CapabilityError, match="cannot be suspended"),
        ):
            handle.suspend(cache, stored["chat"])
        assert cache.slots
