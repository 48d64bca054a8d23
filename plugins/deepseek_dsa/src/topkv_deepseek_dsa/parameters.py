"""The parameters of the lightning indexer, checked against the model, every reason at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from topkv.errors import ConfigError
from topkv.types import GroupShape, ModelShape
from topkv_authoring import sticky
from topkv_deepseek_dsa.reference import BLOCK

KEYS = ("bf16", "fp8")
SCALE_FORMATS = ("fp32", "ue8m0")
NAMES = ("keys", "hadamard", "scale_format", "sticky")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MOST_HEADS, LEAST_DIM, MOST_DIM = 128, 16, 256


@frozen
class Settings:
    """Lowered parameters and the shape of the indexer.

    Attributes:
        heads: index heads, H^I.
        dim: elements of an index key, D^I.
        fp8: index keys and queries are e4m3 with fp32 scales, else of the model's dtype.
        hadamard: both go through a Hadamard transform first.
        power_of_two: scales are powers of two.
        sticky: bonus of tokens that are on the device, in the units of index scores.
    """

    heads: int
    dim: int
    fp8: bool
    hadamard: bool
    power_of_two: bool
    sticky: float


def settings_of(model: ModelShape, group: GroupShape, params: Mapping[str, Any]) -> Settings:
    """Check the parameters of an instance.

    Raises:
        ConfigError: with every reason.
    """
    heads, dim, reasons = _shape(model)
    reasons += _choices(params)
    if group.unit != 1:
        reasons.append(f"tokens are selected one by one, got unit = {group.unit}; set unit to 1")
    if group.lane_heads != 1:
        reasons.append(
            f"all heads share a selection, got {group.lane_heads} lanes; set scope to 'shared'"
        )
    if model.dtype not in DTYPES:
        reasons.append(f"keys of {model.dtype} are not supported, only of {DTYPES}")
    fp8 = params.get("keys") == "fp8"
    if fp8 and group.page_tokens % BLOCK:
        reasons.append(
            f"fp8 keys lie in blocks of {BLOCK} tokens with their scales behind them: page_tokens "
            f"must be a multiple of {BLOCK}, got {group.page_tokens}; change it, or set keys to "
            "'bf16'"
        )
    if reasons:
        raise ConfigError("deepseek_dsa", reasons)
    return Settings(
        heads=heads,
        dim=dim,
        fp8=fp8,
        hadamard=params["hadamard"],
        power_of_two=params["scale_format"] == "ue8m0",
        sticky=params.get("sticky", 0.0),
    )


def _choices(params: Mapping[str, Any]) -> list[str]:
    reasons = []
    unknown = sorted(set(params) - set(NAMES))
    if unknown:
        reasons.append(f"unknown parameters {unknown}; deepseek_dsa takes {NAMES}")
    if params.get("keys") not in KEYS:
        reasons.append(f"keys must be one of {KEYS}, got {params.get('keys')!r}")
    if params.get("scale_format") not in SCALE_FORMATS:
        reasons.append(
            f"scale_format must be one of {SCALE_FORMATS}, got {params.get('scale_format')!r}"
        )
    if not isinstance(params.get("hadamard"), bool):
        reasons.append(f"hadamard must be true or false, got {params.get('hadamard')!r}")
    return [*reasons, *sticky.refusals(params.get("sticky", 0.0))]


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
