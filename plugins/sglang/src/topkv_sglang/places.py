"""Places of SGLang that this package overrides, hooks or reads, see ``topkv_engines.places``."""

from __future__ import annotations

from topkv_engines.places import Place

_ARGUMENTS = "sglang.srt.arg_groups.model_override_base"
_POOL, _BATCH = "sglang.srt.mem_cache.memory_pool", "sglang.srt.managers.schedule_batch"
_CONFIGURATOR = "sglang.srt.mem_cache.kv_cache_configurator"
_RUNNER = "sglang.srt.model_executor.model_runner"
_ATTENTION = "sglang.srt.layers.attention"
_MODEL = (
    *("num_hidden_layers", "num_attention_heads", "get_num_kv_heads", "head_dim", "v_head_dim"),
    *("dtype", "context_len", "hf_config", "hf_text_config", "attention_arch", "is_generation"),
    *("is_encoder_decoder", "is_multimodal", "is_hybrid_swa", "sliding_window_size"),
    *("attention_chunk_size", "has_attention_sinks"),
)
_LAYER = (
    *("tp_q_head_num", "tp_k_head_num", "tp_v_head_num", "qk_head_dim", "v_head_dim", "scaling"),
    *("layer_id", "logit_cap", "sliding_window_size", "is_cross_attention", "use_irope"),
    *("attn_type", "pos_encoding_mode", "xai_temperature_len", "k_scale"),
)
_GIVEN = (
    *("device", "page_size", "max_running_requests", "max_total_tokens", "attention_backend"),
    *("prefill_attention_backend", "decode_attention_backend", "json_model_override_args"),
    *(
        "disable_radix_cache",
        "kv_cache_dtype",
        "speculative_algorithm",
        "speculative_num_draft_tokens",
        "speculative_ngram_max_bfs_breadth",
        "tp_size",
        "pp_size",
    ),
)

