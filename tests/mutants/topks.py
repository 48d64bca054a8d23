"""Exact top-k with one bug each, and the test of the suite that sees each."""

from __future__ import annotations

import torch

from tests.mutants.harness import Mutant, name_of
from topkv.entries import PluginEntry
from topkv.ops import topk_reference
from topkv.plugins.discovery import hookimpl
from topkv_testing.topks import TopKOptions, TopKTests

OPTIONS = TopKOptions(widths=(3000,), selects=(1, 127))


class Sorted:
    """The formula itself."""

    def __init__(self, setup):
        self.seen = None

    @hookimpl
    def topk(self, scores, lengths, ids):
        topk_reference.topk(scores, lengths, ids)


class HigherIndexWins(Sorted):
    """The higher index wins among equal scores."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        width = scores.shape[1]
        # Mirrored rows, whose first columns are the ones that do not count.
        spare = width - lengths.clamp(0, width)
        columns = (width - 1 - torch.arange(width, device=ids.device) - spare[:, None]) % width
        super().topk(scores.gather(1, columns), lengths, ids)
        ids.copy_(torch.where(ids < 0, width, lengths.clamp(0, width)[:, None] - 1 - ids))
        ids.copy_(ids.sort(1).values)
        ids.masked_fill_(ids == width, -1)


class NanWins(Sorted):
    """NaN counts as the largest score."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        super().topk(scores.nan_to_num(torch.inf, torch.inf, -torch.inf), lengths, ids)


class ReadsBehindTheLength(Sorted):
    """One score behind the length of a row counts."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        super().topk(scores, lengths + 1, ids)


class ForgetsThePadding(Sorted):
    """Ids of short rows are not padded."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        given = ids.clone()
        super().topk(scores, lengths, ids)
        ids.copy_(torch.where(ids < 0, given, ids))


class Rounds(Sorted):
    """Scores are compared as bfloat16, so that near ones tie."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        super().topk(scores.bfloat16().float(), lengths, ids)


class KeepsTheLastRow(Sorted):
    """Scores of an earlier call of as many columns have an influence."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        if self.seen is not None and self.seen.shape[1] >= scores.shape[1]:
            scores = scores.clone()
            scores[0, 0] = self.seen[0, 0]
        self.seen = scores.clone()
        super().topk(scores, lengths, ids)


class CleansTheScores(Sorted):
    """NaN is replaced in the scores themselves."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        super().topk(scores.nan_to_num_(-torch.inf, torch.inf, -torch.inf), lengths, ids)


class AsksForTheLongest(Sorted):
    """The longest row is read on the host."""

    @hookimpl
    def topk(self, scores, lengths, ids):
        longest = max(int(lengths.max()), 1)
        super().topk(scores[:, :longest], lengths, ids)


def _entry(cls: type) -> PluginEntry:
    return PluginEntry(cls.__name__.lower(), "topk", f"{__name__}:{cls.__name__}")


CLEAN = _entry(Sorted)


def _mutant(broken: type, test: str, *tiers: str) -> Mutant:
    tiers = tiers or ("cpu",)
    name = f"test_{test}"
    return Mutant(name_of(broken), TopKTests, name, _entry(broken), CLEAN, tiers, OPTIONS)


MUTANTS = [
    _mutant(HigherIndexWins, "of_equal_scores_the_lower_index_wins"),
    _mutant(NanWins, "any_bits"),
    _mutant(ReadsBehindTheLength, "ragged_lengths"),
    _mutant(ForgetsThePadding, "ragged_lengths"),
    _mutant(Rounds, "long_rows"),
    _mutant(KeepsTheLastRow, "serves_all_that_is_smaller"),
    _mutant(CleansTheScores, "arguments_stay_as_they_are"),
    _mutant(AsksForTheLongest, "reads_nothing_on_the_host", "interpret"),
]
