"""The shape of the lightning indexer, checked, every reason at once."""

from __future__ import annotations

import torch
from attrs import frozen

from topkv.errors import ConfigError
from topkv.parameters import values
from topkv.types import GroupShape, ModelShape
from topkv_deepseek_dsa.entry import IndexerParams
from topkv_deepseek_dsa.reference import BLOCK

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_HEADS, LEAST_DIM, MOST_DIM = 128, 16, 256


@frozen
class Settings(IndexerParams):
    """Parameters, and the shape of the indexer.

    Attributes:
        heads: index heads, H^I.
        dim: elements of an index key, D^I.
    """

    heads: int = 1
    dim: int = 1


def settings_of(model: ModelShape, group: GroupShape, params: IndexerParams) -> Settings:
    """Check model and group of an instance.

    Raises:
        ConfigError: with every reason.
    """
    heads, dim, reasons = _shape(model)
    if group.unit != 1:
        reasons.append(f"tokens are selected one by one, got unit = {group.unit}; set unit to 1")
    if group.lane_heads != 1:
        reasons.append(
            f"all heads share a selection, got {group.lane_heads} lanes; set scope to 'shared'"
        )
    if model.dtype not in DTYPES:
        reasons.append(f"keys of {model.dtype} are not supported, only of {DTYPES}")
    if params.fp8 and group.page_tokens % BLOCK:
        reasons.append(
            f"fp8 keys lie in blocks of {BLOCK} tokens with their scales behind them: page_tokens "
            f"must be a multiple of {BLOCK}, got {group.page_tokens}; change it, or set keys to "
            "'bf16'"
        )
    if reasons:
        raise ConfigError("deepseek_dsa", reasons)
    return Settings(**values(params), heads=heads, dim=dim)


def _shape(model: ModelShape) -> tuple[int, int, list[str]]:
    """Index heads, index head dim and what is wrong with them."""
    indexer = model.indexer
    if indexer is None:
        return 1, 1, ["the model has no indexer; choose an algorithm that does without one"]
    reasons = []
    heads, dim = indexer.num_heads, indexer.head_dim
    if not 1 <= heads <= MOST_HEADS:
        reasons.append(f"from 1 to {MOST_HEADS} index heads are supported, got {heads}")
    if not LEAST_DIM <= dim <= MOST_DIM or dim & (dim - 1):
        reasons.append(
            f"the index head dim must be a power of two from {LEAST_DIM} to {MOST_DIM}, got {dim}"
        )
    return heads, dim, reasons