PLACES = (
    Place(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry.register",
        "takes hooks",
        ("target", "hook", "hook_type"),
        alone=True,
    ),
    Place(
        "sglang.srt.plugins.hook_registry",
        "HookRegistry",
        "says which hooks were taken",
        fields=("_patched",),
    ),
    Place(
        "sglang.srt.arg_groups.choices",
        "add_attention_backend_choices",
        "makes the option known",
    ),
    Place(
        f"{_ATTENTION}.attention_registry",
        "register_attention_backend",
        "makes the backend known",
        ("name",),
        alone=True,
    ),
    Place(
        "sglang.srt.arg_groups.validation_hook",
        "check_server_args",
        "checks arguments where an engine is started",
        ("server_args",),
        alone=True,
    ),
    Place(
        "sglang.srt.arg_groups.attention_hook",
        "handle_attention_backend_compatibility",
        "decides which graphs are recorded",
        ("server_args",),
        alone=True,
    ),
    Place(
        "sglang.srt.arg_groups.overrides",
        "declare_resolution",
        "changes an argument",
        ("server_args", "source"),
    ),
    Place(
        "sglang.srt.arg_groups.overrides",
        "post_capture_kv_sizing_planned",
        "decides whether the pool grows once graphs are recorded",
        ("server_args",),
        alone=True,
    ),
    Place(
        "sglang.srt.model_executor.cuda_graph_config",
        "with_phase",
        "describes graphs of prompts",
        ("config", "phase"),
    ),
    Place(_ARGUMENTS, "resolving_view", "shows arguments", ("server_args",), alone=True),
    Place(_ARGUMENTS, "model_config_of", "makes a model's configuration", ("server_args",)),
    Place(_ARGUMENTS, "attention_backends_of", "says which backends were asked for", ("cfg",)),
    Place("sglang.srt.runtime_context", "attention_backends", "says so in a scheduler"),
    Place("sglang.srt.runtime_context", "get_parallel", "says which rank this is"),
    Place("sglang.srt.server_args", "ServerArgs", "has the arguments", fields=_GIVEN),
    Place("sglang.srt.configs.model_config", "ModelConfig", "describes a model", fields=_MODEL),
    Place("sglang.srt.layers.radix_attention", "RadixAttention", "is a layer", fields=_LAYER),
    Place(
        f"{_ATTENTION}.base_attn_backend",
        "AttentionBackend.init_forward_metadata_out_graph",
        "opens the forward of a step",
        ("forward_batch", "in_capture"),
        alone=True,
    ),
    Place(
        f"{_ATTENTION}.base_attn_backend",
        "AttentionBackend.shared_read_ends",
        "says when pools are read no more",
        ("fm",),
        alone=True,
    ),
    Place(
        f"{_ATTENTION}.base_attn_backend",
        "AttentionBackend.forward_extend",
        "attends a layer; forward_decode alike",
        ("q", "k", "v", "layer", "forward_batch", "save_kv_cache"),
        alone=True,
    ),
    Place(
        "sglang.srt.utils.common",
        "support_triton",
        "says where places of tokens are",
        ("backend",),
        alone=True,
    ),
    Place(
        "sglang.srt.models.utils",
        "enable_fused_set_kv_buffer",
        "says whether a kernel that rotates keys writes them too",
        ("forward_batch",),
        alone=True,
    ),
    Place(
        _CONFIGURATOR,
        "KVCacheConfigurator._resolve_memory_pool_config",
        "sizes the pool",
        ("pre_model_load_memory",),
        alone=True,
    ),
    Place(
        _CONFIGURATOR,
        "KVCacheConfigurator._build_default_req_pool",
        "makes the rows",
        ("max_num_reqs", "extra_max_context_len"),
        alone=True,
    ),
    Place(
        _CONFIGURATOR,
        "KVCacheConfigurator._build_token_to_kv_pool_allocator",
        "makes what gives out places of tokens",
        (),
    ),
    Place(_CONFIGURATOR, "KVCacheConfigurator", "has a device", fields=("device",)),
    Place(
        _CONFIGURATOR,
        "KVCacheConfigurator._profile_available_bytes",
        "says how much of the device is left",
        ("pre_model_load_memory",),
    ),
    Place(
        "sglang.srt.mem_cache.allocator.paged",
        "PagedTokenToKVPoolAllocator",
        "gives out places of tokens",
        fields=("use_triton_kernels",),
    ),
    Place(
        "sglang.srt.mem_cache.allocation",
        "alloc_for_extend",
        "asks for those of prompts",
        ("batch",),
    ),
    Place(
        "sglang.srt.mem_cache.allocation",
        "alloc_for_decode",
        "asks for those of tokens that are decoded",
        ("batch", "token_per_req"),
    ),
    Place(
        "sglang.srt.mem_cache.allocation",
        "alloc_for_spec_decode",
        "asks for those of tokens that are verified",
        (
            *("tree_cache", "req_to_token_pool", "reqs", "req_pool_indices", "batch"),
            *("cur_kv_lens", "cur_kv_lens_cpu", "nxt_kv_lens", "nxt_kv_lens_cpu"),
            "num_needed_tokens",
        ),
        alone=True,
    ),
    Place(
        "sglang.srt.mem_cache.allocation",
        "alloc_paged_token_slots_extend",
        "gives those out",
        ("tree_cache", "prefix_lens", "seq_lens", "last_loc", "extend_num_tokens"),
    ),
    Place(
        "sglang.srt.mem_cache.allocation",
        "get_last_loc_torch",
        "finds the last place of each request",
        ("req_to_token", "req_pool_indices_tensor", "prefix_lens_tensor"),
    ),
    Place(
        "sglang.kernels.ops.speculative.cache_locs",
        "assign_extend_cache_locs_func",
        "looks places of drafts up",
        (
            *("req_pool_indices", "req_to_token", "start_offset", "end_offset"),
            *("batch_size", "draft_token_num", "device"),
        ),
        alone=True,
    ),
    Place(
        "sglang.srt.speculative.spec_utils",
        "move_accept_tokens_to_target_kvcache",
        "moves drafts that are kept",
        alone=True,
    ),
    Place(
        "sglang.srt.speculative.cpp_ngram.ngram_corpus",
        "NgramCorpus.batch_get",
        "finds drafts",
        ("req_ids", "batch_tokens", "total_lens"),
        alone=True,
    ),
    Place(
        _CONFIGURATOR,
        "KVCacheConfigurator._build_token_to_kv_pool",
        "chooses the pool of a model",
        ("sizes", "is_dsa_model", "is_dsv4_model", "req_to_token_pool"),
        alone=True,
    ),
    Place(
        _CONFIGURATOR,
        "KVCacheConfigurator._build_mha_kv_pool",
        "makes it",
        ("max_total_num_tokens", "mha_pool_class"),
        alone=True,
    ),
    Place(
        "sglang.srt.model_executor.pool_configurator",
        "MemoryPoolConfig",
        "has the size of the pool",
        fields=("max_total_num_tokens", "max_running_requests"),
    ),
    Place(
        _POOL,
        "ReqToTokenPool",
        "has the rows",
        fields=("req_to_token", "req_generation", "size", "free_rows", "clear"),
    ),
    Place(
        _POOL,
        "ReqToTokenPool.__init__",
        "makes them",
        ("size", "max_context_len", "device", "enable_memory_saver"),
        alone=True,
    ),
    Place(
        _POOL,
        "NoOpMHATokenToKVPool",
        "is a pool of placeholders",
        fields=("set_kv_buffer", "get_kv_buffer", "get_key_buffer", "get_value_buffer"),
    ),
    Place(
        "sglang.srt.mem_cache.unified_radix_cache",
        "UnifiedRadixCache.checkpoint_into_tree",
        "replaces pages by equal ones",
        ("req", "up_to"),
        alone=True,
    ),
    Place(
        "sglang.srt.beam_search.coordinator",
        "BeamCoordinator.validate_and_init",
        "lets requests for beams in",
        ("req", "recv_req"),
        alone=True,
    ),
    Place(
        _BATCH,
        "ScheduleBatch",
        "says what a step does",
        fields=(
            *("reqs", "forward_mode", "req_pool_indices_cpu", "seq_lens_cpu", "prefix_lens"),
            "extend_lens",
        ),
    ),
    Place(
        _BATCH,
        "Req",
        "has the tokens that a request reads before it decodes",
        fields=("full_untruncated_fill_ids", "kv"),
    ),
    Place(
        "sglang.srt.model_executor.forward_batch_info",
        "ForwardBatch.init_new",
        "makes the forward of a step",
        ("batch", "model_runner"),
    ),
    Place(_RUNNER, "ModelRunner.load_model", "loads the model"),
    Place(_RUNNER, "ModelRunner.forward", "runs a step", ("forward_batch",)),
    Place(
        _RUNNER,
        "ModelRunner",
        "has what belongs to a model",
        fields=("model", "model_config", "server_args", "req_to_token_pool", "use_mla_backend"),
    ),
    Place(
        "sglang.srt.managers.scheduler",
        "Scheduler",
        "runs steps, and is idle or ends",
        fields=(
            *("process_batch_result", "on_idle", "release_host_resources", "tp_worker"),
            *("metrics_collector", "metrics_reporter"),
        ),
    ),
    Place(
        "sglang.srt.managers.scheduler_components.internal_state",
        "SchedulerInternalStateController.get_internal_state",
        "reports the state of a scheduler",
        ("recv_req",),
        alone=True,
    ),
)
"""Places of all models; options that are refused are read off the arguments too."""

