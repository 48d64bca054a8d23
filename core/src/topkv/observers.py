"""Calls the observers that a configuration names; one that raises never stops a forward."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from topkv.config import LoweredConfig
from topkv.decode.layers import Forward, LayerPath
from topkv.hooks.observer import ForwardReport, Observer, ObserverSetup
from topkv.plugins import PluginRegistry
from topkv.plugins.contract import has_hook
from topkv.report import count_occupancy, count_transfers
from topkv.requests.requests import Requests


class Observers:
    """Calls each observer; one that raises is left out from then on, with a warning.

    Args:
        config: names them.
        registry: where they are looked up.
        requests: counted when an observer asks.
        layers: paths of the sparse layers.

    Attributes:
        named: observers that have not raised, by package and name.
        counts: further counters for their reports, which an observer has returned, or a package
            adds by a name of its own.
    """

    def __init__(
        self,
        config: LoweredConfig,
        registry: PluginRegistry,
        requests: Requests,
        layers: Sequence[LayerPath],
    ) -> None:
        self._requests = requests
        self.counts: dict[str, Callable[[], Any]] = {}
        self.named: dict[str, Observer] = {}
        for asked in config.observers:
            name, setup = asked.name, ObserverSetup(config, asked.params)
            who = registry.get("observer", name).who
            self.named[who] = registry.create("observer", name, setup)
            if has_hook(self.named[who], "bind_layers"):
                counter = self._call(who, "bind_layers", layers)
                if counter is not None:
                    self.counts[name] = counter

    def notify(self, hook: str, forward: Forward) -> None:
        """Call a hook of each observer with the report of a forward.

        Args:
            hook: name of the hook.
            forward: the open forward, or the one that has just ended.
        """
        if not self.named:
            return
        stores, live = self._requests.manager.stores, forward.live.tolist()
        report = ForwardReport(
            tuple(forward.rows.tolist()),
            forward.prompt_tokens,
            transfers=partial(count_transfers, stores, live),
            totals=partial(count_transfers, stores),
            occupancy=partial(count_occupancy, self._requests),
            counts=self.counts,
        )
        for who in list(self.named):
            self._call(who, hook, report)

    def _call(self, who: str, hook: str, argument: object) -> Any:
        """Call a hook of an observer; None if it raised."""
        try:
            return getattr(self.named[who], hook)(argument)
        except Exception as error:
            del self.named[who]
            warnings.warn(
                f"{who} failed in {hook} and is left out from now on: "
                f"{type(error).__name__}: {error}",
                RuntimeWarning,
                stacklevel=4,
            )
            return None
