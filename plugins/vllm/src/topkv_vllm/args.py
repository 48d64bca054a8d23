"""Arguments of vLLM from a configuration of topkv. Imports neither."""

from __future__ import annotations

from os import PathLike
from typing import TYPE_CHECKING, Any

from topkv.errors import ConfigError
from topkv_engines.arguments import take_owned, twice_reasons

if TYPE_CHECKING:
    from collections.abc import Mapping

    from topkv import SparseConfig

WORKERS = {
    "cpu": "topkv_vllm.cpu_worker.TopkvCPUWorker",
    "cuda": "topkv_vllm.gpu_worker.TopkvGPUWorker",
}
"""Worker classes by the device that vLLM runs on."""

GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
"""Compilation settings of vLLM on a GPU: CUDA graphs of decode steps, and nothing else."""

CONNECTOR = {
    "kv_connector": "TopkvConnector",
    "kv_connector_module_path": "topkv_vllm.connector",
    "kv_role": "kv_producer",
}
"""Connector beside vLLM's scheduler, see ``topkv_vllm.connector``; it transfers nothing."""

EIGHT_BITS = ("fp8", "fp8_e4m3")
"""Values of vLLM's ``kv_cache_dtype`` that are ``host_format: fp8`` of topkv."""

OWNED = {
    "max_requests": "max_num_seqs",
    "page_tokens": "block_size",
    "max_request_tokens": "max_model_len",
}
"""Settings of topkv that vLLM has names of its own for: it decides them, and topkv follows."""

PAGES = (
    "pages: the engine gives them out, keeps and finds them; leave it out, and say "
    "enable_prefix_caching=True to have them found again. The cache_salt of requests separates "
    "tenants apart. Nothing keeps pages below vLLM's block pool: raise max_tokens, so that more "
    "of them stay in host memory, or decode through topkv.attach, which has storages"
)


def pages_reasons(stated: Mapping[str, Any]) -> list[str]:
    """The reason against another ``pages`` than the engine's."""
    return [PAGES] * (stated.get("pages", "engine") != "engine")


def engine_args(
    config: SparseConfig | Mapping[str, Any] | str | PathLike[str] | None = None, **arguments: Any
) -> dict[str, Any]:
    """Arguments of ``vllm.LLM`` and ``vllm.EngineArgs`` with which it decodes through topkv.

    Settings that both have get vLLM's name: ``max_requests`` becomes ``max_num_seqs``,
    ``page_tokens`` becomes ``block_size`` and ``max_request_tokens`` becomes ``max_model_len``.

    Args:
        config: whatever ``SparseConfig.load`` takes; None for the defaults. ``max_tokens`` is what
            vLLM's block pool holds, in tokens of all requests together.
        arguments: any others of vLLM; passed on. ``worker_cls`` says for which device arguments
            are made, one of ``WORKERS``; by default it is a GPU where torch sees one.

    Raises:
        ConfigError: with everything that is set twice, or that topkv sets itself.
    """
    from topkv import SparseConfig

    device = _device_of(arguments.get("worker_cls"))
    loaded = SparseConfig() if config is None else SparseConfig.load(config)
    settings = loaded.as_dict()
    ours: dict[str, Any] = {
        "attention_backend": "CUSTOM",
        "worker_cls": WORKERS[device],
        "kv_transfer_config": dict(CONNECTOR),
    }
    ours |= take_owned(settings, OWNED, arguments)
    if device == "cuda" and not arguments.get("enforce_eager"):
        most = int(ours.get("max_num_seqs") or arguments["max_num_seqs"])
        drafts = int((arguments.get("speculative_config") or {}).get("num_speculative_tokens", 0))
        arguments.setdefault("compilation_config", _graphs_of(most, 1 + drafts))
    reasons = pages_reasons(settings) + twice_reasons(ours, arguments)
    settings.pop("pages", None)
    more = dict(arguments.pop("additional_config", None) or {})
    if "topkv" in more:
        reasons.append("additional_config holds a configuration of topkv; hand over one")
    if reasons:
        raise ConfigError("these arguments do not go together", reasons)
    return {**arguments, **ours, "additional_config": {**more, "topkv": settings}}


def _device_of(worker: str | None) -> str:
    """The device of one of ``WORKERS``; of any other worker, that of this machine."""
    import torch

    found = {name: device for device, name in WORKERS.items()}
    return found.get(worker or "", "cuda" if torch.cuda.is_available() else "cpu")


def _graphs_of(most: int, queries: int) -> dict[str, Any]:
    """``GRAPHS``, of numbers of requests up to the most, in tokens: vLLM would leave out the
    numbers between the last one that it knows and the most."""
    sizes = {most, *(size for size in (1, 2, 4, *range(8, 512, 8)) if size < most)}
    return {**GRAPHS, "cudagraph_capture_sizes": [size * queries for size in sorted(sizes)]}
