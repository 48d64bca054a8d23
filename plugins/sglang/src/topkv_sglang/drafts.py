"""Drafts of SGLang's n-grams: a chain of tokens a request, verified in one step.

SGLang verifies trees, whose nodes see their ancestors alone. Here each draft sees all that stand
before it, so what its corpus finds is made a chain. The drafts that it keeps are the first ones
then, in their places already; topkv takes the others back when the next step begins.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

METHOD = "NGRAM"
"""SGLang's name of the method; it has no other whose drafts come without a model."""


def drafts_of(arguments: Any) -> int:
    """Number of rows of a request in a step that verifies, with its newest token; 1 where nothing
    is drafted.

    Args:
        arguments: SGLang's, once they are resolved.
    """
    if arguments.speculative_algorithm is None:
        return 1
    return int(arguments.speculative_num_draft_tokens)


def draft_reasons(arguments: Any) -> list[str]:
    """Reasons against drafts: of other methods, or of more than one next token."""
    method, breadth = arguments.speculative_algorithm, arguments.speculative_ngram_max_bfs_breadth
    if method is None:
        return []
    if method != METHOD:
        return [f"not supported: speculative decoding ({method}); say {METHOD}"]
    if breadth > 1:
        return [
            f"not supported: speculative_ngram_max_bfs_breadth = {breadth}: drafts are a chain; "
            "say 1"
        ]
    return []


def chain_mask(mask: Any, drafts: int) -> Any:
    """Return the mask of chains in place of that of trees.

    Args:
        mask: array of ``drafts`` x ``drafts`` tokens a request, flat.
        drafts: of each request.
    """
    chains = mask.copy()
    chains.reshape(-1, drafts, drafts)[:] = torch.ones(drafts, drafts).tril().numpy()
    return chains


def give_places(
    cache: Any, pool: Any, requests: Sequence[Any], rows: Tensor, now: Tensor, then: Tensor
) -> None:
    """Give places for tokens that are to be verified, on the host.

    Args:
        cache: SGLang's tree of prefixes, which has the allocator.
        pool: SGLang's pool of requests.
        requests: SGLang's, in the order of the batch.
        rows: int64 ``[requests]`` of the pool, on the host; the next two alike.
        now, then: tokens that have a place, and that shall have one.

    Raises:
        RuntimeError: there are not enough; SGLang's own.
    """
    from sglang.srt.mem_cache.allocation import alloc_paged_token_slots_extend, get_last_loc_torch

    count = int((then - now).sum())
    if count:
        now, then = now.long(), then.long()
        last = get_last_loc_torch(pool.req_to_token, rows, now)
        places = alloc_paged_token_slots_extend(cache, now, now, then, then, last, count)
        sizes = (then - now).tolist()
        for row, first, given in zip(
            rows.tolist(), now.tolist(), places.split(sizes), strict=True
        ):
            pool.write((row, slice(first, first + len(given))), given.to(torch.int32))
    for request, tokens in zip(requests, then.tolist(), strict=True):
        request.kv.kv_allocated_len = max(request.kv.kv_allocated_len, tokens)
