"""Hook specs of observers, which a configuration names in ``observers``.

``factory(setup)`` gives one for an ``ObserverSetup``. It is called once per forward and never per
layer; ``bind_layers`` is for those that measure within a layer. One that raises is left out from
then on, with a warning that names its package; the forward goes on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Protocol

from attrs import Factory, field, frozen

from topkv.plugins.discovery import hookspec, optional

if TYPE_CHECKING:
    from topkv.config import LoweredConfig
    from topkv.decode.layers import LayerPath


@frozen
class ObserverSetup:
    """The argument of the factory of an observer.

    Attributes:
        config: the configuration of the coordinator.
        params: instance of ``PluginEntry.parameters`` with the values that hold here.
    """

    config: LoweredConfig
    params: Any


@frozen
class TransferReport:
    """Counts of ``plan`` and ``load``.

    Attributes:
        hits, misses: units found in buffer or ring, and units that had to be loaded.
        loaded_bytes: bytes that crossed the link for the misses.
        layers: by model layer, the counts of this layer alone; sparse layers, in order.
    """

    hits: int
    misses: int
    loaded_bytes: int
    layers: Mapping[int, TransferReport] = field(factory=dict)

    @property
    def hit_rate(self) -> float:
        """Share of the selected units that needed no load; 0 where none was selected."""
        total = self.hits + self.misses
        return self.hits / total if total else 0.0


@frozen
class Occupancy:
    """Host pages and request slots, and how many of them requests hold.

    Attributes:
        pages, used_pages: host pages that requests can hold, and those that at least one holds.
        slots, used_slots: request slots, and those that hold a request.
    """

    pages: int
    used_pages: int
    slots: int
    used_slots: int


@frozen
class ForwardReport:
    """Rows of a forward, and functions that count; nothing is counted unless one is called.

    ``transfers`` and ``totals`` wait for the device and are to be called within the hook that got
    the report: another thread would disturb a CUDA graph that is being captured. A report keeps
    the memory of its coordinator alive.

    Attributes:
        slots: request of each decode row, -1 for padded ones.
        prompt_tokens: tokens of its prompt chunks.
        transfers: hits, misses and bytes of its decode rows, since their requests began, all
            together and by layer.
        totals: the same of all requests since the coordinator was made, of those that have ended
            and of dropped forwards, too. Never falls.
        occupancy: host pages and request slots that are held when it is called, at any time and
            in any thread.
        counts: further counters by the names of the packages that add them, such as
            ``"prefixes"`` of topkv-prefixes, and those of observers by their names, see
            ``bind_layers``; each is called likewise.
    """

    slots: tuple[int, ...]
    prompt_tokens: int
    transfers: Callable[[], TransferReport]
    totals: Callable[[], TransferReport]
    occupancy: Callable[[], Occupancy]
    counts: Mapping[str, Callable[[], Any]] = Factory(dict)


class Observer(Protocol):
    """Watches forwards."""

    @optional
    @hookspec
    def bind_layers(self, layers: Sequence[LayerPath]) -> Callable[[], Any] | None:
        """Bind to the layers of a coordinator. Called once, before any forward.

        An observer may put a ``topkv.decode.loads.Loads`` of its own around ``path.loads``. Its
        ``plan`` and ``load`` are hot: a graph replays what they queue, so they neither wait for
        the device nor allocate. What makes an observer raise comes before it changes the first
        layer.

        Args:
            layers: paths of the sparse layers, in order. An observer may use their ``view``,
                ``algorithm`` and ``lanes``, and replace ``loads``.

        Returns:
            A counter, which reports have in ``counts`` under the name of the observer, or None.
        """

    @hookspec
    def before_forward(self, report: ForwardReport) -> None:
        """Called when a forward begins: nothing is computed yet."""

    @hookspec
    def after_forward(self, report: ForwardReport) -> None:
        """Called when a forward has ended on the host; the device may still be at work."""
