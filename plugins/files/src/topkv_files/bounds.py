"""How many bytes a directory may hold, of all objects or of those of one owner."""

from __future__ import annotations

LEFT = 0.9
"""Of the limit is left when files were removed, so that not every write has to."""

LOOKS = 16
"""How often a process looks at the whole directory while it writes as much as the limit: others
write too."""


class Bound:
    """A limit, and how much of it is used as far as this process knows.

    Args:
        limit: in bytes.
        used: what is there already.
    """

    def __init__(self, limit: int, used: int) -> None:
        self.limit, self.used, self._written = limit, used, 0

    @property
    def low(self) -> int:
        """What is left when files were removed."""
        return int(LEFT * self.limit)

    def add(self, size: int) -> bool:
        """Count bytes that were written; whether it is time to look at the directory."""
        self.used += size
        self._written += size
        if self.used <= self.limit and self._written * LOOKS <= self.limit:
            return False
        self._written = 0
        return True
