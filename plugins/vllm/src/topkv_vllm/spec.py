"""The layers of topkv as one of vLLM's kinds: their blocks are pages of the host pool.

vLLM's own block pool is that of the device, which other layers of the model have. Its engine finds
the manager by the spec, in whatever process it runs.
"""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from vllm.distributed.kv_events import MEDIUM_CPU
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager
from vllm.v1.hisparse.block_pool import SharedEventQueueBlockPool
from vllm.v1.kv_cache_interface import AttentionSpec, FullAttentionSpec
from vllm.v1.kv_cache_spec_registry import KVCacheSpecRegistry, register_kv_cache_spec


class TopkvManager(FullAttentionManager):
    """Gives pages of the host pool to requests, keeps and finds them.

    Args:
        kv_cache_spec: of the layers.
        block_pool: of the device.
        more: as vLLM hands them over.
    """

    def __init__(self, kv_cache_spec: TopkvSpec, block_pool: BlockPool, **more: Any) -> None:
        pages = SharedEventQueueBlockPool(
            kv_cache_spec.pages,
            more["enable_caching"],
            block_pool.hash_block_size,
            block_pool.enable_kv_cache_events,
            medium=MEDIUM_CPU,
            event_owner=block_pool,
        )
        # What is to be zeroed are blocks of the device, which have the same numbers.
        super().__init__(kv_cache_spec, pages, **{**more, "needs_kv_cache_zeroing": False})
        self._device = block_pool

    def get_num_blocks_to_allocate(self, *request: Any, **more: Any) -> int:
        """Return how many blocks of the device a request needs: none, or, where there are not
        enough pages, more than there are."""
        pages = super().get_num_blocks_to_allocate(*request, **more)
        enough = pages <= self.block_pool.get_num_free_blocks()
        return 0 if enough else self._device.num_gpu_blocks + 1


KVCacheSpecRegistry.check_kv_cache_spec_registry({})  # vLLM adds its own only to an empty registry


@register_kv_cache_spec(manager_class=TopkvManager)
@dataclass(frozen=True, kw_only=True)
class TopkvSpec(FullAttentionSpec):
    """Blocks of a layer of topkv.

    Attributes:
        pages: of the host pool, with the one that nobody has.
    """

    pages: int

    @classmethod
    def beside(cls, other: AttentionSpec, pages: int) -> TopkvSpec:
        """Make a spec of blocks of as many bytes and tokens as those of another layer: vLLM would
        give smaller ones more tokens."""
        alike = {field.name: getattr(other, field.name) for field in fields(AttentionSpec)}
        alike["dcp_sharded"] = False  # that of other layers is True, or vLLM would merge them
        return cls(**alike, pages=pages)

    @classmethod
    def merge(cls, specs: list[TopkvSpec]) -> TopkvSpec:
        """Merge specs that are the same."""
        if any(spec != specs[0] for spec in specs):
            raise AssertionError("others have blocks of the device")  # as vLLM wants it
        return specs[0]

    def max_memory_usage_bytes(self, vllm_config: Any) -> int:
        """Return what a request takes of the device."""
        return 0
