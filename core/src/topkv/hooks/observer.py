"""Hook specs of observers: collecting, results ignored, once per forward and never per layer."""

from __future__ import annotations

from collections.abc import Sequence

from topkv.hooks.registry import hookspec


@hookspec
def before_forward(slots: Sequence[int], prefill_tokens: int) -> None:
    """A forward begins.

    Args:
        slots: the decode rows, -1 for padded ones.
        prefill_tokens: prompt tokens of the forward.
    """


@hookspec
def after_forward(slots: Sequence[int], prefill_tokens: int) -> None:
    """A forward has ended on the host; the device may still be at work.

    Args:
        slots, prefill_tokens: as in ``before_forward``.
    """
