"""Refusals before a weight is loaded, with every reason at once."""

from __future__ import annotations

import json
from typing import Any

from topkv import SparseConfig
from topkv.assembly.assembly import make_plugins
from topkv.config import LoweredConfig
from topkv.errors import CapabilityError, ReasonsError, TopkvError
from topkv.plugins import registry
from topkv_engines.places import Place, moved
from topkv_engines.ranks import rank_reasons
from topkv_engines.refusals import prefix_reasons, room_reasons
from topkv_sglang import places
from topkv_sglang.args import BACKEND, OWNED, SETTINGS, pages_reasons
from topkv_sglang.drafts import draft_reasons
from topkv_sglang.geometry import REFUSED, lowered_for, pool_tokens, shape_of_config
from topkv_sglang.latent import latent_reasons
from topkv_sglang.ranks import kv_heads, split_reasons
from topkv_sglang.versions import TESTED, version_reasons

HINT = (
    f"json_model_override_args holds no configuration of topkv; use topkv_sglang.engine_args, or "
    f"--json-model-override-args '{{\"{SETTINGS}\": {{...}}}}'"
)


def check(arguments: Any, model: Any, version: str) -> LoweredConfig:
    """Refuse what cannot be served. Allocates nothing but scratch of plugins, for a moment.

    Args:
        arguments: SGLang's, once they are resolved.
        model: SGLang's ``ModelConfig``.
        version: of SGLang.

    Returns:
        The configuration of topkv, by what the configuration of the model says of its layers.

    Raises:
        CapabilityError: SGLang's arguments or the model cannot be served; with every reason.
        ConfigError, PluginError: the settings cannot; with every reason too.
    """
    reasons = version_reasons(version, arguments.device)
    reasons += _model_reasons(arguments, model) + _option_reasons(arguments)
    reasons += _rank_reasons(arguments) + draft_reasons(arguments)
    reasons += _cache_reasons(arguments) + moved(_places(model), arguments.device, "SGLang")
    settings, wrong = settings_of(arguments)
    reasons += wrong
    if reasons:  # lowering wants a model and options that make sense
        raise CapabilityError(REFUSED, reasons)
    try:
        shape = shape_of_config(model, arguments.tp_size)
        lowered = lowered_for(arguments, model, settings, shape)
        reasons += algorithm_reasons(arguments, model, lowered)
    except ReasonsError as error:
        raise type(error)(REFUSED, [*error.reasons, *split_reasons(arguments, model)]) from error
    if reasons:
        raise CapabilityError(REFUSED, reasons)
    return lowered


def _places(model: Any) -> tuple[Place, ...]:
    """Places of SGLang that a model makes use of."""
    latent = model.attention_arch.name == "MLA"
    return places.PLACES + (places.LATENT_PLACES if latent else ())


def settings_of(arguments: Any) -> tuple[SparseConfig, list[str]]:
    """The user's settings, and why some are refused."""
    try:
        given = json.loads(arguments.json_model_override_args or "{}").get(SETTINGS)
    except (AttributeError, ValueError) as error:
        return SparseConfig(), [f"json_model_override_args must be a JSON object: {error}"]
    if given is None:
        return SparseConfig(), [HINT]
    try:
        settings = SparseConfig.load(given)
    except TopkvError as error:
        return SparseConfig(), list(getattr(error, "reasons", None) or [str(error)])
    stated = settings.as_dict()
    reasons = [
        f"{name} is {argument} of SGLang, which decides; leave it out of topkv's configuration"
        for name, argument in {**OWNED, "max_queries": "speculative_num_draft_tokens"}.items()
        if name in stated
    ]
    return settings, reasons + pages_reasons(stated)


def _model_reasons(arguments: Any, model: Any) -> list[str]:
    """Reasons against a kind of model; its layers are looked at when they are made."""
    text = model.hf_text_config
    latent = model.attention_arch.name == "MLA"
    kinds = {*(getattr(text, "layer_types", None) or ())} - {"full_attention"}
    if latent:
        kinds -= {"indexed_attention"}  # Transformers' name of layers with an indexer
    found = {
        "is no generator of text": not model.is_generation,
        "is an encoder-decoder": model.is_encoder_decoder,
        "reads images or sound": model.is_multimodal,
        f"has layers of other kinds ({', '.join(sorted(kinds))})": kinds,
        "slides over a window": model.is_hybrid_swa
        or ("layer_types" not in vars(text) and model.sliding_window_size is not None),
        "attends in chunks": model.attention_chunk_size is not None,
        "has attention sinks": model.has_attention_sinks,
        "caps attention logits": getattr(text, "attn_logit_softcapping", None) is not None,
        "has values of another size than keys": not latent and model.v_head_dim != model.head_dim,
    }
    reasons = latent_reasons(arguments, model) if latent else []
    return reasons + [
        f"the model {what}, which is not supported" for what, is_so in found.items() if is_so
    ]


