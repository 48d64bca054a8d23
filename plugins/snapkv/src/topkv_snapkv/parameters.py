"""The parameters of SnapKV, checked together, and what follows from them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from topkv.errors import ConfigError
from topkv.types import GroupShape, ModelShape

NAMES = ("window", "kernel", "pool", "generated", "outgrow", "ada", "ada_max")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


@frozen
class Settings:
    """Parameters of one group.

    Attributes:
        window: W, the last prompt tokens: they vote, and are always kept.
        kernel, pool: of the pooling.
        generated: places for tokens after the prompt.
        slide: whether the newest of them are attended when there are more.
        ada: whether the heads share their budgets.
        width: prompt tokens of the widest head.
        cap: prompt tokens of a head, on average.
        covers: whether a selection holds all tokens that a request can have. Then all of them
            are kept, and nothing is chosen.
    """

    window: int
    kernel: int
    pool: str
    generated: int
    slide: bool
    ada: bool
    width: int
    cap: int
    covers: bool


def read(model: ModelShape, group: GroupShape, params: Mapping[str, Any]) -> Settings:
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
    given = {name: params[name] for name in ("window", "kernel", "pool", "generated", "ada")}
    slide = params["outgrow"] == "slide"
    return Settings(**given, slide=slide, width=width, cap=cap, covers=_covers(group))


def _covers(group: GroupShape) -> bool:
    """True if a selection has a place for all tokens of a request but the newest."""
    return group.select >= group.max_units - 1


def _budgets(group: GroupShape, params: Mapping[str, Any]) -> tuple[int, int]:
    if _covers(group):  # max_request_tokens bounds it, and not the budget
        return group.max_units, group.max_units
    width = group.select - params["generated"]
    return width, int(width / params["ada_max"]) if params["ada"] else width


def _budget_reasons(group: GroupShape, params: Mapping[str, Any]) -> list[str]:
    cap = _budgets(group, params)[1]
    if cap > params["window"] or _covers(group):
        return []
    factor = params["ada_max"] if params["ada"] else 1
    need = math.ceil((params["window"] + 1) * factor) + params["generated"] + 1
    share = f" / ada_max {factor}" if params["ada"] else ""
    return [
        f"a selection of {group.select} tokens less generated = {params['generated']}{share} "
        f"leaves {max(cap, 0)} for the prompt, and the window alone has {params['window']}; raise "
        f"budget (and max_request_tokens) to at least {need}, or lower generated or window"
    ]


def _whole(value: object, least: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def _reasons(model: ModelShape, group: GroupShape, params: Mapping[str, Any]) -> list[str]:
    unknown, lacking = sorted(set(params) - set(NAMES)), sorted(set(NAMES) - set(params))
    reasons = []
    if unknown or lacking:
        reasons.append(
            f"unknown parameters {unknown}, missing {lacking}; snapkv takes {', '.join(NAMES)}"
        )
    reasons += [
        f"{name} must be an integer of 1 or more, got {params[name]!r}"
        for name in ("window", "kernel", "generated")
        if name in params and not _whole(params[name], 1)
    ]
    kernel = params.get("kernel")
    if _whole(kernel, 1) and kernel % 2 == 0:
        reasons.append(f"kernel must be odd, so that it has a middle, got {kernel}")
    for name, known in (("pool", ("max", "avg")), ("outgrow", ("refuse", "slide"))):
        if name in params and params[name] not in known:
            reasons.append(f"{name} must be one of {known}, got {params[name]!r}")
    ada, most = params.get("ada"), params.get("ada_max", 1)
    if "ada" in params and not isinstance(ada, bool):
        reasons.append(f"ada must be true or false, got {ada!r}")
    if isinstance(most, bool) or not isinstance(most, (int, float)) or not 1 <= most < math.inf:
        reasons.append(f"ada_max must be a number of 1 or more, got {most!r}")
    if ada is True and group.heads_per_lane > 1:
        reasons.append(
            "ada divides budgets between heads, and here they share one selection; set scope to "
            "'kv_head' or ada to false"
        )
    if group.unit != 1:
        reasons.append(f"unit must be 1, got {group.unit}")
    if model.dtype not in DTYPES:
        reasons.append(f"keys of {model.dtype} are not supported, only of {DTYPES}")
    return reasons