_LATENT = "sglang.srt.models.deepseek_common"
_INDEXER = (
    *("n_heads", "head_dim", "rope_head_dim", "softmax_scale", "use_dsa_indexer_fusion", "wq_b"),
    *("wk", "weights_proj", "wk_weights_proj", "k_norm", "rotary_emb"),
)

LATENT_PLACES = (
    Place(
        "sglang.srt.arg_groups.overrides",
        "_dsa_kv_cache_dtype_default",
        "chooses the dtype of rows",
        ("view",),
        alone=True,
    ),
    Place(
        "sglang.srt.arg_groups.overrides",
        "_dsa_split_backend_resolution",
        "chooses kernels of SGLang's own sparse attention",
        ("view",),
        alone=True,
    ),
    Place(
        "sglang.srt.configs.model_config",
        "ModelConfig",
        "describes rows",
        fields=("kv_lora_rank", "qk_rope_head_dim", "scaling"),
    ),
    Place(
        "sglang.srt.configs.model_config",
        "dsa_layer_skips_topk",
        "says which layers have an indexer",
        ("config", "layer_id"),
        alone=True,
    ),
    Place(
        f"{_LATENT}.attention_backend_handler",
        "AttentionBackendRegistry.register",
        "says which method of attention a backend wants",
        ("backend_name", "handler_func"),
        alone=True,
    ),
    Place(
        f"{_LATENT}.attention_forward_methods.forward_methods",
        "AttnForwardMethod",
        "names that of rows",
        fields=("MLA",),
    ),
    Place(
        "sglang.srt.models.deepseek_v2",
        "DeepseekV2AttentionMLA",
        "is a layer",
        fields=("attn_mqa", "indexer"),
    ),
    Place(
        "sglang.srt.layers.attention.dsa.dsa_indexer",
        "Indexer.forward_cuda",
        "runs an indexer",
        ("x", "q_lora", "positions", "forward_batch", "layer_id"),
        alone=True,
    ),
    Place(
        "sglang.srt.layers.attention.dsa.dsa_indexer",
        "Indexer",
        "projects queries, keys and weights",
        fields=_INDEXER,
    ),
)
"""Places of latent attention, which models without it do not import."""
