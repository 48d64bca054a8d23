"""Steps that verify drafts are recorded for each number of tokens, and are those of Python."""

from __future__ import annotations

import random

import pytest
import torch

import topkv

SPARSE = {"budget": 32, "buffer": 48, "resident_fast_path": False, "ring_tokens": 16}
EAGER = {**SPARSE, "capture": "off"}


def lookup(model, settings, prompt, drafts, **options):
    """Tokens, logits, and what was captured, of two calls with prompt lookup."""
    found = []
    with topkv.attach(model, settings) as handle:
        for _ in range(2):
            output = model.generate(
                **prompt,
                do_sample=False,
                max_new_tokens=60,
                prompt_lookup_num_tokens=drafts,
                output_logits=True,
                return_dict_in_generate=True,
                **options,
            )
            found += [output.sequences, torch.stack(output.logits, 1)]
            output[-1].close()
        return found, handle.capture


@pytest.mark.sampled(7)
@pytest.mark.parametrize("drafts", [1, 2, 3, 4, 5, 6, 7])
def test_prompt_lookup_replays_steps_of_each_number_of_tokens(tiny, recording, drafts):
    """A step without drafts, as where none is found, is recorded as it always was."""
    model, prompt = tiny.model(), tiny.prompt(45)
    settings = tiny.settings(**EAGER, max_queries=drafts + 1)
    plain, off = lookup(model, settings, prompt, drafts)
    ours, report = lookup(model, settings | recording, prompt, drafts)
    assert off.replayed == 0
    assert all(map(torch.equal, ours, plain))
    shapes = report.seconds.keys()
    assert shapes == report.graph_bytes.keys()
    assert {(1, 1), (1, drafts + 1)} <= shapes <= {(1, n + 1) for n in range(drafts + 1)}
    assert not report.eager
    assert f"1 rows of {drafts + 1} tokens recorded in " in str(report)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("pads", [(0,), (0, 9, 1)], ids=["single", "padded"])
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("positions", [True, False], ids=["positions", "no_positions"])
def test_the_number_of_drafts_changes_from_step_to_step(
    tiny, recording, check, family, pads, positions
):
    """Rows of one to eight tokens, of which some are taken back, in one cache and its fork."""
    model, prompt = tiny.model(family, layers=3), tiny.prompt(45, pads)
    # Without positions padded rows begin at 0 in every forward, as they do in Python.
    mask = prompt["attention_mask"]

    def lived(settings):
        drawn, reported, shapes = random.Random(5), [], []
        with topkv.attach(model, settings) as handle, torch.no_grad():
            cache = handle.new_cache()
            model(**prompt, past_key_values=cache)
            caches = [cache, cache.fork()]
            for number in range(40):
                cache = caches[number % 2]
                columns = 1 if number % 5 == 4 else drawn.randint(2, 8)
                ids = torch.randint(
                    2, 96, (len(pads), columns), generator=torch.Generator().manual_seed(number)
                ).to(tiny.device)
                seen = cache.get_seq_length()
                whole = torch.nn.functional.pad(mask, (0, seen + columns - 45), value=1)
                places = (whole.cumsum(-1) - 1)[:, -columns:]
                cache.state.most = 8
                output = model(
                    ids,
                    attention_mask=whole,
                    past_key_values=cache,
                    **({"position_ids": places} if positions else {}),
                )
                cache.crop(-drawn.randint(0, columns - 1))
                cache.state.most = 1
                reported.append(output.logits.flatten(0, 1))
                shapes.append((len(pads), columns))
            for each in caches:
                each.close()
            check.all_free(handle)
            return torch.cat(reported), shapes, handle.capture

    settings = tiny.settings(**EAGER, max_queries=8, dense_layers=[1], max_requests=6)
    plain, shapes, _ = lived(settings)
    ours, _, report = lived(settings | recording)
    assert torch.equal(ours, plain)
    assert report.replayed == len(shapes) - len(set(shapes))
    assert report.seconds.keys() == {each for each in shapes if shapes.count(each) > 1}


def test_steps_of_one_number_of_tokens_that_fail_leave_the_others_recorded(tiny, recording):
    model, prompt = tiny.model(), tiny.prompt(45)
    mlp = model.model.layers[1].mlp

    class Syncing(type(mlp)):
        def forward(self, x):
            waits = x.shape[1] == 4 and x.sum().item() > 0
            return super().forward(x) * (2.0 if waits else 1.0)

    mlp.__class__ = Syncing
    settings = tiny.settings(**EAGER, max_queries=4)
    plain, _ = lookup(model, settings, prompt, 3)
    with pytest.warns(RuntimeWarning, match="decode step of 1 rows of 4 tokens cannot be capt"):
        ours, report = lookup(model, settings | recording, prompt, 3)
    assert all(map(torch.equal, ours, plain))
    assert report.eager.keys() == {(1, 4)}
    assert (1, 1) in report.seconds
