"""Limits of the bytes that a directory may hold, of all objects or of one owner's."""

from __future__ import annotations

LEFT = 0.9
"""Share of the limit that is left after files were removed, so that not every write has to remove
some."""

LOOKS = 16
"""Looks of a process at the whole directory while it writes as much as the limit: others write
too."""


class Bound:
    """A limit, and how much of it is used as far as this process knows.

    Args:
        limit: in bytes.
        used: what is there already.
        owner: what the keys begin with of objects that count; of all by default.
        low: bytes that are left when files were removed; a little less than the limit by default.
    """

    def __init__(
        self, limit: int, used: int = 0, owner: bytes = b"", low: int | None = None
    ) -> None:
        self.limit, self.used, self.owner = limit, used, owner
        self.low, self._written = int(LEFT * limit) if low is None else low, 0

    def add(self, size: int) -> bool:
        """Count bytes that were written; return True if it is time to look at the directory."""
        self.used += size
        self._written += size
        if self.used <= self.limit and self._written * LOOKS <= self.limit:
            return False
        self._written = 0
        return True
