"""Calls the observers that a configuration names; one that raises never stops a forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

from topkv.config import LoweredConfig
from topkv.hooks.observer import ForwardReport, Observer, ObserverSetup
from topkv.layers import Forward
from topkv.plugins import PluginRegistry
from topkv.report import count_occupancy, count_transfers
from topkv.requests import Requests


class Observers:
    """Calls each observer; one that raises is left out from then on, with a warning.

    Args:
        config: names them.
        registry: where they are looked up.
        requests: counted when an observer asks.

    Attributes:
        named: observers that have not raised, by package and name.
        counts: further counters for their reports, which a package adds by a name of its own.
    """

    def __init__(
        self, config: LoweredConfig, registry: PluginRegistry, requests: Requests
    ) -> None:
        self._requests = requests
        self.counts: dict[str, Callable[[], Any]] = {}
        setup = ObserverSetup(config)
        self.named: dict[str, Observer] = {
            registry.get("observer", name).who: registry.create("observer", name, setup)
            for name in config.observers
        }

    def tell(self, hook: str, forward: Forward) -> None:
        """Call a hook of each observer with the report of a forward.

        Args:
            hook: name of the hook.
            forward: the open forward, or the one that has just ended.
        """
        if not self.named:
            return
        slots = tuple(forward.rows.tolist())
        live = [slot for slot in slots if slot >= 0]
        stores = self._requests.manager.stores
        report = ForwardReport(
            slots,
            forward.prompt_tokens,
            transfers=partial(count_transfers, stores, live),
            totals=partial(count_transfers, stores),
            occupancy=partial(count_occupancy, self._requests),
            counts=self.counts,
        )
        for who, observer in list(self.named.items()):
            try:
                getattr(observer, hook)(report)
            except Exception as error:
                del self.named[who]
                warnings.warn(
                    f"{who} failed in {hook} and is left out from now on: "
                    f"{type(error).__name__}: {error}",
                    RuntimeWarning,
                    stacklevel=3,
                )
