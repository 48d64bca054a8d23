"""The parameters of Double Sparsity, completed and checked, every reason at once."""

from __future__ import annotations

from attrs import frozen

from topkv.errors import ConfigError
from topkv.types import GroupShape, ModelShape
from topkv_double_sparsity.calibration import Calibration, read
from topkv_double_sparsity.entry import LabelParams


@frozen
class Settings:
    """Lowered parameters.

    Attributes:
        channels: r, channels of a label.
        int4: labels are 4 bit with a scale and a zero, else the keys' own dtype.
        calibration: what the file says; None to choose channels from each prompt.
        sinks: forced first tokens.
        sticky: bonus of tokens that are on the device, in natural logarithms.
    """

    channels: int
    int4: bool
    calibration: Calibration | None
    sinks: int
    sticky: float


def settings_of(model: ModelShape, group: GroupShape, params: LabelParams) -> Settings:
    """Check and complete the parameters of an instance.

    Raises:
        ConfigError: with every reason, those of the calibration file included.
    """
    reasons, calibration, path = [], None, params.calibration
    channels = max(1, model.head_dim // 2) if params.channels is None else params.channels
    if channels > model.head_dim:
        reasons.append(
            f"channels must be an integer from 1 to head_dim = {model.head_dim}, got {channels}"
        )
    if path is not None:
        try:
            calibration = read(path, group.layers, group.num_kv_heads, group.head_dim)
        except ConfigError as error:
            reasons += [f"calibration file {path!r}: {reason}" for reason in error.reasons]
    if params.sink_tokens > group.select:
        reasons.append(
            f"sink_tokens = {params.sink_tokens} exceeds the {group.select} tokens of a "
            "selection; lower it or raise the budget"
        )
    if reasons:
        raise ConfigError("double_sparsity", reasons)
    int4 = params.label == "int4"
    return Settings(channels, int4, calibration, params.sink_tokens, params.sticky)
