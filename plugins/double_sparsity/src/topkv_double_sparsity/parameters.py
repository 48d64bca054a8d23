"""The parameters of Double Sparsity, completed and checked, every reason at once."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import frozen

from topkv.errors import ConfigError
from topkv.types import GroupShape, ModelShape
from topkv_authoring import sticky
from topkv_double_sparsity.calibration import (
    DEFAULT_STATISTIC,
    PROMPT_STATISTICS,
    STATISTICS,
    Calibration,
    read,
)

LABELS = ("bf16", "int4")
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
NAMES = (
    *("channels", "label", "calibration", "statistic", "pair_channels", "sink_tokens", "sticky"),
)
GONE = ("head_sparsity", "head_budget")
"""Parameters whose place the stage ``head_sparsity`` has taken."""


@frozen
class Settings:
    """Lowered parameters.

    Attributes:
        channels: r, channels of a label.
        int4: labels are 4 bit with a scale and a zero, else the keys' own dtype.
        calibration: what the file says; None to choose channels from each prompt.
        statistic: of a prompt; unused with a file.
        pairs: channels c and c + D/2 are taken or left together.
        sinks: forced first tokens.
        sticky: bonus of tokens that are on the device, in natural logarithms.
    """

    channels: int
    int4: bool
    calibration: Calibration | None
    statistic: str
    pairs: bool
    sinks: int
    sticky: float


def settings_of(model: ModelShape, group: GroupShape, params: Mapping[str, Any]) -> Settings:
    """Check and complete the parameters of an instance.

    Raises:
        ConfigError: with every reason, those of the calibration file included.
    """
    reasons = _shape_reasons(model, group)
    reasons += [
        f"{name} is no parameter any more, got {params[name]!r}: install topkv-head-sparsity and "
        "set stages to [head_sparsity], with the parameters threshold and head_budget"
        for name in GONE
        if params.get(name) is not None
    ]
    unknown = sorted(set(params) - {*NAMES, *GONE})
    if unknown:
        reasons.append(f"unknown parameters {unknown}; double_sparsity takes {NAMES}")
    if params.get("label") not in LABELS:
        reasons.append(f"label must be one of {LABELS}, got {params.get('label')!r}")
    channels = _channels(params, model.head_dim, reasons)
    calibration = _calibration(params, group, reasons)
    sinks = params.get("sink_tokens")
    if type(sinks) is not int or sinks < 0:
        reasons.append(f"sink_tokens must be an integer of 0 or more, got {sinks!r}")
        sinks = 0
    elif sinks > group.select:
        reasons.append(
            f"sink_tokens = {sinks} exceeds the {group.select} tokens of a selection; "
            "lower it or raise the budget"
        )
    bonus = params.get("sticky", 0.0)
    reasons += sticky.refusals(bonus)
    if reasons:
        raise ConfigError("double_sparsity", reasons)
    return Settings(
        channels=channels,
        int4=params["label"] == "int4",
        calibration=calibration,
        statistic=params.get("statistic") or DEFAULT_STATISTIC,
        pairs=bool(params.get("pair_channels")),
        sinks=sinks,
        sticky=bonus,
    )


def _shape_reasons(model: ModelShape, group: GroupShape) -> list[str]:
    reasons = []
    if group.unit != 1:
        reasons.append(f"tokens are selected one by one, got unit = {group.unit}; set unit to 1")
    if model.dtype not in DTYPES:
        reasons.append(f"keys of {model.dtype} are not supported, only of {DTYPES}")
    return reasons


def _channels(params: Mapping[str, Any], dim: int, reasons: list[str]) -> int:
    given, pairs = params.get("channels"), params.get("pair_channels", False)
    if not isinstance(pairs, bool):
        reasons.append(f"pair_channels must be true or false, got {pairs!r}")
        pairs = False
    if given is None:
        half = max(1, dim // 2)
        given = half + half % 2 if pairs else half
    if type(given) is not int or not 1 <= given <= dim:
        reasons.append(f"channels must be an integer from 1 to head_dim = {dim}, got {given!r}")
        return 1
    if pairs and (given % 2 or dim % 2):
        reasons.append(
            f"pair_channels takes channels c and c + head_dim / 2 together: channels and head_dim "
            f"must be even, got {given} and {dim}"
        )
    return given


def _calibration(
    params: Mapping[str, Any], group: GroupShape, reasons: list[str]
) -> Calibration | None:
    path, statistic = params.get("calibration"), params.get("statistic")
    if statistic is not None and statistic not in STATISTICS:
        reasons.append(f"statistic must be one of {STATISTICS}, got {statistic!r}")
    if path is None:
        if statistic in STATISTICS and statistic not in PROMPT_STATISTICS:
            reasons.append(
                f"statistic {statistic!r} comes from the weights of a model, not from a prompt; "
                "write it to a file with 'topkv calibrate double_sparsity' and set calibration"
            )
        return None
    if not isinstance(path, str) or not path:
        reasons.append(f"calibration must be the path of a file, got {path!r}")
        return None
    try:
        found = read(path, group.layers, group.num_kv_heads, group.head_dim)
    except ConfigError as error:
        reasons += [f"calibration file {path!r}: {reason}" for reason in error.reasons]
        return None
    if statistic is not None and statistic != found.statistic:
        reasons.append(
            f"statistic {statistic!r} is set and the calibration file {path!r} holds "
            f"{found.statistic!r}; leave statistic out or calibrate anew"
        )
    return found
