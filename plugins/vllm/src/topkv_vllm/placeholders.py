"""Blocks of a model whose layers are all topkv's: vLLM's block pool is the host pool.

What vLLM allocates itself is a placeholder of one element a token and layer.
"""

from __future__ import annotations

from typing import Any

from topkv.config import LoweredConfig
from topkv.errors import CapabilityError, ConfigError
from topkv_vllm.latent import LatentBackend


class Placeholders:
    """The blocks of a worker.

    Args:
        lowered: configuration of the coordinator.
    """

    def __init__(self, lowered: LoweredConfig) -> None:
        self.latent, self.pages = lowered.model.attention == "mla", lowered.num_pages

    def specs(self, specs: dict[str, Any]) -> dict[str, Any]:
        """Return what vLLM allocates for each layer.

        Args:
            specs: of the layers, by vLLM.
        """
        if self.latent:
            return {name: LatentBackend.customize_spec(spec) for name, spec in specs.items()}
        return specs  # vLLM asked the backend

    def memory(self, specs: dict[str, Any]) -> int:
        """Return as many bytes as make the block pool as large as the host pool."""
        return self.pages * sum(spec.page_size_bytes for spec in specs.values())

    def join(self, kv_cache_config: Any) -> int:
        """Return the number of the group that topkv's layers are in.

        Args:
            kv_cache_config: of this worker.

        Raises:
            CapabilityError: layers have blocks of several kinds.
            ConfigError: there are more blocks than host pages.
        """
        blocks, groups = kv_cache_config.num_blocks, len(kv_cache_config.kv_cache_groups)
        if groups > 1:
            reason = f"vLLM keeps {groups} groups of layers apart, each with blocks of its own"
            raise CapabilityError("vLLM cannot serve this through topkv", [reason])
        if blocks > self.pages:
            raise ConfigError(
                "vLLM's block pool is topkv's host pool",
                [f"{blocks} blocks exceed {self.pages} pages; raise max_tokens of topkv instead"],
            )
        return 0
