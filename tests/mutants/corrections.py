"""Stages that correct, with one bug each, and the test of the suite that sees each."""

from __future__ import annotations

import torch
from attrs import evolve

from tests.mutants.harness import Mutant, name_of
from topkv.entries import PluginEntry
from topkv.hooks.algorithm import AlgorithmSpec
from topkv.plugins.discovery import hookimpl
from topkv.types import Selection
from topkv_testing.algorithms import AlgorithmTests
from topkv_testing.models.stage_doubles import COMPLETE, Complete, Everything
from topkv_testing.stages import AlgorithmOptions, StageTests


class CountsTwice(Complete):
    """Takes attended units for left out."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(layer, q, Selection(torch.full_like(selection.ids, -1)), out, lse)


class GoesByTheFirstLane(Complete):
    """Every lane is corrected for what the first has not attended."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(layer, q, Selection(selection.ids[:1].expand_as(selection.ids)), out, lse)


class ReadsTheFirstPlaces(Complete):
    """It stops at the first empty place of a selection."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        ended = (selection.ids < 0).cumsum(1) > 0
        super().correct(layer, q, Selection(selection.ids.masked_fill(ended, -1)), out, lse)


class WritesPadding(Complete):
    """Padded rows become 0, and their LSE too."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(layer, q, selection, out, lse)
        there = (layer.step.slots >= 0)[:, None, None]
        lse.copy_(torch.where(there, lse, 0.0))


class LosesMass(Complete):
    """The LSE is that of what was left out alone."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        before = lse.clone()
        super().correct(layer, q, selection, out, lse)
        left = lse.double().exp() - before.double().exp()
        lse.copy_(torch.where(left > 0, left.log(), before.double()))


class SortsTheSelection(Complete):
    """It writes to what it is given."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(layer, q, selection, out, lse)
        selection.ids.copy_(selection.ids.sort(1).values)


class BatchesQueries(Complete):
    """Every row is corrected by the mean query of the batch."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(
            layer, q.nan_to_num().mean(0, keepdim=True).expand_as(q), selection, out, lse
        )


class WaitsForTheDevice(Complete):
    """It asks whether there is anything to do."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        if (layer.step.slots >= 0).any().item():
            super().correct(layer, q, selection, out, lse)


class OtherKernels(Complete):
    """Kernels leave the LSE as it is."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(layer, q, selection, out, lse.clone())


class Completing(Complete):
    """An algorithm that selects all that it has room for, and adds the rest by itself."""

    retrieve_topk = Everything.retrieve_topk

    def __init__(self, setup):
        self.model, self.group, self.widen = setup.model, setup.group, 1

    @hookimpl
    def spec(self):
        return AlgorithmSpec(super().spec().representations)


class CompletingTwice(Completing):
    """An algorithm adds what is attended too."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(layer, q, Selection(torch.full_like(selection.ids, -1)), out, lse)


class CompletesTheFirstLane(Completing):
    """An algorithm takes every lane for the first."""

    @hookimpl
    def correct(self, layer, q, selection, out, lse):
        super().correct(layer, q, Selection(selection.ids[:1].expand_as(selection.ids)), out, lse)


def _of_algorithm(broken: type, test: str) -> Mutant:
    clean = PluginEntry("completing", "algorithm", f"{__name__}:Completing")
    entry = evolve(clean, name="mutant", factories=f"{__name__}:{broken.__name__}")
    return Mutant(name_of(broken), AlgorithmTests, f"test_{test}", entry, clean)


def _mutant(broken: type, test: str, tier: str = "cpu", kernels: bool = False) -> Mutant:
    own = f"{broken.__module__}:{broken.__name__}"
    factories = {**COMPLETE.factories, "triton": own} if kernels else own
    clean = evolve(COMPLETE, name="complete_clean")
    entry = evolve(COMPLETE, name="mutant", factories=factories)
    options = AlgorithmOptions()
    return Mutant(name_of(broken), StageTests, f"test_{test}", entry, clean, (tier,), options)


_ADDED = "a_correction_adds_what_is_left_out_and_nothing_else"
_ALONE = "rows_are_corrected_alone"

MUTANTS = [
    _mutant(CountsTwice, _ADDED),
    _mutant(GoesByTheFirstLane, _ADDED),
    _mutant(ReadsTheFirstPlaces, _ALONE),
    _mutant(WritesPadding, _ADDED),
    _mutant(LosesMass, _ADDED),
    _mutant(SortsTheSelection, _ADDED),
    _mutant(BatchesQueries, _ALONE),
    _mutant(WaitsForTheDevice, "a_correction_reads_nothing_on_the_host", "interpret"),
    _of_algorithm(CompletingTwice, _ADDED),
    _of_algorithm(CompletesTheFirstLane, _ADDED),
    _mutant(OtherKernels, "kernels_correct_as_the_reference_does", "interpret", kernels=True),
]
