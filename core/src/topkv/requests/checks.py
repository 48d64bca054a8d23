"""Checks of forwards and requests, which raise RequestError before anything has changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from torch import Tensor

from topkv.config.layers import show_ranges
from topkv.decode.layers import Forward
from topkv.errors import RequestError
from topkv.requests.requests import Requests
from topkv.types import ModelShape


def check_begin(forward: Forward, requests: Requests) -> None:
    """Refuse slots without a request or named twice, too many rows, chunks of fewer than 0 tokens,
    and tokens after a prompt that an algorithm has no room for."""
    rows, most = forward.rows, requests.config.max_requests
    if len(rows) > most:
        raise RequestError(f"{len(rows)} decode rows exceed max_requests = {most}")
    for chunk in forward.chunks:
        requests.check(chunk.slot)
        if chunk.tokens < 0:
            raise RequestError(
                f"chunk ({chunk.slot}, {chunk.tokens}) has fewer than 0 tokens; rollback and "
                "truncate take tokens back"
            )
    slots, active = forward.live, requests.active
    if len(slots):
        requests.check(int(slots.max()))  # counting takes as much room as the largest slot says
    if forward.chunks:
        slots = np.append(slots, [chunk.slot for chunk in forward.chunks])
    named = np.bincount(slots, minlength=len(active))
    if (named > active).any():
        for slot in slots.tolist():
            requests.check(slot)
        raise RequestError(f"slot {named.argmax()} is named twice in one forward")
    _check_generated(requests, forward.writers, forward.drafted + 1)


def check_queries(
    rows: Sequence[int], append: Sequence[int] | None, queries: int, most: int
) -> None:
    """Refuse more queries of a row than ``most``, and tokens of a row that lack a query."""
    if not 1 <= queries <= most:
        raise RequestError(
            f"rows of {queries} queries are not among 1 to max_queries = {most}; draft fewer "
            "tokens, or raise max_queries in the configuration"
        )
    if append is None:
        return
    if len(append) != len(rows) or not all(0 <= tokens <= queries for tokens in append):
        raise RequestError(
            f"append must have 0 to {queries} tokens for each of {len(rows)} decode rows, got "
            f"{list(append)}"
        )


def check_idle(forward: Forward | None, call: str) -> None:
    """Refuse what belongs between forwards while one is open."""
    if forward is not None:
        raise RequestError(f"{call} during a forward; call forward_end or forward_abort first")


def check_reserve(requests: Requests, slot: int, tokens: int) -> None:
    """Refuse a slot without a request, and tokens that an algorithm has no room for."""
    requests.check(slot)
    if not requests.fresh[slot]:  # else they may all be prompt
        _check_generated(requests, np.asarray([slot]), tokens)


def _check_generated(requests: Requests, slots: np.ndarray, tokens: np.ndarray | int) -> None:
    """Refuse tokens that an algorithm which chooses once could not attend.

    Args:
        slots: int64 ``[n]`` requests, each of which generates ``tokens`` further ones.
        tokens: int64 ``[n]``, or one number for all.
    """
    generated = requests.generated
    if generated == 2**31 - 1:
        return  # it has room for any number
    length = requests.length[slots]
    prompt = np.where(requests.fresh[slots], length, requests.prompt[slots])
    over = np.unique(slots[length - prompt + tokens > generated])
    if len(over):
        raise RequestError(
            f"slots {over.tolist()} would have more than {generated} tokens after "
            "their prompt, and the algorithm has room for no more; raise its parameter "
            "'generated', or let it drop the oldest of them"
        )


def check_rows(forward: Forward, model: ModelShape, q: Tensor, k: Tensor, v: Tensor) -> None:
    """Refuse other shapes than q ``[rows, H, D]``, k and v ``[rows, Hkv, D]`` of the open
    forward: kernels would read or miss rows."""
    rows = forward.count
    queries = (rows, model.num_heads, model.head_dim)
    keys = (rows, model.num_kv_heads, model.head_dim)
    if not (q.shape == queries and k.shape == v.shape == keys):
        raise RequestError(
            f"expected q {list(queries)}, k and v {list(keys)} for the {rows} rows of this "
            f"forward, got q {list(q.shape)}, k {list(k.shape)}, v {list(v.shape)}"
        )


def check_end(forward: Forward, model: ModelShape) -> None:
    """Refuse to close a forward in which some layers have not appended their tokens."""
    if not (forward.called or forward.prompt_tokens):
        return  # decode rows have run in a graph, which calls nothing here
    left_out = [layer for layer in model.layers if layer not in forward.attended]
    if left_out:
        raise RequestError(
            f"attention has not run for layers {show_ranges(left_out)} of this forward; "
            "call it for each layer, or drop the forward with forward_abort"
        )


def check_held(requests: Requests, pages: Sequence[int], length: int) -> None:
    """Refuse tokens that do not fill whole ones of the pages, or that an algorithm has to see
    because its representations do not come along with pages."""
    page = requests.config.page_tokens
    most = len(pages) * page
    if length % page or not 0 <= length <= most:
        raise RequestError(
            f"length must be a multiple of page_tokens = {page} and at most {most}, the "
            f"tokens of the {len(pages)} pages, got {length}"
        )
    if length and not requests.shares_prefixes:
        raise RequestError(
            "an algorithm keeps more of a prompt than what stands in its pages, so that no "
            f"other request can take over {length} tokens; begin with none"
        )


def check_replaced(requests: Requests, slot: int, first: int, pages: Sequence[int]) -> None:
    """Refuse to replace pages that are not full, not an engine's, or without representations."""
    requests.check(slot)
    full = int(requests.length[slot]) // requests.config.page_tokens
    if requests.config.pages != "engine":
        raise RequestError(
            "pages are the core's, and no engine gives them out; set pages to 'engine'"
        )
    if not 0 <= first <= first + len(pages) <= full:
        raise RequestError(
            f"pages {first} to {first + len(pages)} of slot {slot} cannot be replaced: its "
            f"{int(requests.length[slot])} tokens fill {full} pages; replace those alone"
        )
    if not requests.shares_prefixes:
        raise RequestError(
            "an algorithm keeps more of a prompt than what stands in its pages, so that no other "
            "page can stand for one; keep both"
        )
