"""A life of a request on random rows, so that no request of somebody waits for a compiler.

What steps that decode launch is compiled when an engine records its graphs. Prompts, what follows
on one, and prompts that begin with pages of another one launch more.
"""

from __future__ import annotations

from topkv import SparseCoordinator
from topkv_engines.graphs import LayerRows

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
    rows = len(decode) * queries + sum(tokens for _, tokens in chunks)
    coordinator.forward_begin(decode, chunks, queries=queries)
    for layer in coordinator.model.layers:
        made = LayerRows.random(coordinator.model, layer, rows, coordinator.config.device)
        coordinator.attention(layer, made.q, made.k, made.v, made.index, made.out)
    coordinator.forward_end()
