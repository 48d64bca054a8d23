"""The attention backend that vLLM calls ``CUSTOM``: every layer attends through the coordinator.

vLLM keeps no keys and values. What it allocates is a placeholder of one element a token and layer,
so that its block pool can be as large as the host pool is.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, ClassVar

import torch
from attrs import define
from torch import Tensor
from vllm.platforms import current_platform
from vllm.v1.attention.backend import (
    AttentionBackend,
    AttentionCGSupport,
    AttentionImpl,
    AttentionMetadata,
    AttentionMetadataBuilder,
    AttentionType,
    CommonAttentionMetadata,
)
from vllm.v1.attention.backends.registry import AttentionBackendEnum

from topkv.errors import CapabilityError
from topkv_engines.session import Session
from topkv_vllm.args import EIGHT_BITS


@define
class TopkvMetadata(AttentionMetadata):
    """Metadata of a forward.

    Attributes:
        rows: of the open forward; 0 where there is none, and nothing attends.
    """

    rows: int


class TopkvMetadataBuilder(AttentionMetadataBuilder[TopkvMetadata]):
    """Opens the coordinator's forward when the runner has decided the order of its rows.

    Args:
        kv_cache_spec, layer_names, vllm_config, device: as vLLM hands them over.
    """

    reorder_batch_threshold: int | None = 1
    _cudagraph_support: ClassVar[AttentionCGSupport] = AttentionCGSupport.UNIFORM_BATCH

    def __init__(
        self, kv_cache_spec: Any, layer_names: list[str], vllm_config: Any, device: torch.device
    ) -> None:
        super().__init__(kv_cache_spec, layer_names, vllm_config, device)
        layers = vllm_config.compilation_config.static_forward_context
        self.session: Session = layers[layer_names[0]].impl.session

    def build(
        self,
        common_prefix_len: int,
        common_attn_metadata: CommonAttentionMetadata,
        fast_build: bool = False,
    ) -> TopkvMetadata:
        """See ``AttentionMetadataBuilder``."""
        step = common_attn_metadata
        rows = self.session.forward(step.num_reqs, step.num_actual_tokens, step.seq_lens)
        return TopkvMetadata(rows)


class TopkvImpl(AttentionImpl[TopkvMetadata]):
    """One attention layer.

    Args:
        num_heads, head_size, scale, num_kv_heads: its geometry.
        kv_cache_dtype: ``"auto"``, or what topkv's host format keeps.
        sinks: ``[H]`` logits without a value that take part in each softmax; those of gpt-oss.
        others: what this package refuses, unless it is left out.

    Attributes:
        session: of the worker, which sets it when all layers are there; None before.
        number: of the layer, set with it.

    Raises:
        CapabilityError: the layer attends in a way that topkv does not know; with every reason.
    """

    session: Session | None = None
    number: int = -1

    def __init__(
        self,
        num_heads: int,
        head_size: int,
        scale: float,
        num_kv_heads: int | None = None,
        alibi_slopes: list[float] | None = None,
        sliding_window: int | None = None,
        kv_cache_dtype: str = "auto",
        logits_soft_cap: float | None = None,
        attn_type: str = AttentionType.DECODER,
        kv_sharing_target_layer_name: str | None = None,
        sinks: Tensor | None = None,
        **others: Any,
    ) -> None:
        self.num_heads, self.head_size, self.scale = num_heads, head_size, float(scale)
        self.num_kv_heads = num_kv_heads or num_heads
        self.kv_cache_dtype, self.sinks = kv_cache_dtype, sinks
        refused = {
            "ALiBi slopes": alibi_slopes,
            f"a sliding window of {sliding_window} tokens": sliding_window,
            f"kv_cache_dtype {kv_cache_dtype!r}": kv_cache_dtype not in ("auto", *EIGHT_BITS),
            f"a softcap of {logits_soft_cap}": logits_soft_cap,
            f"attention of type {attn_type!r}": attn_type != AttentionType.DECODER,
            "keys and values of another layer": kv_sharing_target_layer_name,
            **{name.replace("_", " "): value for name, value in others.items()},
        }
        reasons = [
            f"it has {what}, which is not supported"
            for what, value in refused.items()
            if isinstance(value, Tensor) or value
        ]
        if reasons:
            raise CapabilityError("an attention layer of this model cannot be served", reasons)

    def forward(
        self,
        layer: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        kv_cache: Tensor,
        attn_metadata: TopkvMetadata | None,
        output: Tensor,
        output_scale: Tensor | None = None,
        output_block_scale: Tensor | None = None,
    ) -> Tensor:
        """See ``AttentionImpl``: ``query [tokens, H, D]``, ``key`` and ``value [tokens, Hkv, D]``;
        tokens behind the rows of requests are padding, and their output is 0."""
        rows = attn_metadata.rows if attn_metadata else 0
        output[rows:].zero_()
        if rows and self.session:
            q, k, v = query[:rows], key[:rows], value[:rows]
            self.session.attend(self.number, q, k, v, output[:rows], sinks=self.sinks)
        return output


class TopkvBackend(AttentionBackend):
    """Answers to the questions of vLLM before it makes layers."""

    supported_dtypes: ClassVar[list[torch.dtype]] = [torch.float16, torch.bfloat16, torch.float32]
    supported_kv_cache_dtypes: ClassVar[list[Any]] = ["auto", *EIGHT_BITS]

    @staticmethod
    def get_name() -> str:
        """Return a name of vLLM's own, by which vLLM looks the backend up again."""
        return "CUSTOM"

    @staticmethod
    def get_impl_cls() -> type[TopkvImpl]:
        """See ``AttentionBackend``."""
        return TopkvImpl

    @staticmethod
    def get_builder_cls() -> type[TopkvMetadataBuilder]:
        """See ``AttentionBackend``."""
        return TopkvMetadataBuilder

    @classmethod
    def customize_spec(cls, spec: Any) -> Any:
        """Return the placeholder: one element a token."""
        return replace(spec, num_head_slots=1, state_content_bytes=spec.dtype.itemsize)


@contextmanager
def chosen(backend: type[AttentionBackend]) -> Iterator[None]:
    """Have vLLM's platform name a backend where ``CUSTOM`` is asked for, while layers are made: a
    CPU has no other than its own. Layers with windows, and those of a drafter, which asks for
    another backend, get what vLLM chooses itself.
    """
    stock = current_platform.get_attn_backend_cls

    def choose(asked: Any, attn_selector_config: Any, **more: Any) -> Any:
        if asked is not AttentionBackendEnum.CUSTOM:
            return stock(asked, attn_selector_config, **more)
        if attn_selector_config.has_sliding_window:
            return stock(None, attn_selector_config, **more)
        return f"{backend.__module__}.{backend.__qualname__}"

    current_platform.get_attn_backend_cls = choose
    try:
        yield
    finally:
        del current_platform.get_attn_backend_cls
