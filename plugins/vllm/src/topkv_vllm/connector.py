"""Connector beside vLLM's scheduler: a request that finds pages waits until they are filled.

vLLM's prefix cache knows a block as soon as a step is scheduled that will fill it. Its own layers
write all keys and values of a step before they read any, so a second request may find the block in
that very step. Here a page is whole when the forward that fills it has ended: its units are on the
host by then, and represented. So whoever finds a page that a scheduled step has yet to fill is
asked for again in the next step. The scheduler has this way for connectors whose answer takes a
while, and stays stock.

Nothing of a connector runs in workers, and no block is moved. Metrics come through it as well.
"""

from __future__ import annotations

from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorMetadata,
    SupportsHMA,
)
from vllm.v1.request import Request, RequestStatus

from topkv_vllm.metrics import TopkvPromMetrics, TopkvStats


class TopkvConnector(KVConnectorBase_V1, SupportsHMA):
    """The scheduler's side of a connector; there is no other.

    Args:
        vllm_config, role, kv_cache_config: as vLLM hands them over.
    """

    requires_kv_delivery = False

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._page: int = vllm_config.cache_config.block_size
        self._admitted: dict[str, Request] = {}

    def get_num_new_matched_tokens(
        self, request: Request, num_computed_tokens: int
    ) -> tuple[int | None, bool]:
        """No further tokens are to be had, and None, ask again, while pages are being filled.

        Args:
            request: that waits.
            num_computed_tokens: tokens of it that vLLM has found in its prefix cache.
        """
        found = num_computed_tokens // self._page
        waits = any(self._fills(other, request, found) for other in self._admitted.values())
        return (None if waits else 0), False

    def _fills(self, other: Request, request: Request, found: int) -> bool:
        """Return True if a running request has yet to fill one of the pages that another found.

        Hashes of pages are chained: where the first page that it has yet to fill is another one's,
        so are those behind.
        """
        page = other.num_computed_tokens // self._page
        return (
            other.status == RequestStatus.RUNNING
            and page < min(found, len(other.block_hashes))
            and other.block_hashes[page] == request.block_hashes[page]
        )

    def update_state_after_alloc(
        self, request: Request, blocks: Any, num_external_tokens: int
    ) -> None:
        """Take note of an admitted request. See ``KVConnectorBase_V1``, here and below."""
        self._admitted[request.request_id] = request

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, None]:
        """Let the blocks of a request be freed."""
        self._admitted.pop(request.request_id, None)
        return False, None

    def request_finished_all_groups(
        self, request: Request, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, None]:
        """Let the blocks of a request be freed."""
        return self.request_finished(request, [])

    def build_connector_meta(self, scheduler_output: Any) -> KVConnectorMetadata:
        """Return nothing for the workers."""
        return KVConnectorMetadata()

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TopkvStats:
        """Wrap the counts of workers, see ``topkv_vllm.metrics``."""
        return TopkvStats(data or {})

    @classmethod
    def build_prom_metrics(cls, *arguments: Any) -> TopkvPromMetrics:
        """Make the metrics that show the counts of workers."""
        return TopkvPromMetrics(*arguments)

    def start_load_kv(self, forward_context: Any, **more: Any) -> None:
        """Do nothing: a hook of workers, and never called, as those below."""

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a hook of workers."""

    def save_kv_layer(
        self, layer_name: str, kv_layer: Any, attn_metadata: Any, **more: Any
    ) -> None:
        """Do nothing: a hook of workers."""

    def wait_for_save(self) -> None:
        """Do nothing: a hook of workers."""
