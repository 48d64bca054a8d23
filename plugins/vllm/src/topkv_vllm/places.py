"""Places of vLLM that this package overrides, patches or reads, see ``topkv_engines.places``."""

from __future__ import annotations

from topkv_engines.places import Place

_BACKEND, _WORKER = "vllm.v1.attention.backend", "vllm.v1.worker.gpu_worker"
_OUTPUT, _RUNNER = "vllm.v1.core.sched.output", "vllm.v1.worker.gpu_model_runner"
_V2 = "vllm.v1.worker.gpu.model_runner"
_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1"
_STEP = (
    *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "finished_req_ids"),
    "preempted_req_ids",
)
_NEW = ("req_id", "prompt_token_ids", "prompt_embeds", "block_ids", "num_computed_tokens")
_CACHED = (
    *("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens", "num_output_tokens"),
)
_LAYER = ("num_heads", "head_size", "scale", "num_kv_heads", "alibi_slopes", "sliding_window")
_LAYER += ("kv_cache_dtype", "logits_soft_cap", "attn_type", "kv_sharing_target_layer_name")

PLACES = (
    Place(
        "vllm.v1.attention.backends.registry",
        "AttentionBackendEnum",
        "names the backend CUSTOM",
        fields=("CUSTOM", "is_overridden"),
    ),
    Place("vllm.v1.attention.backends.registry", "register_backend", "makes the backend known"),
    Place(
        "vllm.platforms.interface",
        "Platform.get_attn_backend_cls",
        "chooses the backend of a layer",
        ("attn_selector_config",),
    ),
    Place(
        "vllm.v1.attention.selector",
        "AttentionSelectorConfig",
        "says which layers have windows",
        fields=("has_sliding_window",),
    ),
    Place(_BACKEND, "AttentionBackend", "is asked for the classes of a layer"),
    Place(
        _BACKEND,
        "AttentionMetadataBuilder.build",
        "opens the forward of a step",
        ("common_prefix_len", "common_attn_metadata", "fast_build"),
        alone=True,
    ),
    Place(
        _BACKEND,
        "CommonAttentionMetadata",
        "says how many rows there are, and how long requests",
        fields=("num_reqs", "num_actual_tokens", "seq_lens"),
    ),
    Place(_BACKEND, "AttentionImpl.__init__", "has what a layer asks for", _LAYER),
    Place(
        "vllm.model_executor.layers.attention_layer_base",
        "AttentionLayerBase",
        "is the base of layers with a cache",
    ),
    Place(
        _WORKER,
        "Worker",
        "is the base of workers",
        fields=(
            *("load_model", "get_kv_cache_spec", "determine_available_memory", "shutdown"),
            *("initialize_from_config", "execute_model", "sample_tokens"),
        ),
    ),
    Place("vllm.v1.worker.cpu_worker", "CPUWorker", "is that of a CPU", device="cpu"),
    Place(
        _WORKER,
        "Worker",
        "has the memory and the runner of a GPU",
        fields=("requested_memory", "compile_or_warm_up_model"),
        device="cuda",
    ),
    Place(
        _RUNNER,
        "GPUModelRunner",
        "is the runner of a CPU, and names the requests of rows",
        fields=("input_batch",),
        device="cpu",
    ),
    Place(
        _V2,
        "sort_batch_req_ids",
        "orders the rows of runner V2",
        ("num_tokens_per_req", "draft_tokens", "decode_query_len"),
        device="cuda",
        alone=True,
    ),
    Place(
        _V2,
        "GPUModelRunner",
        "is the runner of a GPU, V2",
        fields=("cudagraph_manager", "decode_query_len", "profile_run", "model_memory_usage"),
        device="cuda",
    ),
    Place(
        "vllm.v1.worker.gpu.cudagraph_utils",
        "CudaGraphManager.dispatch",
        "decides which steps are replayed, for runner V2",
        ("num_reqs", "num_tokens", "uniform_token_count"),
        device="cuda",
    ),
    Place(_OUTPUT, "SchedulerOutput", "says what a step does", fields=_STEP),
    Place(_OUTPUT, "NewRequestData", "has a request that begins", fields=_NEW),
    Place(_OUTPUT, "CachedRequestData", "has those that go on", fields=_CACHED),
    Place(
        f"{_CONNECTOR}.base",
        "KVConnectorBase_V1.get_num_new_matched_tokens",
        "lets a request wait for pages that a step is to fill",
        ("request", "num_computed_tokens"),
        alone=True,
    ),
    Place(
        f"{_CONNECTOR}.base",
        "KVConnectorBase_V1",
        "stands beside the scheduler",
        fields=("update_state_after_alloc", "request_finished", "build_connector_meta"),
    ),
    Place(
        f"{_CONNECTOR}.metrics",
        "KVConnectorStats",
        "carries counts to the front end",
        fields=("aggregate", "reduce", "reset", "is_empty"),
    ),
    Place(f"{_CONNECTOR}.metrics", "KVConnectorPromMetrics.observe", "shows counts"),
)
"""All places; those of latent attention are vLLM's layers, which ``layers.py`` looks at."""

