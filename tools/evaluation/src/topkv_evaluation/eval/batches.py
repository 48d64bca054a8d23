"""Contexts that are read once, and questions that are decoded together over forks of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from topkv_evaluation.eval.tasks import Question
from topkv_transformers.cache import TopkvCache
from topkv_transformers.session import AttachedModel


def read_contexts(
    handle: AttachedModel, contexts: Sequence[Sequence[int]], chunk: int
) -> list[TopkvCache]:
    """Prefill each context once, and let the algorithms settle on it before it is forked.

    A fork of a request that is not settled would settle anew: k-means or votes over the whole
    context for every question.

    Args:
        handle: the attached model.
        contexts: token ids.
        chunk: tokens that are read at a time.

    Returns:
        A cache of one row for each context.
    """
    model, caches = handle.model, []
    for context in contexts:
        tokens = torch.tensor(context, device=model.device)[None]
        cache = handle.new_cache()
        # A last chunk of one token is still prefill.
        cache.state.prompt = len(context)
        for start in range(0, len(context), chunk):
            piece = tokens[:, start : start + chunk]
            model(piece, past_key_values=cache, logits_to_keep=1)
        caches.append(cache)
    slots = [slot for cache in caches for slot in cache.slots]
    handle.coordinator.forward_begin(decode=slots, append=[False] * len(slots))
    handle.coordinator.forward_end()
    return caches


def fork_rows(handle: AttachedModel, parents: Sequence[TopkvCache]) -> TopkvCache:
    """One cache with a fork of each of the caches, which have one row each, as its rows.

    Rows may differ in length: the coordinator knows each, and positions are the caller's to give.
    """
    joined = handle.new_cache()
    slots: list[int] = []
    for parent in parents:
        twin = parent.fork()
        slots += twin.state.slots
        twin.state.slots = []  # they are the joined cache's from here on
    joined.state.begin(slots)
    joined.state.seen = max(parent.state.seen for parent in parents)
    return joined


def answer(
    handle: AttachedModel,
    cache: TopkvCache,
    starts: Sequence[int],
    questions: Sequence[Question],
    after_step: Callable[[int], None],
    before_step: Callable[[int], None],
) -> list[list[int]]:
    """Decode questions token by token, then their answers greedily, all rows together.

    Args:
        handle: the attached model.
        cache: a row for each question.
        starts: tokens that each row holds.
        questions: of any length; a row that is done goes on until the last one is.
        after_step, before_step: called with the number of the step.

    Returns:
        The tokens of each answer.
    """
    device = handle.model.device
    width = max(len(question.tokens) for question in questions)
    padded = [[*q.tokens, *[0] * (width - len(q.tokens))] for q in questions]
    given = torch.tensor(padded, device=device)
    lengths = torch.tensor([len(question.tokens) for question in questions], device=device)
    positions = torch.tensor(starts, device=device)[:, None]
    steps = max(question.steps for question in questions)
    written = torch.empty((steps, len(questions)), dtype=torch.int64, device=device)
    token = given[:, :1]
    for step in range(steps):
        before_step(step)
        logits = handle.model(
            token, past_key_values=cache, position_ids=positions + step, logits_to_keep=1
        ).logits
        after_step(step)
        best = torch.argmax(logits[:, -1], -1)
        written[step] = best
        if step + 1 < width:
            best = torch.where(step + 1 < lengths, given[:, step + 1], best)
        token = best[:, None]
    return _answers(written, questions)


def _answers(written: Tensor, questions: Sequence[Question]) -> list[list[int]]:
    """The answer's part of what followed each token, ``[steps, B]``."""
    rows = written.t().tolist()
    firsts = (len(question.tokens) - 1 for question in questions)
    return [
        row[first : first + question.new_tokens]
        for row, first, question in zip(rows, firsts, questions, strict=True)
    ]
