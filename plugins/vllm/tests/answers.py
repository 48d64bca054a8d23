"""Answers of two engines with what each says of the next token, and where they part."""

from __future__ import annotations


def parted(ones, others):
    """Position at which the tokens of two answers part first, or their number."""
    pairs = zip(ones.token_ids, others.token_ids, strict=True)
    return next((at for at, (one, other) in enumerate(pairs) if one != other), len(ones.token_ids))


def answers_of(engine, prompts):
    """Tokens and the best log-probabilities of one request for each prompt."""
    names = [f"asked-{number}" for number in range(len(prompts))]
    for name, each in zip(names, prompts, strict=True):
        engine.add(name, each, 32, logprobs=2)
    engine.run()
    return [engine.outputs[name].outputs[0] for name in names]
