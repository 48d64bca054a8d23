"""Pages that a request gives back while it generates, by the scores of stages with ``keep``. Cold.

Attention knows no places: keys carry their positions already. So a request that has lost pages is
one with fewer tokens, whose other pages have moved up in its page table. Nothing else knows of it:
units are numbered anew, and what the device has of the request is filled from the host again.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.errors import CONFIG_REFUSED, ConfigError
from topkv.hooks.stage import Keeping
from topkv.layers import LayerPath
from topkv.requests import Requests
from topkv.selectors import Own
from topkv.staged import Staged


class Dropping:
    """Gives back the pages that are worth least of requests that have grown too long.

    A page is one for all layers and heads. Its worth is the mean, over all lanes of all
    layers whose stages score it, of how many standard deviations its score is above the mean of
    all full pages. Of equal ones the older page goes.

    Args:
        config: sizes.
        requests: whose pages these are.
        paths: of all layers.

    Attributes:
        keeping: what the stages with ``keep`` state; None without any: nothing is ever dropped.

    Raises:
        ConfigError: stages ask for different things or for too few tokens, or pages are an
            engine's.
    """

    def __init__(
        self, config: LoweredConfig, requests: Requests, paths: Sequence[LayerPath]
    ) -> None:
        self.requests, self.page = requests, config.page_tokens
        self._asked = [
            (path.selector.view, path.algorithm)
            for path in paths
            if isinstance(path.algorithm, Staged)
            and path.algorithm.keeping
            and isinstance(path.selector, Own)
        ]
        found = {keeping for _, each in self._asked if (keeping := each.keeping)}
        self.keeping: Keeping | None = next(iter(found), None)
        reasons = []
        if len(found) > 1:
            reasons.append(
                "pages are given back for all layers at once, and stages ask for different "
                f"things: {', '.join(map(str, found))}; give them the same parameters"
            )
        if found and config.pages == "engine":
            reasons.append("pages are given back by stages, and here they are an engine's")
        reasons += [
            f"{asked} leaves no page to choose from; tokens must be at least {least}"
            for asked, least in ((each, self._least_tokens(each)) for each in found)
            if asked.tokens < least
        ]
        if reasons:
            raise ConfigError(CONFIG_REFUSED, reasons)

    def _least_tokens(self, keeping: Keeping) -> int:
        """Return the least ``keeping.tokens`` with which a request can always shrink."""
        return -(-keeping.first // self.page) * self.page + keeping.recent + 2 * self.page

    @property
    def most(self) -> int | None:
        """Tokens that a request which decodes has at most; None where nothing bounds them."""
        return None if self.keeping is None else self.keeping.tokens + self.keeping.every

    def run(self, slots: np.ndarray) -> None:
        """Give pages back of those requests that have ``every`` tokens too many.

        Args:
            slots: int64 ``[B]``.
        """
        if self.keeping is None or self.most is None:
            return
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
        for view, algorithm in self._asked:
            scores = algorithm.keep(view, slot, length, position)
            total = _standard(scores) if total is None else total + _standard(scores)
        assert total is not None, "somebody was asked"
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
