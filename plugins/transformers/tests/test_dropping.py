"""Answers that give pages back while they are generated, beside a stock model that does not see
the tokens which have gone."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache

import topkv
from topkv.errors import CapabilityError
from topkv_dropping.dropping import Dropping
from topkv_testing.integrity import check_integrity

PAGE, TOKENS, EVERY, PROMPT = 16, 96, 24, 150
STAGE = {
    "name": "keydiff",
    "params": {"tokens": TOKENS, "every": EVERY, "first": 16, "recent": 32},
}
MOST = TOKENS + EVERY


@pytest.fixture
def config(tiny):
    """Everything that is there is attended."""
    return tiny.settings(
        stages=[STAGE], dense_layers=[1], budget=256, buffer=256, page_tokens=PAGE
    )


@pytest.fixture
def went(monkeypatch):
    """Pages that were given back, as numbers in the row of their request at that time."""
    reported, drop = [], Dropping._drop

    def noted(self, slot, pages):
        reported.append((slot, pages.copy()))
        drop(self, slot, pages)

    monkeypatch.setattr(Dropping, "_drop", noted)
    return reported


def stock_logits(model, ids, given_back):
    """Logits of the last prompt token and of each that follows, of a stock model in which a step
    sees the tokens that are left.

    Args:
        given_back: pages that go before each step.
    """
    cache, length = DynamicCache(), ids.shape[1]
    found = [model(ids[:, :PROMPT], past_key_values=cache).logits[:, -1]]
    left = [*range(PROMPT)]
    for at in range(PROMPT, length - 1):
        for pages in given_back.get(at, ()):
            gone = {token for page in pages for token in range(page * PAGE, (page + 1) * PAGE)}
            left = [token for number, token in enumerate(left) if number not in gone]
        left.append(at)
        mask = torch.full((1, 1, 1, at + 1), torch.finfo(torch.float32).min, device=ids.device)
        mask[..., left] = 0.0
        position = torch.tensor([[at]], device=ids.device)
        out = model(
            ids[:, at : at + 1], past_key_values=cache, attention_mask=mask, position_ids=position
        )
        found.append(out.logits[:, -1])
    return torch.stack(found, 1)


@torch.no_grad()
def test_a_long_answer_is_that_of_a_model_that_forgets(tiny, config, went):
    model, ids = tiny.model(), tiny.prompt(PROMPT)["input_ids"]
    with topkv.attach(model, config) as handle:
        host, most, steps = handle.coordinator.manager.host, [], []
        begin = handle.coordinator.forward_begin

        def watched(*rows, **more):
            begin(*rows, **more)
            most.append(host.used)
            steps.append(len(went))

        handle.coordinator.forward_begin = watched
        output = model.generate(
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=90, do_sample=False,
            output_logits=True, return_dict_in_generate=True,
        )  # fmt: skip
        output.past_key_values.close()
    ours = torch.stack(output.logits, 1)
    known, given_back = 0, {}
    for step, count in enumerate(steps[1:]):
        given_back[PROMPT + step] = [pages for _, pages in went[known:count]]
        known = count
    assert known > 2
    assert max(most[1:]) <= MOST // PAGE + 1 < PROMPT // PAGE
    torch.testing.assert_close(
        ours, stock_logits(model, output.sequences, given_back), rtol=2e-4, atol=2e-4
    )


def test_a_cache_that_has_lost_tokens_is_cut_behind_them_alone(tiny, config):
    model, ids = tiny.model(), tiny.prompt(PROMPT)["input_ids"]
    with topkv.attach(model, config) as handle:
        cache = handle.new_cache()
        said = generate(model, ids, cache, 50)
        requests = handle.coordinator.requests
        (slot,) = cache.slots
        least = int(requests.dropped[slot] + requests.firm[slot])
        assert 0 < least < cache.get_seq_length()
        with pytest.raises(CapabilityError, match=f"before column {least} were given back"):
            cache.crop(least - 1 - cache.get_seq_length())
        cache.crop(-8)  # behind the last pages that went
        assert torch.equal(generate(model, said[:, :-7], cache, 7), said)
        cache.crop(least + 1 - cache.get_seq_length())
        assert cache.get_seq_length() == least + 1
        again = generate(model, said[:, : least + 2], cache, 8)
        twin = cache.fork()
        assert torch.equal(generate(model, again, twin, 6), generate(model, again, cache, 6))
        cache.close()
        twin.close()
        assert handle.coordinator.manager.host.used == 0
        check_integrity(handle.coordinator)


@pytest.mark.parametrize(("steps", "closed"), [(130, True), (40, False)])
def test_a_call_that_fails_leaves_what_is_left_of_a_cache(tiny, config, steps, closed):
    """The cache is closed if tokens that would be the newest ones are gone."""
    model, ids = tiny.model(), tiny.prompt(PROMPT)["input_ids"]

    class Stop:
        left = steps

        def __call__(self, ids, scores):
            self.left -= 1
            if not self.left:
                raise KeyboardInterrupt
            return scores

    with topkv.attach(model, config) as handle:
        cache = handle.new_cache()
        said = generate(model, ids, cache, 4)
        with pytest.raises(KeyboardInterrupt):
            generate(model, said, cache, 200, logits_processor=[Stop()])
        assert (cache.slots == ()) == closed
        assert cache.get_seq_length() == (0 if closed else PROMPT + 3)
        generate(model, ids if closed else said, cache, 4)
        cache.close()
        assert handle.coordinator.manager.host.used == 0
        check_integrity(handle.coordinator)


def test_a_long_answer_wants_no_room_for_all_of_it(tiny, config):
    """The host pool holds the prompt and little more, and the answer is longer than that."""
    model, ids = tiny.model(), tiny.prompt(PROMPT)["input_ids"]
    small = config | {"max_tokens": 176, "max_request_tokens": 176}
    with topkv.attach(model, small | {"max_requests": 1, "budget": 176, "buffer": 176}) as handle:
        said = generate(model, ids, None, 300)
        assert said.shape[1] == PROMPT + 300
        assert handle.coordinator.manager.host.used == 0


def generate(model, ids, cache, tokens, **options):
    return model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=cache, max_new_tokens=tokens,
        do_sample=False, **options,
    )  # fmt: skip


def test_rows_of_a_batch_give_pages_back_each_for_itself(tiny, config):
    model, batch = tiny.model(), tiny.prompt(PROMPT, pads=(0, 37))
    with topkv.attach(model, config) as handle:
        together = model.generate(**batch, max_new_tokens=60, do_sample=False)
        for row, pads in enumerate((0, 37)):
            ids = batch["input_ids"][row : row + 1, pads:]
            alone = generate(model, ids, handle.new_cache(), 60)
            assert torch.equal(together[row : row + 1, pads:], alone)
