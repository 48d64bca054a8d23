"""Sizes that follow from the parameters of SnapKV, checked."""

from __future__ import annotations

import math

import torch
from attrs import frozen

from topkv.errors import ConfigError
from topkv.parameters import values
from topkv.types import GroupShape, ModelShape
from topkv_snapkv.entry import SnapParams

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@frozen
class Settings(SnapParams):
    """Parameters of one group.

    Attributes:
        width: prompt tokens of the widest head.
        cap: prompt tokens of a head, on average.
        covers: whether a selection holds all tokens that a request can have. Then all of them
            are kept, and nothing is chosen.
    """

    width: int = 0
    cap: int = 0
    covers: bool = False


def read(model: ModelShape, group: GroupShape, params: SnapParams) -> Settings:
    """Check parameters and shape.

    Raises:
        ConfigError: with every reason.
    """
    reasons = _reasons(model, group, params)
    if not reasons:
        reasons = _budget_reasons(group, params)
    if reasons:
        raise ConfigError("snapkv", reasons)
    width, cap = _budgets(group, params)
    return Settings(**values(params), width=width, cap=cap, covers=_covers(group))


def _covers(group: GroupShape) -> bool:
    """True if a selection has a place for all tokens of a request but the newest."""
    return group.select >= group.max_units - 1


def _budgets(group: GroupShape, params: SnapParams) -> tuple[int, int]:
    if _covers(group):  # max_request_tokens bounds it, and not the budget
        return group.max_units, group.max_units
    width = group.select - params.generated
    return width, int(width / params.ada_max) if params.ada else width


def _budget_reasons(group: GroupShape, params: SnapParams) -> list[str]:
    cap = _budgets(group, params)[1]
    if cap > params.window or _covers(group):
        return []
    factor = params.ada_max if params.ada else 1
    need = math.ceil((params.window + 1) * factor) + params.generated + 1
    share = f" / ada_max {factor}" if params.ada else ""
    return [
        f"a selection of {group.select} tokens less generated = {params.generated}{share} "
        f"leaves {max(cap, 0)} for the prompt, and the window alone has {params.window}; raise "
        f"budget (and max_request_tokens) to at least {need}, or lower generated or window"
    ]


def _reasons(model: ModelShape, group: GroupShape, params: SnapParams) -> list[str]:
    reasons = []
    if params.ada and group.heads_per_lane > 1:
        reasons.append(
            "ada divides budgets between heads, and here they share one selection; set scope to "
            "'kv_head' or ada to false"
        )
    if group.unit != 1:
        reasons.append(f"unit must be 1, got {group.unit}")
    if model.dtype not in DTYPES:
        reasons.append(f"keys of {model.dtype} are not supported, only of {DTYPES}")
    return reasons
