"""Stages with one bug each, and the test of the suite that sees each."""

from __future__ import annotations

import torch
from attrs import evolve

from tests.mutants.harness import Mutant, name_of
from topkv.hooks.stage import StageSpec
from topkv.plugins.discovery import hookimpl
from topkv_testing.models.stage_doubles import RERANK, Rerank, products
from topkv_testing.stages import AlgorithmOptions, StageTests

OPTIONS = AlgorithmOptions(oracle=products)


class TakesOthers(Rerank):
    """Where too few candidates are there it takes unit 0."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        there = (layer.step.slots >= 0).repeat_interleave(self.group.lane_heads)
        out.ids.copy_(torch.where(there[:, None], out.ids.clamp(min=0), out.ids))
        return out


class Repeats(Rerank):
    """The last place repeats the first."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        out.ids[:, -1] = out.ids[:, 0]
        return out


class LeavesPlaces(Rerank):
    """Places that nothing is left for hold what they held."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        before = out.ids.clone()
        super().refine(layer, q, candidates, out)
        out.ids.copy_(torch.where(out.ids < 0, before, out.ids))
        return out


class WritesCandidates(Rerank):
    """It sorts its candidates in place."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        candidates.ids.copy_(candidates.ids.sort(1).values)
        return out


class TakesTheFirst(Rerank):
    """It leaves the candidates that stand first."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        out.ids.copy_(candidates.ids[:, : out.ids.shape[1]])
        return out


class ReadsTheFirstLane(Rerank):
    """All lanes get what is left in lane 0 of the first row."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        out.ids.copy_(out.ids[:1].expand_as(out.ids))
        return out


class SelectsForPadding(Rerank):
    """Padded rows get unit 0."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(layer, q, candidates, out)
        padded = (layer.step.slots < 0).repeat_interleave(self.group.lane_heads)
        out.ids[:, 0] = torch.where(padded, 0, out.ids[:, 0])
        return out


class TakesTheWorst(Rerank):
    """The smallest scores are left."""

    def _scores(self, layer, q, units):
        return -super()._scores(layer, q, units)


class BatchesScores(Rerank):
    """Scores of a row are less by those of the row before."""

    def _scores(self, layer, q, units):
        scores = super()._scores(layer, q, units)
        return scores - scores.nan_to_num().roll(self.group.lane_heads, 0)


class GoesBySlot(Rerank):
    """Slots other than 0 take the lowest units."""

    def _scores(self, layer, q, units):
        scores, slots = super()._scores(layer, q, units), layer.step.slots
        first = (slots <= 0).repeat_interleave(self.group.lane_heads)[:, None]
        return torch.where(first, scores, -units.float())


class ForgetsDecode(Rerank):
    """It keeps nothing of tokens that are decoded."""

    @hookimpl
    def update(self, layer, k, v):
        pass


class UpdatesIdleRows(Rerank):
    """Padded rows write what slot 0 keeps of its first token."""

    @hookimpl
    def update(self, layer, k, v):
        super().update(layer, k, v)
        step = layer.step
        at = self._rows(layer, torch.zeros_like(step.slots), torch.zeros_like(step.slots))
        layer.pools["keys"][at] = torch.where(
            (step.slots < 0)[:, None, None], k, layer.pools["keys"][at]
        )


class KeysBySlot(Rerank):
    """It keeps keys by slot and position, which no fork and no move takes along."""

    def __init__(self, setup):
        super().__init__(setup)
        tokens = (setup.group.max_requests * setup.group.max_units + 1) * setup.group.unit
        shape = (tokens, setup.model.num_kv_heads, setup.model.head_dim)
        self.kept = torch.zeros(shape, dtype=setup.model.dtype, device=setup.device)

    @hookimpl
    def spec(self):
        return StageSpec((), self.widen)

    def _rows(self, layer, slots, tokens):
        return ((1 + slots * self.group.max_units) * self.group.unit + tokens).long()

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        layer = evolve(layer, pools={"keys": self.kept})
        super().construct(layer, slot, start, k, v, q, lse)

    @hookimpl
    def update(self, layer, k, v):
        super().update(evolve(layer, pools={"keys": self.kept}), k, v)

    @hookimpl
    def refine(self, layer, q, candidates, out):
        super().refine(evolve(layer, pools={"keys": self.kept}), q, candidates, out)
        return out


class ReadsOnTheHost(Rerank):
    """It asks the host whether there is anything to do."""

    @hookimpl
    def refine(self, layer, q, candidates, out):
        if (candidates.ids >= 0).any().item():
            super().refine(layer, q, candidates, out)
        else:
            out.ids.fill_(-1)
        return out


class OtherKernels(Rerank):
    """Kernels score by the first query of a lane."""

    def _scores(self, layer, q, units):
        group = self.model.group_size
        return super()._scores(layer, q[:, :, ::group].repeat_interleave(group, 2), units)


def _mutant(broken: type, test: str, tier: str = "cpu", kernels: bool = False) -> Mutant:
    own = f"{broken.__module__}:{broken.__name__}"
    factories = {**RERANK.factories, "triton": own} if kernels else own
    clean = evolve(RERANK, name="rerank_clean")
    entry = evolve(RERANK, name="mutant", factories=factories)
    return Mutant(name_of(broken), StageTests, f"test_{test}", entry, clean, (tier,), OPTIONS)


_LEFT = "what_is_left_are_candidates"

MUTANTS = [
    _mutant(TakesOthers, _LEFT),
    _mutant(Repeats, _LEFT),
    _mutant(LeavesPlaces, _LEFT),
    _mutant(WritesCandidates, _LEFT),
    _mutant(ReadsTheFirstLane, _LEFT),
    _mutant(SelectsForPadding, _LEFT),
    _mutant(TakesTheFirst, "the_order_of_candidates_does_not_matter"),
    _mutant(TakesTheWorst, "the_best_candidates_are_left"),
    _mutant(ForgetsDecode, "decode_builds_what_a_prompt_builds"),
    _mutant(BatchesScores, "rows_do_not_see_each_other"),
    _mutant(GoesBySlot, "slots_and_host_pages_do_not_matter"),
    _mutant(UpdatesIdleRows, "rows_do_not_see_each_other"),
    _mutant(KeysBySlot, "fork_is_a_request_of_its_own"),
    _mutant(ReadsOnTheHost, "hot_hooks_read_nothing_on_the_host", "interpret"),
    _mutant(OtherKernels, "kernels_select_what_the_reference_selects", "interpret", kernels=True),
]
