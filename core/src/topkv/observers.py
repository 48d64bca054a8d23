"""The core's own observer: forwards in the log, for whoever turns debug messages on."""

from __future__ import annotations

import logging
from collections.abc import Sequence

from topkv.hooks.registry import hookimpl

_LOG = logging.getLogger("topkv")


class LogForwards:
    """Writes one debug message per forward. The contract stands in ``topkv.hooks.observer``."""

    @hookimpl
    def before_forward(self, slots: Sequence[int], prefill_tokens: int) -> None:
        if _LOG.isEnabledFor(logging.DEBUG):
            rows = sum(slot >= 0 for slot in slots)
            _LOG.debug("forward of %d decode rows and %d prompt tokens", rows, prefill_tokens)

    @hookimpl
    def after_forward(self, slots: Sequence[int], prefill_tokens: int) -> None:
        _LOG.debug("forward ended")
