"""Gathers what forwards worked on, for ``collector`` to show."""

from __future__ import annotations

from itertools import count

from topkv import hookimpl
from topkv.hooks.observer import ForwardReport, ObserverSetup, TransferReport
from topkv_prometheus.collector import COLLECTOR, Counts

_NUMBERS = count()


class PrometheusObserver:
    """The contract is ``topkv.hooks.observer``.

    Attributes:
        counts: what it has gathered.
    """

    def __init__(self, setup: ObserverSetup) -> None:
        self._every: int = setup.params.every
        groups = [group.shape for group in setup.config.groups]
        sparse = [group.layers for group in groups if group.residency == "sparse"]
        # A series that begins at 0 shows its first step as an increase.
        nothing = dict.fromkeys(sorted(sum(sparse, ())), TransferReport(0, 0, 0))
        self.counts = Counts(next(_NUMBERS), TransferReport(0, 0, 0, layers=nothing))
        if any(each.name == "stalls" for each in setup.config.observers):
            self.counts.stalls = dict.fromkeys(nothing, 0.0)
        COLLECTOR.watch(self.counts)

    @hookimpl
    def before_forward(self, report: ForwardReport) -> None:
        self.counts.occupancy, self.counts.others = report.occupancy, report.counts

    @hookimpl
    def after_forward(self, report: ForwardReport) -> None:
        counts = self.counts
        counts.forwards += 1
        counts.prompt_tokens += report.prompt_tokens
        counts.decoded_tokens += sum(slot >= 0 for slot in report.slots)
        if counts.forwards % self._every == 0:
            counts.transfers = report.totals()
            if stalls := report.counts.get("stalls"):
                counts.stalls = stalls()
