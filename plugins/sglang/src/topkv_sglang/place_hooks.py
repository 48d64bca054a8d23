"""Hooks on SGLang's pools and on what gives places of tokens out, see ``hooks``."""

from __future__ import annotations

from typing import Any

from topkv_sglang.args import BACKEND
from topkv_sglang.used import Hook, used


def support_triton(original: Hook, backend: str) -> bool:
    """Return False for topkv without a GPU, and while the host gives out places of tokens."""
    if backend != BACKEND:
        return bool(original(backend))
    import torch

    from topkv_sglang.allocation import is_on_host

    return torch.cuda.is_available() and not is_on_host()


def resolve_memory_pool_config(original: Hook, configurator: Any, *more: Any, **named: Any) -> Any:
    """Size SGLang's pool as the host pool: its scheduler admits requests by that.

    Raises:
        DeviceMemoryError: the device buffers do not fit beside the weights.
    """
    if not used():
        return original(configurator, *more, **named)
    from sglang.srt.arg_groups.model_override_base import resolving_view
    from sglang.srt.model_executor.pool_configurator import MemoryPoolConfig

    from topkv_sglang.geometry import fitting, pool_tokens

    arguments, model = resolving_view(configurator.server_args), configurator.model_config
    if arguments.device != "cpu":
        room = configurator._profile_available_bytes(*more, **named)
        model.topkv_lowered = fitting(model.topkv_lowered, arguments, room)
    lowered, most = model.topkv_lowered, arguments.max_total_tokens
    return MemoryPoolConfig(
        max_total_num_tokens=pool_tokens(lowered, most),
        max_running_requests=lowered.max_requests,
    )


def build_rows(original: Hook, configurator: Any, **named: Any) -> Any:
    """Make the rows of requests."""
    if not used():
        return original(configurator, **named)
    from topkv_sglang.pools import RowPool

    model = configurator.model_config
    rows = RowPool(
        model.topkv_lowered.page_tokens,
        size=named["max_num_reqs"],
        max_context_len=model.context_len + named["extra_max_context_len"],
        device="cpu",
        enable_memory_saver=False,
    )
    rows.device = configurator.device  # of the batches that the scheduler makes
    return rows


def build_allocator(original: Hook, configurator: Any, **named: Any) -> Any:
    """Make the allocator of places in host memory."""
    if not used():
        return original(configurator, **named)
    from topkv_sglang.allocation import host_allocator

    return host_allocator(lambda: original(configurator, **named), configurator)


def alloc_for_extend(original: Hook, batch: Any) -> Any:
    """Give places out to a batch of prompts, on the host."""
    if not used():
        return original(batch)
    from topkv_sglang.allocation import on_host, upload

    with on_host(batch):
        places, rows, rows_cpu = original(batch)
    return upload(places, batch.device), upload(rows, batch.device), rows_cpu


def alloc_for_decode(original: Hook, batch: Any, token_per_req: int) -> Any:
    """Give places out to a batch that decodes, on the host."""
    if not used():
        return original(batch, token_per_req)
    from topkv_sglang.allocation import on_host, upload

    with on_host(batch):
        places = original(batch, token_per_req)
    return upload(places, batch.device)


def alloc_for_spec_decode(original: Hook, cache: Any, pool: Any, **named: Any) -> None:
    """Give places out to tokens that are to be verified, on the host."""
    if not used():
        original(cache, pool, **named)
        return
    from topkv_sglang.drafts import give_places

    now, then = named["cur_kv_lens_cpu"], named["nxt_kv_lens_cpu"]
    give_places(cache, pool, named["reqs"], named["batch"].req_pool_indices_cpu, now, then)


def assign_extend_cache_locs(original: Hook, **named: Any) -> Any:
    """Return the place of padding for every draft: nothing reads where a draft is."""
    if not used():
        return original(**named)
    import torch

    count = named["batch_size"] * named["draft_token_num"]
    return torch.zeros(count, dtype=torch.int64, device=named["device"])


def move_accept_tokens(original: Hook, *more: Any, **named: Any) -> None:
    """Move nothing: the drafts that are kept are the first ones."""
    if not used():
        original(*more, **named)


def match_ngrams(original: Hook, corpus: Any, *more: Any, **named: Any) -> Any:
    """Make chains of what the corpus finds."""
    drafts, mask = original(corpus, *more, **named)
    if not used():
        return drafts, mask
    from topkv_sglang.drafts import chain_mask

    return drafts, chain_mask(mask, corpus.draft_token_num)


def build_kv_pool(original: Hook, configurator: Any, *, sizes: Any, **named: Any) -> Any:
    """Make a pool of placeholders, whatever a model's rows are."""
    if not used():
        return original(configurator, sizes=sizes, **named)
    from topkv_sglang.pools import PlaceholderPool

    return configurator._build_mha_kv_pool(
        max_total_num_tokens=sizes.max_total_num_tokens, mha_pool_class=PlaceholderPool
    )


def checkpoint_into_tree(original: Hook, cache: Any, request: Any, **named: Any) -> None:
    """Note which pages of a request the radix cache replaces by equal ones."""
    from topkv_sglang.rows import Rows

    rows = cache.req_to_token_pool
    if not isinstance(rows, Rows):
        original(cache, request, **named)
        return
    row, first = request.kv.req_pool_idx, request.kv.cache_protected_len // rows.page
    before = rows.pages(row, first, named["up_to"] // rows.page * rows.page)
    original(cache, request, **named)
    rows.note_replaced(row, first, before)


def enable_fused_set_kv_buffer(original: Hook, *batch: Any, **named: Any) -> bool:
    """Return False for topkv: kernels that rotate keys shall not write them to SGLang's pool."""
    return not used() and bool(original(*batch, **named))


_ALLOCATION = "sglang.srt.mem_cache.allocation."
_POOLS = "sglang.srt.mem_cache.kv_cache_configurator.KVCacheConfigurator."

PLACE_HOOKS: dict[str, Hook] = {
    "sglang.srt.utils.common.support_triton": support_triton,
    "sglang.srt.models.utils.enable_fused_set_kv_buffer": enable_fused_set_kv_buffer,
    f"{_POOLS}_resolve_memory_pool_config": resolve_memory_pool_config,
    f"{_POOLS}_build_default_req_pool": build_rows,
    f"{_POOLS}_build_token_to_kv_pool": build_kv_pool,
    f"{_POOLS}_build_token_to_kv_pool_allocator": build_allocator,
    f"{_ALLOCATION}alloc_for_extend": alloc_for_extend,
    f"{_ALLOCATION}alloc_for_decode": alloc_for_decode,
    f"{_ALLOCATION}alloc_for_spec_decode": alloc_for_spec_decode,
    "sglang.kernels.ops.speculative.cache_locs.assign_extend_cache_locs_func": (
        assign_extend_cache_locs
    ),
    "sglang.srt.speculative.spec_utils.move_accept_tokens_to_target_kvcache": move_accept_tokens,
    "sglang.srt.speculative.cpp_ngram.ngram_corpus.NgramCorpus.batch_get": match_ngrams,
    "sglang.srt.mem_cache.unified_radix_cache.UnifiedRadixCache.checkpoint_into_tree": (
        checkpoint_into_tree
    ),
}
"""Hooks by the function that each stands around."""
