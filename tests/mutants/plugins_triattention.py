"""TriAttention with one bug each, and the test of the kit, or of the plugin, that sees it."""

from __future__ import annotations

from pathlib import Path
from tempfile import mkdtemp

import torch
from attrs import evolve

from plugins.triattention.tests import test_collect, test_pages
from plugins.triattention.tests import test_conformance as kit
from tests.mutants import plugins
from topkv import hookimpl
from topkv_triattention import reference
from topkv_triattention.collect import Turning
from topkv_triattention.launch import TriAttentionTriton
from topkv_triattention.stage import TriAttention


class ForgetsDecoded(TriAttention):
    """Units that decoding fills are not represented."""

    @hookimpl
    def update(self, layer, k, v):
        pass


class GoesByOtherRequests(TriAttention):
    """All of the pool is added up, and not the pages of the request."""

    @hookimpl
    def keep(self, layer, slot, length, position, scores):
        super().keep(layer, slot, length, position, scores)
        scores += layer.pools["means"].float().nan_to_num().sum()


class CountsWhatIsLeft(TriAttention):
    """The next token stands behind those that are left."""

    @hookimpl
    def keep(self, layer, slot, length, position, scores):
        super().keep(layer, slot, length, length, scores)


class _Otherwise(TriAttention):
    def knows(self, known):
        raise NotImplementedError

    @hookimpl
    def keep(self, layer, slot, length, position, scores):
        right = self.expected
        self.expected = {at: self.knows(known) for at, known in right.items()}
        try:
            super().keep(layer, slot, length, position, scores)
        finally:
            self.expected = right


class TurnsTheOtherWay(_Otherwise):
    """Queries of later positions are turned back."""

    def knows(self, known):
        return evolve(known, omega=-known.omega)


class LeavesSizesOut(_Otherwise):
    """What queries do beside their mean is not counted."""

    def knows(self, known):
        return evolve(known, size=known.q.abs())


class KnowsOneDistance(TriAttention):
    """The next query stands for all that follow."""

    @hookimpl
    def keep(self, layer, slot, length, position, scores):
        right = reference.DISTANCES
        reference.DISTANCES = right[:1]
        try:
            super().keep(layer, slot, length, position, scores)
        finally:
            reference.DISTANCES = right


class LoudHeadsOutvote(TriAttention):
    """Scores of the heads of a lane are not made alike."""

    @hookimpl
    def keep(self, layer, slot, length, position, scores):
        known, group = self.expected[layer.layer], self.group
        rows = layer.step.page_table[slot, : scores.shape[1]].long()
        pages = layer.pools["means"].unflatten(0, (-1, group.units_per_page))[rows].double()
        by = reference.weights(known.q, known.size, known.omega, known.pairs, position)
        found = torch.einsum("pkc,kgc->kgp", pages.mean(1), by.unflatten(0, (pages.shape[2], -1)))
        scores.copy_(found.flatten(0, 1).unflatten(0, (group.lane_heads, -1)).mean(1))


class KernelSkipsTheLastToken(TriAttentionTriton):
    """The kernel reads a token too few of a chunk."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k[: max(1, len(k) - 1)], v, q, lse)


class KernelSwapsPairs(TriAttentionTriton):
    """The kernel writes the second channel of a pair in the place of the first."""

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        pairs = self.expected[layer.layer].pairs
        swapped = k.clone()
        swapped[..., pairs.flatten().long()] = k[..., pairs.flip(0).flatten().long()]
        super().construct(layer, slot, start, swapped, v, q, lse)


class LeavesQueriesTurned(Turning):
    """Queries are calibrated as they come out of RoPE."""

    def turn(self, x, positions):
        return super().turn(x, positions) if positions[-1] > 0 else x.double()


INTERPRETED = ("interpret",)
OF_PAGES = (test_pages, "pages_are_worth_what_the_formula_says")

own = plugins._own(TriAttentionTriton)
of_collect = plugins._own(
    Turning,
    tokens=lambda on: test_collect.text(),
    tmp_path=lambda on: Path(mkdtemp()),
)


def of_kit(broken, test):
    return plugins._stage(broken, TriAttentionTriton, kit, test, plugins.ANYWHERE)


MUTANTS = [
    of_kit(ForgetsDecoded, plugins.DECODED),
    of_kit(GoesByOtherRequests, plugins.OWN_SCORES),
    of_kit(CountsWhatIsLeft, plugins.WORTH),
    of_kit(TurnsTheOtherWay, plugins.WORTH),
    of_kit(LoudHeadsOutvote, plugins.WORTH),
    own(CountsWhatIsLeft, *OF_PAGES, scope="kv_head"),
    own(TurnsTheOtherWay, *OF_PAGES, scope="kv_head"),
    own(LeavesSizesOut, *OF_PAGES, scope="shared"),
    own(KnowsOneDistance, *OF_PAGES, scope="shared"),
    own(LoudHeadsOutvote, *OF_PAGES, scope="shared"),
    own(KernelSkipsTheLastToken, *OF_PAGES, INTERPRETED, scope="kv_head"),
    own(KernelSwapsPairs, *OF_PAGES, INTERPRETED, scope="kv_head"),
    of_collect(
        LeavesQueriesTurned, test_collect, "queries_are_those_of_the_projections", case="llama"
    ),
]
