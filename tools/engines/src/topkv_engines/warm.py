"""A life of a request on random rows, so that no request of somebody waits for a compiler.

What steps that decode launch is compiled when an engine records its graphs. Prompts, what follows
on one, and prompts that begin with pages of another one launch more.
"""

from __future__ import annotations

import torch

from topkv import SparseCoordinator
from topkv.types import Index

CHUNKS = (None, 17, 1)
"""Tokens of the parts of a prompt, None for a page: Triton compiles a kernel anew for sizes that
are 1, and for those that are multiples of 16."""


def warm_up(coordinator: SparseCoordinator) -> None:
    """Run prompts and steps, with pages that nobody holds yet. Leaves nothing behind but counts.

    Args:
        coordinator: with ``pages: engine`` and no request.
    """
    config = coordinator.config
    page = config.page_tokens
    most = min(page * (config.num_pages - 1), config.max_request_tokens, 4 * page)
    pages = range(1, -(-most // page) + 1)
    for found in (0, page) if coordinator.requests.shares_prefixes else (0,):
        if found >= most:
            continue
        slot = coordinator.request_begin(pages, found)
        try:
            for tokens in CHUNKS:
                tokens = min(tokens or page, most - coordinator.length(slot) - config.max_queries)
                if tokens > 0:
                    _forward(coordinator, [], [(slot, tokens)])
            coordinator.settle([slot])
            for queries in {1, config.max_queries}:
                if coordinator.length(slot) + queries <= most:
                    _forward(coordinator, [slot], [], queries)
        finally:
            coordinator.forward_abort()
            coordinator.request_end(slot)


def _forward(
    coordinator: SparseCoordinator,
    decode: list[int],
    chunks: list[tuple[int, int]],
    queries: int = 1,
) -> None:
    model, device = coordinator.model, coordinator.config.device
    rows = len(decode) * queries + sum(tokens for _, tokens in chunks)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, dtype=model.dtype, device=device)

    coordinator.forward_begin(decode, chunks, queries=queries)
    for layer in model.layers:
        q = random(rows, model.num_heads, model.head_dim)
        k, v = (random(rows, model.num_kv_heads, model.head_dim) for _ in range(2))
        v = k if model.attention == "mla" else v
        index, indexer = None, model.indexer
        if indexer is not None and indexer.selects_for(layer):
            heads, size = indexer.num_heads, indexer.head_dim
            weights = random(rows, heads).float()
            index = Index(random(rows, heads, size), random(rows, size), weights)
        coordinator.attention(layer, q, k, v, index)
    coordinator.forward_end()
