"""Contexts that are read once, and questions that are decoded together over forks of them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import groupby

import torch
from torch import Tensor

from topkv_evaluation.eval.tasks import Question, Task
from topkv_transformers.cache import TopkvCache
from topkv_transformers.session import AttachedModel


def groups_of(task: Task, batch: int) -> Iterator[list[Question]]:
    """Yield questions of contexts that are held at a time: as many contexts as have ``batch``
    questions together, or one."""
    group: list[Question] = []
    for _, each in groupby(task.questions, lambda question: question.context):
        about = [*each]
        if group and len(group) + len(about) > batch:
            yield group
            group = []
        group = group + about
    if group:
        yield group


def read_context(
    handle: AttachedModel, context: Sequence[int], chunk: int
) -> tuple[TopkvCache, Tensor]:
    """Prefill a context, ``chunk`` tokens at a time.

    Returns:
        A cache of one row, and the logits ``[V]`` behind its last token.
    """
    tokens = torch.tensor(context, device=handle.model.device)[None]
    cache = handle.new_cache()
    # A last chunk of one token is still prefill.
    cache.state.prompt = len(context)
    for start in range(0, len(context), chunk):
        piece = tokens[:, start : start + chunk]
        logits = handle.model(piece, past_key_values=cache, logits_to_keep=1).logits
    return cache, logits[0, -1]


def settle(handle: AttachedModel, caches: Sequence[TopkvCache]) -> None:
    """Let the algorithms settle on contexts before they are forked.

    A fork of a request that is not settled would settle anew: k-means or votes over the whole
    context for every question.
    """
    slots = [slot for cache in caches for slot in cache.slots]
    handle.coordinator.forward_begin(decode=slots, append=[False] * len(slots))
    handle.coordinator.forward_end()


def read_contexts(
    handle: AttachedModel, contexts: Sequence[Sequence[int]], chunk: int
) -> list[TopkvCache]:
    """Prefill each context once and settle; a cache of one row for each."""
    caches = [read_context(handle, context, chunk)[0] for context in contexts]
    settle(handle, caches)
    return caches


def fork_rows(handle: AttachedModel, parents: Sequence[TopkvCache]) -> TopkvCache:
    """Make a cache whose rows are forks of the caches, which have one row each.

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


def decode(
    handle: AttachedModel,
    cache: TopkvCache,
    starts: Sequence[int],
    given: Sequence[Sequence[int]],
    steps: int,
    before_step: Callable[[int], None] = lambda step: None,
    after_step: Callable[[int, Tensor], None] = lambda step, logits: None,
    ended: Callable[[Tensor], bool] | None = None,
    eager: int = -1,
) -> list[list[int]]:
    """Feed the given tokens of rows one by one, then their own best tokens, all rows together.

    Args:
        handle: the attached model.
        cache: cache of as many rows.
        starts: tokens that each row holds.
        given: at least one token a row, of any number.
        steps: forwards; a row that is done goes on until the last one is.
        before_step: called with the number of the step.
        after_step: called with the number of the step and its logits ``[B, V]``.
        ended: returns True if ``[steps so far, B]`` best tokens are enough; None for never.
        eager: number of a step that is issued by Python, so that it can be watched.

    Returns:
        The best token behind every step, of each row.
    """
    device = handle.model.device
    width = max(map(len, given))
    fed = torch.tensor([[*row, *[0] * (width - len(row))] for row in given], device=device)
    lengths = torch.tensor([len(row) for row in given], device=device)
    positions = torch.tensor(starts, device=device)[:, None]
    written = torch.empty((steps, len(given)), dtype=torch.int64, device=device)
    token = fed[:, :1]
    for step in range(steps):
        before_step(step)
        # A recorded step gives nothing but logits, so one that is asked for more is not replayed.
        logits = handle.model(
            token, past_key_values=cache, position_ids=positions + step, logits_to_keep=1,
            output_hidden_states=step == eager,
        ).logits[:, -1]  # fmt: skip
        after_step(step, logits)
        best = torch.argmax(logits, -1)
        written[step] = best
        if ended is not None and ended(written[: step + 1]):
            written = written[: step + 1]
            break
        if step + 1 < width:
            best = torch.where(step + 1 < lengths, fed[:, step + 1], best)
        token = best[:, None]
    return [list(row) for row in written.t().tolist()]


def forced_logits(
    handle: AttachedModel,
    task: Task,
    questions: Sequence[Question],
    parents: Sequence[TopkvCache],
    done: Callable[[TopkvCache, int], None] = lambda rows, steps: None,
) -> list[list[Tensor]]:
    """Feed questions and references over forks of their contexts, all rows together.

    Args:
        handle: the attached model.
        task: the task of the questions.
        questions: questions that are fed.
        parents: cache of the context of each.
        done: called with the rows and the number of steps at the end.

    Returns:
        Of each question the logits ``[V]`` that predict its ``targets``.
    """
    given = [question.forced for question in questions]
    firsts = [max(len(question.tokens) - 1, 0) for question in questions]
    found: list[list[Tensor]] = [[] for _ in questions]

    def keep(step: int, logits: Tensor) -> None:
        for row, fed in enumerate(given):
            if firsts[row] <= step < len(fed):
                found[row].append(logits[row].clone())

    steps = max(map(len, given))
    if steps:
        rows = fork_rows(handle, parents)
        starts = [len(task.contexts[question.context]) for question in questions]
        # A row that has nothing to be fed is fed anything.
        fed = [each or (0,) for each in given]
        decode(handle, rows, starts, fed, steps, after_step=keep)
        done(rows, steps)
        rows.close()
    return found
