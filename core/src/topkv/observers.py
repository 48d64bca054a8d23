"""Calls the observers that a configuration names; one that raises never stops a forward."""

from __future__ import annotations

import warnings
from functools import partial

from topkv.config import LoweredConfig
from topkv.hooks.observer import ForwardReport, Observer, ObserverSetup
from topkv.layers import Forward
from topkv.plugins import PluginRegistry
from topkv.prefixes import Prefixes
from topkv.report import count_occupancy, count_transfers
from topkv.requests import Requests


class Observers:
    """Calls each observer; one that raises is left out from then on, with a warning.

    Args:
        config: names them.
        registry: where they are looked up.
        requests, prefixes: what is counted when one asks.

    Attributes:
        named: those that have not raised, by whose they are.
    """

    def __init__(
        self,
        config: LoweredConfig,
        registry: PluginRegistry,
        requests: Requests,
        prefixes: Prefixes,
    ) -> None:
        self._requests, self._prefixes = requests, prefixes
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
            prefixes=partial(getattr, self._prefixes, "counts"),
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
