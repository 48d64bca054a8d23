"""The parameters of Double Sparsity, completed and checked, every reason at once."""

from __future__ import annotations

import torch
from attrs import frozen

from topkv.errors import ConfigError
from topkv.types import GroupShape, ModelShape
from topkv_double_sparsity.calibration import DEFAULT_STATISTIC, Calibration, read
from topkv_double_sparsity.entry import LabelParams

DTYPES = (torch.float16, torch.bfloat16, torch.float32)


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


def settings_of(model: ModelShape, group: GroupShape, params: LabelParams) -> Settings:
    """Check and complete the parameters of an instance.

    Raises:
        ConfigError: with every reason, those of the calibration file included.
    """
    reasons = _shape_reasons(model, group)
    channels = _channels(params, model.head_dim, reasons)
    calibration = _calibration(params, group, reasons)
    if params.sink_tokens > group.select:
        reasons.append(
            f"sink_tokens = {params.sink_tokens} exceeds the {group.select} tokens of a "
            "selection; lower it or raise the budget"
        )
    if reasons:
        raise ConfigError("double_sparsity", reasons)
    return Settings(
        channels=channels,
        int4=params.label == "int4",
        calibration=calibration,
        statistic=params.statistic or DEFAULT_STATISTIC,
        pairs=params.pair_channels,
        sinks=params.sink_tokens,
        sticky=params.sticky,
    )


def _shape_reasons(model: ModelShape, group: GroupShape) -> list[str]:
    reasons = []
    if group.unit != 1:
        reasons.append(f"tokens are selected one by one, got unit = {group.unit}; set unit to 1")
    if model.dtype not in DTYPES:
        reasons.append(f"keys of {model.dtype} are not supported, only of {DTYPES}")
    return reasons


def _channels(params: LabelParams, dim: int, reasons: list[str]) -> int:
    given, pairs = params.channels, params.pair_channels
    if given is None:
        half = max(1, dim // 2)
        given = half + half % 2 if pairs else half
    if given > dim:
        reasons.append(f"channels must be an integer from 1 to head_dim = {dim}, got {given}")
        return 1
    if pairs and (given % 2 or dim % 2):
        reasons.append(
            f"pair_channels takes channels c and c + head_dim / 2 together: channels and head_dim "
            f"must be even, got {given} and {dim}"
        )
    return given


def _calibration(params: LabelParams, group: GroupShape, reasons: list[str]) -> Calibration | None:
    path, statistic = params.calibration, params.statistic
    if path is None:
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
