"""Requests that come and go in random order; nothing of that happens to those of stock SGLang."""

from __future__ import annotations


def draw_requests(draw, prompts, aborts=0.25, longest=30):
    """Requests that come one after another, some of which are aborted: waiting, in a prompt, or
    in decode.

    Args:
        draw: a source of random numbers.
        prompts: of each request.
        aborts: how likely one is aborted.
        longest: tokens that one may generate.
    """
    made, now = [], 0
    for prompt in prompts:
        now += draw.randint(0, 3)
        request = {"prompt": prompt, "tokens": draw.randint(1, longest), "wait": now}
        if draw.random() < aborts:
            request["abort"] = draw.randint(0, request["tokens"] - 1)
        made.append(request)
    return made


def check_lives(engine, stock, requests):
    """Run requests; return what each got, see ``check_answers``."""
    got = engine.run(requests)
    check_answers(got, stock, requests)
    engine.check_nothing_is_held()
    return got


def check_answers(got, stock, requests, model=None):
    """Each request has the tokens of stock SGLang, or a beginning of them if it was aborted.

    Args:
        got: of each request.
        stock: the engine.
        requests: that were run.
        model: a folder; with it another token may follow where the model itself has a tie.
    """
    prompts, tokens = [each["prompt"] for each in requests], [each["tokens"] for each in requests]
    for request, mine, known in zip(requests, got, stock.answer(prompts, tokens), strict=True):
        # SGLang cuts no drafts off an answer that is aborted at its end.
        answer = mine["tokens"][: request["tokens"]]
        if answer != known[: len(answer)]:
            assert model is not None
            assert is_tie(model, request["prompt"], answer, known)
        assert "abort" in request or len(mine["tokens"]) == len(known)


def is_tie(model, prompt, one, other):
    """Return True if the first tokens that differ have logits in float64 that may change places
    in float32."""
    import torch
    from transformers import AutoModelForCausalLM

    pairs = zip(one, other, strict=False)
    first = next(n for n, (mine, known) in enumerate(pairs) if mine != known)
    exact = AutoModelForCausalLM.from_pretrained(model).double()
    with torch.no_grad():
        logits = exact(torch.tensor([prompt + one[:first]])).logits[0, -1]
    return (logits.max() - logits[[one[first], other[first]]]).max() < 1e-4