def _option_reasons(arguments: Any) -> list[str]:
    """Options of SGLang that this package does not serve."""
    given = arguments
    phases = {
        f"attention backend {name} beside topkv; say --attention-backend {BACKEND} alone": name
        not in (None, BACKEND)
        for name in (given.prefill_attention_backend, given.decode_attention_backend)
    }
    refused = {
        **phases,
        f"the device {given.device}; tested are {', '.join(TESTED)}": given.device not in TESTED,
        f"kv_cache_dtype {given.kv_cache_dtype}; say auto, and host_format of topkv": (
            given.kv_cache_dtype != "auto"
        ),
        "models of diffusion (dllm_algorithm), which write tokens again": (
            given.dllm_algorithm is not None
        ),
        "embeddings (is_embedding), which keep no tokens": given.is_embedding,
        "a server without a cache (prefill_only_disable_kv_cache)": (
            given.prefill_only_disable_kv_cache
        ),
        "compilation (enable_torch_compile), which was not run yet": given.enable_torch_compile,
        "two batches or a split prompt that share a forward (enable_two_batch_overlap, "
        "enable_single_batch_overlap, enable_pdmux)": given.enable_two_batch_overlap
        or given.enable_single_batch_overlap
        or given.enable_pdmux,
        "many items in a prompt (enable_mis), which hide tokens from each other": given.enable_mis,
        "looks into the pool (kv_canary), which is a placeholder": (
            given.kv_canary not in (None, "none")
        ),
    }
    return [f"not supported: {what}" for what, is_so in refused.items() if is_so]


def _rank_reasons(arguments: Any) -> list[str]:
    """Several processes for one model, other than tensor parallel ranks of one machine."""
    several = {
        "pipeline parallel stages (pp_size), which run several steps at a time": (
            arguments.pp_size
        ),
        "data parallel ranks (dp_size), which were not run yet": arguments.dp_size,
        "ranks that share attention (attn_dp_size)": arguments.attn_dp_size,
        "context parallel ranks (attn_cp_size, dcp_size): each would have some tokens of a "
        "request, and select among them alone": max(arguments.attn_cp_size, arguments.dcp_size),
        "several machines (nnodes)": arguments.nnodes,
    }
    return [f"not supported: {what}" for what, number in several.items() if (number or 1) > 1]


def _cache_reasons(arguments: Any) -> list[str]:
    """Options that keep, move or lay out KV in SGLang's own pool, which is a placeholder."""
    used = {
        "enable_hierarchical_cache": "rows are in host memory already",
        "enable_lmcache": "it would move placeholders",
        "enable_flexkv": "it would move placeholders",
        "enable_unified_cache_external_linker": "it would move placeholders",
        "enable_hisparse": "it selects and keeps KV itself",
        "enable_unified_memory": "pages of topkv are none of its pool",
        "enable_page_major_kv_layout": "topkv has a layout of its own",
        "enable_kv_cache_sharding": "pages are of one pool",
        "enable_memory_saver": "device buffers of topkv would stay",
        "enable_streaming_session": "it hands rows from one request to another",
        "enable_session_radix_cache": "it was not run yet",
    }
    reasons = [
        f"not supported: {name}: {why}" for name, why in used.items() if getattr(arguments, name)
    ]
    if arguments.radix_cache_backend is not None:
        named = arguments.radix_cache_backend
        reasons.append(f"not supported: radix_cache_backend {named}, which was not run yet")
    if arguments.disaggregation_mode != "null":
        mode = arguments.disaggregation_mode
        reasons.append(f"not supported: disaggregation_mode {mode}: it would move placeholders")
    return reasons


def algorithm_reasons(arguments: Any, model: Any, lowered: LoweredConfig) -> list[str]:
    """Algorithms that could run out of room in the middle of a step, or share no prefixes, and a
    pool that is larger than the host pool."""
    plugins = make_plugins(registry(), lowered)
    reasons = rank_reasons(arguments.tp_size, kv_heads(model), lowered, plugins.specs)
    most, tokens = arguments.max_total_tokens, pool_tokens(lowered, None)
    if most is not None and most > tokens:
        reasons.append(
            f"max_total_tokens = {most} exceeds the {tokens} tokens of topkv's host pool, which "
            "is SGLang's pool; leave it out, or raise max_tokens of topkv"
        )
    room = plugins.least("generated") - (lowered.max_queries - 1)  # drafts stand behind a request
    reasons += room_reasons(room, model.context_len, "context_length")
    if not arguments.disable_radix_cache:
        off = "disable_radix_cache=True"
        reasons += prefix_reasons(lowered, plugins.specs, "the radix cache", off)
    return reasons
