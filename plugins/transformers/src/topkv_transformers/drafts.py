"""Drafts that ``generate`` verifies: why they are refused, and how many an assistant makes.

A step verifies the drafted tokens and one more, so ``max_queries`` bounds them. Prompt lookup
drafts as many as an argument says; an assistant as many as its own schedule says, which may grow
with its luck, and is held below the bound.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from topkv_transformers.cache import TopkvCache
from topkv_transformers.inputs import last_column
from topkv_transformers.names import HANDLE, cache_in
from topkv_transformers.requests import CacheRequests
from topkv_transformers.support import decoder_of

FACTORY = "_get_candidate_generator"
"""The method of a model that makes what drafts."""


def shared_reasons(requests: CacheRequests, rows: int, seen: int) -> list[str]:
    """Reasons against drafts, whoever makes them.

    Args:
        requests: of the model that verifies.
        rows: of the prompt.
        seen: columns that the cache holds.
    """
    reasons = []
    if any(requests.stand_in.stock):
        reasons.append(
            "layers that slide over a window or keep a state forget what drafts have replaced; "
            "generate with a model without such layers"
        )
    if rows > 1:
        reasons.append(
            f"Transformers verifies drafts of one row at a time, and there are {rows}; generate "
            "for each"
        )
    if seen:
        reasons.append(
            "Transformers would append all ids again behind those that the cache holds; pass all "
            "ids without past_key_values"
        )
    return reasons


def lookup_reasons(requests: CacheRequests, drafts: int) -> list[str]:
    """Reasons against prompt lookup of ``drafts`` tokens."""
    tokens, most = drafts + 1, requests.coordinator.config.max_queries
    if tokens <= most:
        return []
    return [
        f"a step verifies {tokens} tokens of a row, and max_queries is {most}; set it to {tokens}"
    ]


def attached(assistant: Any) -> CacheRequests | None:
    """The requests of an assistant that is attached itself, else None."""
    decoder = decoder_of(assistant) if isinstance(assistant, PreTrainedModel) else None
    handle = getattr(decoder, HANDLE, None)
    return None if handle is None else handle.requests


def assistant_reasons(
    requests: CacheRequests, assistant: Any, columns: int, tokens: int
) -> list[str]:
    """Reasons against an assistant.

    Args:
        requests: of the model that verifies.
        assistant: the model that drafts.
        columns: of the prompt.
        tokens: that are generated.
    """
    reasons, own = [], attached(assistant)
    sides = [("max_queries", requests), ("max_queries of the assistant", own)]
    for name, side in sides:
        if side is not None and side.coordinator.config.max_queries < 2:
            reasons.append(f"a step has 2 tokens or more, and {name} is 1; set it to 2 or more")
    if own is None:
        return reasons
    if any(own.stand_in.stock):
        reasons.append(
            "layers of the assistant that slide over a window or keep a state cannot take drafts "
            "back; detach it"
        )
    # The last two tokens are never appended to its cache.
    longest, last = columns + max(tokens - 2, 0), last_column(assistant)
    if last is not None and columns <= last < longest:
        reasons.append(f"the assistant changes its RoPE beyond {last} columns; generate fewer")
    admission = own.coordinator.can_admit(longest, 1 + (own is requests))
    return reasons + [
        f"the assistant has no room: {reason}; give it more" for reason in admission.reasons
    ]


def most_tokens(requests: CacheRequests, assistant: Any) -> int:
    """The most tokens of a step that verifies what an assistant has drafted: an attached one takes
    back by lengths alone what its own ``max_queries`` covers."""
    own = attached(assistant) or requests
    return min(each.coordinator.config.max_queries for each in (requests, own))


@contextmanager
def assisted(model: PreTrainedModel, assistant: Any, most: int) -> Iterator[None]:
    """Let an assistant draft at most ``most - 1`` tokens a step inside, whatever its schedule
    says. It is looked at once if it is attached, and a cache that it drafted over is closed
    afterwards."""
    replaced, original = model.__dict__.get(FACTORY), getattr(model, FACTORY)
    made, own = [], attached(assistant)

    def make(*args: Any, **kwargs: Any) -> Any:
        generator = original(*args, **kwargs)
        generator.get_candidates = partial(_bounded, generator, generator.get_candidates, most - 1)
        made.append(generator)
        return generator

    setattr(model, FACTORY, make)
    try:
        with own.watch.unchanged() if own else nullcontext():
            yield
    finally:
        delattr(model, FACTORY)
        if replaced is not None:
            setattr(model, FACTORY, replaced)
        for generator in made:
            del generator.get_candidates  # which refers to it
            cache = cache_in(generator.assistant_kwargs)
            if isinstance(cache, TopkvCache):
                cache.close()


def _bounded(
    generator: Any, draft: Any, most: int, ids: Tensor, **kwargs: Any
) -> tuple[Tensor, Tensor | None]:
    generator.num_assistant_tokens = min(generator.num_assistant_tokens, most)
    drafted: tuple[Tensor, Tensor | None] = draft(ids, **kwargs)
    return drafted
