"""Pages that a request gives back while it generates. Cold.

Attention knows no places: keys carry their positions already. So a request that has lost pages is
one with fewer tokens, whose other pages have moved up in its page table. Nothing else knows of it:
units are numbered anew, and what the device has of the request is filled from the host again.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from attrs import field, frozen
from attrs.validators import ge
from torch import Tensor

from topkv.requests.requests import Requests

Score = Callable[[int, int, int], Tensor]
"""Scores of the full pages of a request in one layer, fp32 ``[lane_heads, pages]``, for its slot,
the tokens that are left of it, and the position of the token that it decodes next."""


@frozen
class Keeping:
    """Numbers of tokens that a request keeps. Whole pages go.

    Attributes:
        tokens: tokens that stay when pages are given back.
        every: pages are given back when a request that decodes has this many more.
        first: tokens at the beginning that always stay, rounded up to pages.
        recent: newest tokens that always stay.
    """

    tokens: int = field(validator=ge(1))
    every: int = field(validator=ge(1))
    first: int = field(default=0, validator=ge(0))
    recent: int = field(default=0, validator=ge(0))

    def least_tokens(self, page: int) -> int:
        """Return the least ``tokens`` with which a request can always shrink, by the tokens of a
        page."""
        return -(-self.first // page) * page + self.recent + 2 * page


class Dropping:
    """Gives back the pages that are worth least of requests that have grown too long.

    A page is one for all layers and heads. Its worth is the mean, over all lanes of all
    layers that are scored, of how many standard deviations its score is above the mean of
    all full pages. Of equal ones the older page goes.

    Args:
        requests: whose pages these are. It learns how long a request can get.
        keeping: what stays.
        scores: of each layer that is scored, at least one.
    """

    def __init__(self, requests: Requests, keeping: Keeping, scores: Sequence[Score]) -> None:
        self.requests, self.keeping, self.page = requests, keeping, requests.config.page_tokens
        self._scores = scores
        requests.bound = self.most = keeping.tokens + keeping.every

    def run(self, slots: np.ndarray) -> None:
        """Give pages back of those requests that have ``every`` tokens too many.

        Args:
            slots: int64 ``[B]``.
        """
        for slot in slots[self.requests.length[slots] >= self.most].tolist():
            pages = self._least(slot, self.keeping)
            if len(pages):
                self._drop(slot, pages)

    def _least(self, slot: int, keeping: Keeping) -> np.ndarray:
        """Return the pages of a request that go, ascending."""
        length = int(self.requests.length[slot])
        first = -(-keeping.first // self.page)
        end = max(first, (length - keeping.recent) // self.page)
        count = min(-(-(length - keeping.tokens) // self.page), end - first)
        if count <= 0:
            return np.empty(0, dtype=np.intp)
        worth = self._worth(slot, length)[first:end]
        return np.sort(np.argsort(worth, kind="stable")[:count]) + first

    def _worth(self, slot: int, length: int) -> np.ndarray:
        """Return the worth of each closed page, fp64 ``[pages]``. Waits for the device."""
        self.requests.pages.upload()
        position = length + int(self.requests.dropped[slot])
        total: Tensor | None = None
        for score in self._scores:
            scores = _standard(score(slot, length, position))
            total = scores if total is None else total + scores
        assert total is not None, "some layer is scored"
        worth: np.ndarray = total.cpu().numpy()
        return worth

    def _drop(self, slot: int, pages: np.ndarray) -> None:
        """Take pages, ascending numbers in the row of a request, out of it."""
        requests, tokens = self.requests, self.page * len(pages)
        requests.flush(slot)
        behind = int(pages[-1] + 1) * self.page
        of_prompt = self.page * int((pages * self.page < requests.prompt[slot]).sum())
        self._take_out(slot, pages)
        requests.length[slot] -= tokens
        requests.settled[:, slot] = np.maximum(requests.settled[:, slot] - tokens, 0)
        requests.prompt[slot] -= min(of_prompt, int(requests.prompt[slot]))
        requests.dropped[slot] += tokens
        kept = int((pages * self.page < requests.firm[slot]).sum()) * self.page
        requests.firm[slot] = max(behind - tokens, int(requests.firm[slot]) - kept)
        requests.restore(slot)

    def _take_out(self, slot: int, pages: np.ndarray) -> None:
        """Release pages of a row; those behind move up."""
        table, manager = self.requests.pages, self.requests.manager
        row = table.of(slot)
        gone = [row[page] for page in pages]
        table.write(slot, 0, np.delete(row, pages).tolist())
        manager.poison(manager.host.release(gone))


def _standard(scores: Tensor) -> Tensor:
    """fp64 ``[pages]``: the mean over lanes of scores ``[lane_heads, pages]``, each lane with mean
    0 and deviation 1; 0 for a lane whose scores are all alike."""
    scores = scores.double()
    apart = scores - scores.mean(1, keepdim=True)
    scale = apart.square().mean(1, keepdim=True).sqrt()
    return torch.where(scale > 0, apart / scale, 0.0).mean(0)
