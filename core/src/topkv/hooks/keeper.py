"""Hook specs of a keeper, which keeps pages that no request holds, for requests to come.

``factory(setup)`` gives one for a ``KeeperSetup``. The setting ``pages`` names it. It is made
before anything is allocated.

The class of its parameters may have ``settled(known, config)``, which ``topkv.config.lower`` calls
with its ``topkv.config.sources.Resolver`` and the configuration when everything else is known. It
gives back the parameters, with those of plugins that they name in turn (``known.named``), and adds
what is wrong to ``known.reasons``, beside all other reasons.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

from attrs import frozen

from topkv.plugins import PluginRegistry
from topkv.plugins.discovery import hookspec

if TYPE_CHECKING:
    from topkv.config import LoweredConfig
    from topkv.kv.host_pool import HostKVPool


@frozen
class KeeperSetup:
    """The argument of the factory of a keeper.

    Attributes:
        params: instance of ``PluginEntry.parameters`` with the values that hold here.
        config: the configuration of the coordinator.
        registry: where plugins are looked up that the parameters name.
    """

    params: Any
    config: LoweredConfig
    registry: PluginRegistry


class Keeper(Protocol):
    """Keeps full pages that requests let go of."""

    @hookspec
    def host_pool(self) -> type[HostKVPool]:
        """Return the class of the host pool, which takes the arguments of ``HostKVPool``.

        Pages that it keeps count as free, and are given out when no others are left.
        """

    @hookspec
    def bind(self, coordinator: Any) -> Any:
        """Bind to a coordinator whose memory is there, once and before any request.

        Args:
            coordinator: a ``SparseCoordinator`` of which all but ``keeper`` is made. Its host pool
                is of ``host_pool``. What is held from here on is let go of in ``close`` of the
                pool, also after an error here.

        Returns:
            An object that engines call, such as to find pages; the coordinator has it as
            ``keeper``.
        """
