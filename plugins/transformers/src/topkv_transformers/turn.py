"""Turns of threads to use an attached model: one thread at a time has it."""

from __future__ import annotations

import threading

from topkv.errors import RequestError


class Turn:
    """Counts the calls of the thread that uses a model, and refuses those of any other.

    What a thread left open when it died is the next one's to tidy up.

    Attributes:
        depth: calls that have entered and not left.
    """

    def __init__(self) -> None:
        self.depth = 0
        self._owner: threading.Thread | None = None
        # Reentrant, because the garbage collector may end a cache in between.
        self._lock = threading.RLock()

    @property
    def mine(self) -> bool:
        """True if it is this thread's turn."""
        return self._owner is threading.current_thread()

    def enter(self) -> None:
        """Begin a call; raise RequestError in another thread's turn, with nothing changed."""
        with self._lock:
            owner = self._owner
            if owner is not None and not self.mine and owner.is_alive():
                raise RequestError(
                    f"this model is in use in another thread, {owner.name!r}; one thread at a "
                    "time can use an attached model: wait until generate or the forward is done "
                    "there (after an interrupt, call abandon() of the handle in that thread)"
                )
            self.depth += 1
            self._owner = threading.current_thread()

    def leave(self, keep: bool) -> None:
        """Undo one ``enter``; the last one ends the turn, unless it is to be kept."""
        with self._lock:
            self.depth -= 1
            if not self.depth and not keep:
                self._owner = None
