"""Sizes that follow from the parameters of SnapKV, checked."""

from __future__ import annotations

from attrs import frozen

from topkv.errors import ConfigError
from topkv.parameters import values
from topkv.types import GroupShape
from topkv_snapkv.entry import SnapParams


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


def read(group: GroupShape, params: SnapParams) -> Settings:
    """Raise ConfigError if the budget leaves nothing to choose."""
    covers = group.select >= group.max_units - 1  # of all tokens but the newest
    cap = group.max_units if covers else group.select - params.generated
    if not covers and cap <= params.window:
        reason = (
            f"a selection of {group.select} tokens less generated = {params.generated} leaves "
            f"{max(cap, 0)} for the prompt, and the window alone has {params.window}; raise "
            f"budget (and max_request_tokens) to at least {params.window + params.generated + 2}, "
            "or lower generated or window"
        )
        raise ConfigError("snapkv", [reason])
    return Settings(**values(params), cap=cap, covers=covers)
