"""Bugs that reference and kernels share, or that only long, tied, far or shared data show."""

from __future__ import annotations

import torch
from attrs import evolve

from tests.mutants import signs
from tests.mutants.harness import Mutant, name_of
from tests.mutants.signs import SIGNS, Signs
from tests.mutants.transfers import changed
from topkv import hookimpl
from topkv_testing.algorithms import AlgorithmOptions, AlgorithmTests


def signs_with(old: str, new: str) -> type:
    """The selector with one change."""
    return changed(signs, old, new).Signs


def signs_with_both(in_kernel: tuple[str, str], in_torch: tuple[str, str]) -> type:
    """The selector with one change, in the kernel and in the reference alike."""
    return changed(changed(signs, *in_kernel), *in_torch).Signs


class DropsTheNorm(
    signs_with_both(
        ("tl.store(p_norms + at, norm)", "tl.store(p_norms + at, 1.0)"),
        ("norms[at] = k.square().sum(-1).sqrt()", "norms[at] = 1.0"),
    )
):
    """Every key counts alike: the norm is dropped, in kernel and reference."""


class HalfOfTheChannels(
    signs_with_both(
        ("tl.where(k >= 0, 1, -1)", "tl.where(d < D // 2, tl.where(k >= 0, 1, -1), 0)"),
        (
            "signs[at] = torch.where(k >= 0, 1, -1)",
            "half = torch.arange(k.shape[-1]) < k.shape[-1] // 2; "
            "signs[at] = (torch.where(k >= 0, 1, -1) * half)",
        ),
    )
):
    """The first half of the channels alone is kept, in kernel and reference."""


class NormInTheModelsDtype(
    signs_with_both(
        ("tl.store(p_norms + at, norm)", "tl.store(p_norms + at, norm.to(p_k.dtype.element_ty))"),
        (
            "norms[at] = k.square().sum(-1).sqrt()",
            "norms[at] = k.square().sum(-1).sqrt().to(layer.ring_k.dtype).float()",
        ),
    )
):
    """The norm is rounded to the model's dtype, in kernel and reference."""


class SecondBlockUnwritten(
    signs_with("score_kernel[(lanes, blocks)]", "score_kernel[(lanes, 1)]")
):
    """The kernel scores the first block of tokens, and what is behind it keeps old scores."""


class SecondBlockOfTheFirstSlot(
    signs_with(
        "page = tl.load(p_pages + slot * max_pages + u // PAGE",
        "page = tl.load(p_pages + (block == 0) * slot * max_pages + u // PAGE",
    )
):
    """From the second block on the kernel reads the pages of slot 0."""


class StrictSign(signs_with("tl.where(k >= 0, 1, -1)", "tl.where(k > 0, 1, -1)")):
    """The kernel takes zeros for negative, the reference for positive."""


class WrapsAddresses(
    signs_with(
        "p_signs + at[:, None] * D + d[None, :], inside",
        "p_signs + ((at[:, None] * D + d[None, :]) & 0x7FFFFFFF), inside",
    )
):
    """Offsets into the pool have 31 bits and wrap."""


class AsksForANumber(Signs):
    """The hot path of the kernels asks for the longest length."""

    @hookimpl
    def update(self, layer, k, v):
        if self.impl == "reference" or layer.step.lengths.max().item() > 0:
            super().update(layer, k, v)


class SettleRecentres(Signs):
    """Each settle takes signs anew, of keys less their mean: on pages that a fork shares too."""

    settle_whole, prefix = True, "none"

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        _, keys, values = zip(*history, strict=True)
        keys, values = torch.cat(keys), torch.cat(values)
        recentred, empty = keys - keys.float().mean(0).to(keys.dtype), keys[:0]
        self.construct(layer, slot, 0, recentred, values, empty, empty)


def oracle(bench, slot, q):
    """The norm times the signs, in float64."""
    group = bench.group
    keys = bench.keys[slot][: bench.selectable(slot)].double()
    signs = torch.where(keys >= 0, 1.0, -1.0).double() * keys.norm(dim=-1, keepdim=True)
    heads = q[0].double().unflatten(0, (group.num_kv_heads, -1))
    scores = torch.einsum("uhd,hgd->hug", signs, heads).amax(-1)
    return scores.unflatten(0, (group.lane_heads, -1)).amax(1)


LONG = "long_requests_select_what_the_reference_selects"

OPTIONS = AlgorithmOptions(hidden_needles=True, oracle=oracle)


def _mutant(broken: type, test: str, *tiers: str) -> Mutant:
    kernels = type(f"{broken.__name__}Triton", (broken,), {"impl": "triton"})
    globals()[kernels.__name__] = kernels
    factories = {cls.impl: f"{__name__}:{cls.__name__}" for cls in (broken, kernels)}
    entry = evolve(SIGNS, name="mutant", factories=factories)
    return Mutant(name_of(broken), AlgorithmTests, f"test_{test}", entry, SIGNS, tiers, OPTIONS)


MUTANTS = [
    _mutant(DropsTheNorm, "selections_are_those_of_the_oracle", "cpu"),
    _mutant(HalfOfTheChannels, "selections_are_those_of_the_oracle", "cpu", "interpret"),
    _mutant(NormInTheModelsDtype, "long_selections_are_those_of_the_oracle", "cpu"),
    _mutant(SecondBlockUnwritten, LONG, "interpret"),
    _mutant(SecondBlockOfTheFirstSlot, LONG, "interpret"),
    _mutant(StrictSign, "kernels_select_what_the_reference_selects", "interpret"),
    _mutant(WrapsAddresses, "pools_beyond_2_31_elements", "gpu"),
    _mutant(AsksForANumber, "hot_hooks_read_nothing_on_the_host", "interpret"),
    _mutant(SettleRecentres, "a_second_prompt_of_a_twin_leaves_the_other_its_pages", "cpu"),
]
