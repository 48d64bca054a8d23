"""Page ids of an engine that manages blocks of its own, whose block pool is the host pool."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from topkv.errors import HostMemoryError, RequestError
from topkv.kv.host_pool import HostKVPool


class EngineKVPool(HostKVPool):
    """A host pool whose page ids an engine gives out, with a count of the requests that hold each.

    An id may be handed over to any number of requests, at any time: which ids are free is the
    engine's business, and none is leased here.
    """

    @property
    def free(self) -> int:
        """Pages that no request holds."""
        return self.num_pages - 1 - int((self.references > 0).sum())

    def lease(self, count: int) -> list[int]:
        """Refuse to give out a page.

        Raises:
            HostMemoryError: a request lacks pages, or is about to write one that it shares.
        """
        if count:
            raise HostMemoryError(
                f"{count} pages are needed that the engine has not handed over; call "
                "request_add_pages first, with pages that no other request holds, or fork where a "
                "page is full"
            )
        return []

    def share(self, pages: Iterable[int]) -> None:
        """Count one more holder of each page.

        Raises:
            RequestError: an id is not one of ``1 .. num_pages - 1``; nothing has changed.
        """
        pages = list(pages)
        wrong = [page for page in pages if not 0 < page < self.num_pages]
        if wrong:
            raise RequestError(
                f"pages of an engine must be 1 to {self.num_pages - 1}, got {wrong}; raise "
                "max_tokens, or keep page 0 for nobody"
            )
        np.add.at(self.references, pages, 1)

    def release(self, pages: Iterable[int]) -> list[int]:
        """Drop one holder of each page. None is free: the engine may keep it as a prefix."""
        for page in pages:
            self._check_leased(page)
            self.references[page] -= 1
        return []
