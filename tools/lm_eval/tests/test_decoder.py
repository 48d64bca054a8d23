"""Scores and texts beside the stock model, without the harness."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from topkv_lm_eval.decoder import Asked, Decoder

ALL = {"algorithm": "quest", "backend": "triton_attention", "budget": 4096, "buffer": 4096,
       "dense_layers": ()}  # fmt: skip


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "head_dim": 64}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "vocab_size": 97}
    config = LlamaConfig(**sizes, **heads, initializer_range=0.3, eos_token_id=None)
    return LlamaForCausalLM(config).eval()


def noise(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 97, (count,), generator=generator).tolist())


@torch.no_grad()
def stock_score(model, each):
    tokens = torch.tensor([*each.context, *each.question, *each.answer])[None]
    logits = model(tokens[:, :-1]).logits[0, -len(each.answer) :].log_softmax(-1)
    wanted = tokens[0, -len(each.answer) :]
    return float(logits.gather(-1, wanted[:, None]).sum()), bool(
        (logits.argmax(-1) == wanted).all()
    )


def stock_text(model, each):
    prompt = torch.tensor([*each.context, *each.question])[None]
    made = model.generate(prompt, do_sample=False, max_new_tokens=each.new_tokens)
    return made[0, prompt.shape[1] :].tolist()


def never(tokens):
    return False


def asked_of(sizes, seed=0):
    return [
        Asked(noise(c, seed), noise(q, seed + i), noise(a, seed + i + 50), new)
        for i, (c, q, a, new) in enumerate(sizes)
    ]


def test_scores_are_those_of_the_stock_model(model):
    @settings(max_examples=6)
    @given(
        st.lists(
            st.tuples(st.integers(1, 90), st.integers(0, 9), st.integers(1, 6), st.just(0)),
            min_size=1, max_size=5,
        ),
        st.integers(1, 3),
    )  # fmt: skip
    def equal(sizes, batch):
        asked = asked_of(sizes)
        found = Decoder(model, ALL, 16, batch).score(asked)
        for (ours, greedy), each in zip(found, asked, strict=True):
            assert (ours, greedy) == (pytest.approx(stock_score(model, each)[0], abs=1e-3), greedy)

    equal()


def test_the_best_answer_is_reported(model):
    (each,) = asked_of([(60, 4, 0, 3)])
    right = stock_text(model, each)
    for answer, greedy in ((right, True), ([right[0], *noise(2, 9)], False)):
        scored = Decoder(model, ALL, 16, 1).score(
            [Asked(each.context, each.question, tuple(answer))]
        )
        assert scored[0][1] is greedy


def test_texts_are_those_of_the_stock_model(model):
    asked = asked_of([(40, 5, 0, 6), (40, 0, 0, 6), (70, 1, 0, 6), (1, 0, 0, 1)])
    for batch in (1, 3):
        found = Decoder(model, ALL, 16, batch).generate(asked, never)
        assert found == [stock_text(model, each) for each in asked]


def test_nothing_is_decoded_behind_the_end(model):
    asked = asked_of([(40, 5, 0, 200)])
    whole = stock_text(model, asked[0])
    stop = whole[3]
    (found,) = Decoder(model, ALL, 16, 1).generate(asked, lambda tokens: stop in tokens)
    assert found == whole[: whole.index(stop) + 1]


def test_a_small_budget_shows(model):
    """In questions too: what is scored is the same token behind a dense and a sparse question."""
    context, question, answer = noise(400, 1), noise(8, 2), noise(4, 3)
    few = ALL | {"budget": 32, "buffer": 64}
    sparse, dense = (
        Decoder(model, few, 16, 1).score([each])[0][0]
        for each in (Asked(context, question, answer), Asked(context + question, (), answer))
    )
    stock = stock_score(model, Asked(context, question, answer))[0]
    assert abs(sparse - stock) > 1e-2
    assert sparse != pytest.approx(dense, abs=1e-4)
