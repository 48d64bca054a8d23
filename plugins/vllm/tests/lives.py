"""Requests that come and go in random order; nothing of that happens to those of stock vLLM."""

from __future__ import annotations

from topkv_testing.integrity import check_integrity


def live(engine, prompts, tokens, draw, arrive=0.4, preempt=0.02, **options):
    """Run requests that arrive, are aborted and preempted at random; return who was aborted.

    Args:
        engine: through topkv.
        prompts, tokens: of each request, by its name.
        draw: a source of random numbers.
        arrive, preempt: how likely one is in a step.
        options: of sampling, each by the name of a request.
    """
    waiting, aborted = [*prompts], set()
    while waiting or engine.engine.has_unfinished_requests():
        if waiting and draw.random() < arrive:
            name = waiting.pop()
            more = {option: of[name] for option, of in options.items()}
            engine.add(name, prompts[name], tokens[name], **more)
        if draw.random() < 0.03 and len(waiting) < len(prompts):
            name = draw.choice(sorted(prompts.keys() - waiting))
            engine.engine.abort_request([name])
            aborted.add(name)
        if draw.random() < preempt and engine.scheduler.running:
            engine.preempt()
        engine.step()
        check_integrity(engine.session.coordinator)
    engine.run()
    return aborted


def same(engine, stock, prompts, tokens, ended=()):
    """Each request has the tokens of stock vLLM, or a beginning of them if it was ended."""
    known = stock.answer([*prompts.values()], [tokens[name] for name in prompts])
    check(engine, dict(zip(prompts, (each for (each,) in known), strict=True)), ended)


def check(engine, known, ended=()):
    """Each request has the known tokens, or a beginning of them if it was ended."""
    for name, expected in known.items():
        got = engine.tokens.get(name, {0: []})[0]
        assert got == expected[: len(got)], name
        assert name in ended or len(got) == len(expected), name
    engine.check_nothing_is_held()
