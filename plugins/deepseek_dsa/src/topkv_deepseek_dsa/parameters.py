"""The shape of the lightning indexer, checked, every reason at once."""

from __future__ import annotations

from attrs import frozen

from topkv.errors import ConfigError
from topkv.parameters import values
from topkv.types import GroupShape, ModelShape
from topkv_deepseek_dsa.entry import IndexerParams
from topkv_deepseek_dsa.reference import BLOCK

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
    indexer, reasons = model.indexer, []
    assert indexer is not None  # the entry needs one
    heads, dim = indexer.num_heads, indexer.head_dim
    if not 1 <= heads <= MOST_HEADS:
        reasons.append(f"from 1 to {MOST_HEADS} index heads are supported, got {heads}")
    if not LEAST_DIM <= dim <= MOST_DIM or dim & (dim - 1):
        reasons.append(
            f"the index head dim must be a power of two from {LEAST_DIM} to {MOST_DIM}, got {dim}"
        )
    if params.fp8 and group.page_tokens % BLOCK:
        reasons.append(
            f"fp8 keys lie in blocks of {BLOCK} tokens with their scales behind them: page_tokens "
            f"must be a multiple of {BLOCK}, got {group.page_tokens}; change it, or set keys to "
            "'bf16'"
        )
    if reasons:
        raise ConfigError("deepseek_dsa", reasons)
    return Settings(**values(params), heads=heads, dim=dim)
