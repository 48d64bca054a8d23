"""Marks every forward with an NVTX range."""

from __future__ import annotations

from torch.cuda import nvtx

from topkv import hookimpl
from topkv.hooks.observer import ForwardReport, ObserverSetup
from topkv_nvtx.ranges import PLACES


class NvtxObserver:
    """The contract is ``topkv.hooks.observer``. It asks the device nothing.

    A range is started and ended by its number, not pushed and popped: an observer does not learn
    of a forward that is dropped, and a pop that comes late would end somebody else's range.

    Attributes:
        open: number of the range of the forward that began last, None after its end.
    """

    def __init__(self, setup: ObserverSetup) -> None:
        PLACES.require("the observer 'nvtx' cannot be used")
        self.open: int | None = None

    @hookimpl
    def before_forward(self, report: ForwardReport) -> None:
        self._end()  # of one that was dropped
        rows = sum(slot >= 0 for slot in report.slots)
        self.open = nvtx.range_start(
            f"topkv: {rows} decode rows, {report.prompt_tokens} prompt tokens"
        )

    @hookimpl
    def after_forward(self, report: ForwardReport) -> None:
        self._end()

    def _end(self) -> None:
        if self.open is not None:
            nvtx.range_end(self.open)
        self.open = None
