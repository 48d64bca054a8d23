"""Steps that verify several tokens of every row, with a stated share of the drafts accepted.

Random weights accept no draft, so acceptance is forced: each step appends N tokens of every row,
one that is certain and N - 1 drafts, and takes the drafts back that are said to be rejected, as an
engine does. ``generate`` has no such loop, so the bench has its own, for N = 1 too, since rows are
compared. Nothing drafts: the cost of a draft is its maker's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from time import perf_counter
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from topkv_transformers.names import with_cache


def accepted(steps: int, accept: float, queries: int) -> list[int]:
    """Return how many drafts each of a number of steps accepts.

    Their sum never differs from the share by a whole draft: at half of three drafts steps accept
    one and two in turn.
    """
    each = accept * (queries - 1)
    sums = [math.floor(each * step + 1e-9) for step in range(steps + 1)]
    return [after - before for before, after in pairwise(sums)]


def reached(steps: int, accepts: Sequence[float], queries: int) -> int:
    """Return the most tokens that a row holds at a time behind its prompt, if ``steps`` steps come
    for each of several acceptances, one after the other."""
    kept = sum(steps + sum(accepted(steps, accept, queries)) for accept in accepts)
    return kept + queries


class Verifier:
    """Verifies tokens of a batch, step by step.

    Args:
        contestant: with the model; its selections move on with the tokens that are verified.
        cache: filled; in ``contestant.verifying``.
        ids: int64 ``[B, N]`` the first tokens.

    Attributes:
        ids: what the next step verifies: what the model chose last.
    """

    def __init__(self, contestant: Any, cache: Any, ids: Tensor) -> None:
        self.contestant, self.cache, self.ids = contestant, cache, ids
        self._model: PreTrainedModel = contestant.model

    def step(self, accepted: int) -> float:
        """Run a step and take back all but ``accepted`` drafts. Returns its seconds.

        The time ends when the chosen tokens are on the host, where an engine compares them with
        the drafts, and what is rejected is taken back.
        """
        tokens = self.ids.shape[1]
        self.contestant.advance(tokens)
        began = perf_counter()
        given = with_cache({"input_ids": self.ids, "use_cache": True}, self.cache)
        chosen = self._model(**given).logits.argmax(-1)
        chosen.cpu()
        rejected = tokens - 1 - accepted
        if rejected:
            self.cache.crop(-rejected)
        passed = perf_counter() - began
        self.ids = chosen
        return passed

    @torch.no_grad()
    def run(self, counts: Sequence[int]) -> list[float]:
        """Run a step for each number of accepted drafts, and return their seconds."""
        return [self.step(accepted) for accepted in counts]
