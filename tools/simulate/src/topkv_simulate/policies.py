"""Eviction policies of the simulator: LRU, the optimal one, and any that is installed.

A policy sees the lanes of B rows at once, ``[B, N, C]``, C slots by eviction order, coldest first.
"""

from __future__ import annotations

import numpy as np

from topkv_simulate.trace import ROW, Trace

LRU, BELADY = "lru", "belady"
NEVER = 2**31 - 1


class LeastRecentlyUsed:
    """The LRU order: [stale | loaded in selection order | hits in their previous order]."""

    def begin(self) -> None:
        """Forget everything: a trace begins."""

    def reordered(self, held: np.ndarray, slots: np.ndarray) -> np.ndarray:
        """Return the eviction order before victims are chosen.

        Args:
            held: int32 ``[B, N, C]`` units by the order of the last step.
            slots: int32 ``[B]`` requests of the rows.
        """
        return held

    def new_position(
        self, stale: np.ndarray, before: np.ndarray, misses: np.ndarray
    ) -> np.ndarray:
        """Return the position of each slot after the step, see ``topkv.hooks.eviction``.

        Args:
            stale: bool ``[B, N, C]`` not selected in this step.
            before: ``[B, N, C]`` stale slots before it.
            misses: ``[B, N, 1]`` victims, which are the stale slots of lowest ``before``.
        """
        count = stale.sum(-1, keepdims=True)
        hits = np.arange(stale.shape[-1]) - before
        kept = np.where(before < misses, count - misses + before, before - misses)
        target: np.ndarray = np.where(stale, kept, count + hits)
        return target

    def used(self, rows: slice, slots: np.ndarray, units: np.ndarray) -> None:
        """Note that a round is over.

        Args:
            rows: rows of the trace.
            slots: ``[B]`` their requests.
            units: int32 ``[B, N, K]`` units that they wanted.
        """


class Belady(LeastRecentlyUsed):
    """Evicts the unit that is selected again last: no policy misses less (Belady 1966).

    The policy knows the future.

    Args:
        trace: the recorded trace.
        units: int32 ``[R, N, K]`` wanted units of the group.
        free: unit of free slots.
    """

    def __init__(self, trace: Trace, units: np.ndarray, free: int) -> None:
        table = trace.rows
        requests = int(table[:, ROW.slot].max(initial=-1)) + 1
        self._first = np.full((requests, units.shape[1], free + 1), NEVER, np.int32)
        self._next = np.empty_like(units)
        for row in range(len(units) - 1, -1, -1):
            uses = self._first[table[row, ROW.slot]]
            self._next[row] = np.take_along_axis(uses, units[row], -1)
            np.put_along_axis(uses, units[row], row, -1)
            uses[:, free] = NEVER
        self.begin()

    def begin(self) -> None:
        self._due = self._first.copy()

    def reordered(self, held: np.ndarray, slots: np.ndarray) -> np.ndarray:
        due = np.take_along_axis(self._due[slots], held, -1)
        return np.take_along_axis(held, np.argsort(-due, -1, kind="stable"), -1)

    def used(self, rows: slice, slots: np.ndarray, units: np.ndarray) -> None:
        due = self._due[slots]
        np.put_along_axis(due, units, self._next[rows], -1)
        self._due[slots] = due


class Installed(LeastRecentlyUsed):
    """The torch formula of an installed eviction policy, one lane at a time.

    Args:
        name: name of the policy.
    """

    def __init__(self, name: str) -> None:
        import torch

        from topkv.errors import PluginError
        from topkv.hooks.eviction import EvictionSetup
        from topkv.plugins import registry
        from topkv.plugins.contract import has_hook

        setup = EvictionSetup(torch.device("cpu"))
        self.policy = registry().create("eviction", name, setup, "reference")
        if has_hook(self.policy, "new_state"):
            raise PluginError(
                f"{registry().get('eviction', name).who} cannot be replayed",
                ["it keeps a state of slots (new_state), and replays have none; run it"],
            )

    def new_position(
        self, stale: np.ndarray, before: np.ndarray, misses: np.ndarray
    ) -> np.ndarray:
        import torch

        slots = stale.shape[-1]
        position, none = torch.arange(slots), torch.zeros(slots, dtype=torch.int32)
        target = np.empty(stale.shape, np.int64)
        for lane in np.ndindex(stale.shape[:-1]):
            mine, rank = torch.from_numpy(stale[lane]), torch.from_numpy(before[lane])
            count = torch.tensor(int(misses[lane][0]))
            given = (position, mine, rank, position - rank, mine.sum(), count, slots, none)
            target[lane] = self.policy.new_position(*given).numpy()
        return target


def policy_of(name: str, trace: Trace, units: np.ndarray, free: int) -> LeastRecentlyUsed:
    """Make the policy of a name, for one group; other arguments as of ``Belady``.

    Raises:
        PluginError: no such policy is installed.
    """
    if name == LRU:
        return LeastRecentlyUsed()
    return Belady(trace, units, free) if name == BELADY else Installed(name)
