"""Sizes that follow from the parameters of SnapKV, checked."""

from __future__ import annotations

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
        cap: prompt tokens of a lane.
        covers: whether a selection holds all tokens that a request can have. Then all of them
            are kept, and nothing is chosen.
    """

    cap: int = 0
    covers: bool = False


def read(model: ModelShape, group: GroupShape, params: SnapParams) -> Settings:
    """Check parameters and shape.

    Raises:
        ConfigError: with every reason.
    """
    covers = group.select >= group.max_units - 1  # of all tokens but the newest
    cap = group.max_units if covers else group.select - params.generated
    reasons = []
    if group.unit != 1:
        reasons.append(f"unit must be 1, got {group.unit}")
    if model.dtype not in DTYPES:
        reasons.append(f"keys of {model.dtype} are not supported, only of {DTYPES}")
    if not reasons and not covers and cap <= params.window:
        reasons.append(
            f"a selection of {group.select} tokens less generated = {params.generated} leaves "
            f"{max(cap, 0)} for the prompt, and the window alone has {params.window}; raise "
            f"budget (and max_request_tokens) to at least {params.window + params.generated + 2}, "
            "or lower generated or window"
        )
    if reasons:
        raise ConfigError("snapkv", reasons)
    return Settings(**values(params), cap=cap, covers=covers)
