"""Layers of topkv beside others, of windows or of a drafter, that vLLM keeps on the device.

vLLM groups layers of one kind, cuts the groups to the size of the smallest, and lays all of them
over the same bytes. Topkv's are one group, see ``topkv_vllm.spec``, and need none of them.
"""

from __future__ import annotations

from collections import Counter
from typing import Any

from vllm.utils.math_utils import cdiv
from vllm.v1.engine import core
from vllm.v1.kv_cache_interface import SlidingWindowSpec

from topkv.config import LoweredConfig
from topkv.errors import CapabilityError
from topkv_vllm.spec import TopkvSpec


class Mixture:
    """The blocks of a worker.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        lowered: configuration of the coordinator.
        names: of topkv's layers.
    """

    def __init__(self, vllm_config: Any, lowered: LoweredConfig, names: list[str]) -> None:
        self.config, self.names = vllm_config, names
        self.pages, self.page_tokens = lowered.num_pages, lowered.page_tokens

    def specs(self, specs: dict[str, Any]) -> dict[str, Any]:
        """Return what vLLM allocates for the layers that it is to group.

        Of topkv's these are as many as the smallest other kind has, so that the others are
        grouped as they would be alone.

        Args:
            specs: of all layers, by vLLM.

        Raises:
            CapabilityError: blocks of the others are no pages.
        """
        others = {name: spec for name, spec in specs.items() if name not in self.names}
        blocks, page = {spec.block_size for spec in others.values()}, self.page_tokens
        if blocks != {page}:
            reason = f"blocks of others have {sorted(blocks)} tokens, and pages {page}"
            raise CapabilityError("these layers cannot be served beside each other", [reason])
        like = max(others.values(), key=lambda spec: spec.page_size_bytes)
        shown = self.names[: min(Counter(others.values()).values())]
        own = dict.fromkeys(shown, TopkvSpec.beside(like, self.pages))
        drafts = self.config.speculative_config
        if drafts is not None and drafts.uses_draft_model():
            # Model runner V1 lets it draft with the blocks of the first group.
            return {**dict(reversed(others.items())), **own}
        return {**own, **others}

    def memory(self, specs: dict[str, Any]) -> int:
        """Return bytes of the device: as stated, or as ``max_num_seqs`` requests need them."""
        if stated := self.config.cache_config.kv_cache_memory_bytes:
            return int(stated)
        planned = plan(self.config, specs, 2**50)
        kinds = [group.kv_cache_spec for group in planned.kv_cache_groups]
        blocks = sum(self._blocks(spec) for spec in kinds if not isinstance(spec, TopkvSpec))
        block = planned.kv_cache_tensors[0].size // planned.num_blocks
        return (1 + blocks) * block  # the first one is nobody's

    def _blocks(self, spec: Any) -> int:
        """Most blocks of a group that requests have at a time; no more than they have pages."""
        scheduler, size = self.config.scheduler_config, spec.block_size
        requests = scheduler.max_num_seqs
        most = requests * (cdiv(self.config.model_config.max_model_len, size) + 1)
        if isinstance(spec, SlidingWindowSpec):  # and what all of them append in a step
            kept = spec.sliding_window - 1 + self.config.num_lookahead_tokens
            appended = cdiv(self.config.max_in_flight_tokens, size)
            most = min(most, requests * (cdiv(kept, size) + 2) + appended)
        return int(min(most, self.pages))

    def join(self, kv_cache_config: Any) -> int:
        """Put all of topkv's layers into their group; return its number.

        Args:
            kv_cache_config: of this worker.
        """
        (number,) = (
            number
            for number, group in enumerate(kv_cache_config.kv_cache_groups)
            if isinstance(group.kv_cache_spec, TopkvSpec)
        )
        kv_cache_config.kv_cache_groups[number].layer_names = [*self.names]
        return number


def plan(vllm_config: Any, specs: dict[str, Any], memory: int) -> Any:
    """Plan groups of layers and their blocks as vLLM's engine does.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        specs: of the layers that are grouped.
        memory: bytes of the device.
    """
    arguments = [vllm_config, [specs], [memory]]
    if hasattr(core, "get_global_kv_cache_groups"):  # vLLM 0.33 groups layers before
        arguments.append(core.get_global_kv_cache_groups(vllm_config, [specs]))
    (planned,) = core.get_kv_cache_configs(*arguments)
    return planned
