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
    """Each request has the tokens of stock SGLang, or a beginning of them if it was aborted.

    Returns:
        What each request got.
    """
    got = engine.run(requests)
    prompts, tokens = [each["prompt"] for each in requests], [each["tokens"] for each in requests]
    for request, mine, known in zip(requests, got, stock.answer(prompts, tokens), strict=True):
        # SGLang cuts no drafts off an answer that is aborted at its end.
        answer = mine["tokens"][: request["tokens"]]
        assert answer == known[: len(answer)]
        assert "abort" in request or len(mine["tokens"]) == len(known)
    engine.check_nothing_is_held()
    return got
