"""Rows of requests, and what happens to them between two forwards.

SGLang's scheduler gives a row back, and its radix cache puts other pages into one, while a forward
may be under way. Both are noted here, for the next forward to follow.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor


class Rows:
    """Places of tokens by request, in host memory; nothing on the device reads them.

    Attributes:
        req_to_token: int32 ``[rows, tokens]`` place of each token; SGLang's name.
        req_generation: int64 ``[rows]`` how many requests have had each row; SGLang's name.
        page: tokens of a page.
        ended: rows that were given back since the last forward.
        replaced: first page, and the one behind the last, that other pages stand in since the
            last forward, by row.
    """

    req_to_token: Tensor
    req_generation: Tensor
    page: int
    ended: list[int]
    replaced: dict[int, tuple[int, int]]

    def note_ended(self, rows: Iterable[int]) -> None:
        """Note rows that are given back."""
        for row in rows:
            self.ended.append(row)
            self.replaced.pop(row, None)

    def note_replaced(self, row: int, first: int, before: list[int]) -> None:
        """Note which pages of a row are others than before.

        Args:
            row: of the request.
            first: page that the first of ``before`` was.
            before: pages that the row had.
        """
        now = self.pages(row, first, (first + len(before)) * self.page)
        changed = [
            first + n for n, (old, new) in enumerate(zip(before, now, strict=True)) if old != new
        ]
        if changed:
            start, end = self.replaced.get(row, (changed[0], 0))
            self.replaced[row] = min(start, changed[0]), max(end, changed[-1] + 1)

    def pages(self, row: int, first: int, tokens: int) -> list[int]:
        """Return the pages of a row from page ``first`` on that hold its first tokens.

        Args:
            row: of the request.
            first: page to begin with.
            tokens: of the request.
        """
        places = self.req_to_token[row, first * self.page : tokens : self.page]
        pages: list[int] = (places // self.page).tolist()
        return pages