_SPECS, _MANAGERS = "vllm.v1.kv_cache_interface", "vllm.v1.core.single_type_kv_cache_manager"
_REGISTRY = "vllm.v1.kv_cache_spec_registry"

BESIDE = (
    Place(_REGISTRY, "register_kv_cache_spec", "makes topkv's blocks known", ("manager_class",)),
    Place(
        _REGISTRY,
        "KVCacheSpecRegistry.check_kv_cache_spec_registry",
        "makes vLLM's own known before",
        ("kv_cache_spec",),
        alone=True,
    ),
    Place(
        _SPECS,
        "FullAttentionSpec",
        "is the base of topkv's",
        fields=(
            *("block_size", "page_size_bytes", "dcp_sharded", "merge", "max_memory_usage_bytes"),
        ),
    ),
    Place(_SPECS, "AttentionSpec", "says how large a block is", fields=("block_size",)),
    Place(_SPECS, "SlidingWindowSpec", "is that of windows", fields=("sliding_window",)),
    Place(
        _SPECS,
        "KVCacheConfig",
        "has the groups of layers",
        fields=("num_blocks", "kv_cache_groups", "kv_cache_tensors"),
    ),
    Place(_SPECS, "KVCacheTensor", "has their memory", fields=("size", "layers")),
    Place(
        _SPECS,
        "KVCacheGroupSpec",
        "is to have all of topkv's layers",
        fields=("layer_names", "kv_cache_spec"),
    ),
    Place(
        _MANAGERS,
        "FullAttentionManager",
        "gives pages to requests",
        fields=("get_num_blocks_to_allocate", "block_pool"),
    ),
    Place(
        _MANAGERS,
        "FullAttentionManager.__init__",
        "takes the pool of pages",
        ("kv_cache_spec", "block_pool", "enable_caching", "needs_kv_cache_zeroing"),
    ),
    Place(
        "vllm.v1.core.block_pool",
        "BlockPool.__init__",
        "is a pool",
        (
            *("num_gpu_blocks", "enable_caching", "hash_block_size", "enable_kv_cache_events"),
            "medium",
        ),
        alone=True,
    ),
    Place(
        "vllm.v1.hisparse.block_pool",
        "SharedEventQueueBlockPool",
        "is the pool of pages, beside that of the device",
    ),
    Place(
        "vllm.v1.engine.core",
        "get_kv_cache_configs",
        "plans the groups",
        ("vllm_config", "kv_cache_specs", "available_memory"),
        device="cpu",
        alone=True,
    ),
    Place(
        "vllm.v1.engine.core",
        "get_global_kv_cache_groups",
        "groups layers",
        ("vllm_config", "kv_cache_specs"),
        device="cuda",
        alone=True,
    ),
    Place(
        "vllm.v1.engine.core",
        "get_kv_cache_configs",
        "plans the groups",
        ("vllm_config", "kv_cache_specs", "available_memory", "global_kv_cache_groups"),
        device="cuda",
        alone=True,
    ),
    Place(
        "vllm.config",
        "VllmConfig",
        "says what requests append in a step",
        fields=("max_in_flight_tokens", "num_lookahead_tokens"),
    ),
    Place("vllm.config", "SpeculativeConfig", "says what drafts", fields=("uses_draft_model",)),
    Place(
        "vllm.v1.worker.gpu.spec_decode.speculator",
        "DraftModelSpeculator",
        "has a drafter, whose layers ask for a backend of their own",
        fields=("vllm_config", "speculative_config", "load_model"),
        device="cuda",
    ),
)
"""Further places, of models whose layers are not all topkv's."""
