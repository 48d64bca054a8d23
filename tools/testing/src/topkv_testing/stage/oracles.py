"""The meaning of a stage: formulas of its author in float64, and how they are compared.

``keep``, ``correct`` and a pruning ``refine`` have no traits that would state what they promise,
so that the author gives the whole formula. Reference and kernels are often written by one hand,
with the same mistake in both: a formula uses the keys alone, and is written apart from the
plugin's code.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv_testing.algorithm.options import AlgorithmOptions
from topkv_testing.kit import Subject


@frozen
class Left:
    """Candidates of a lane that are left: the highest ranks, of equal ones the lowest units.

    Attributes:
        rank: float64 ``[n]`` of the candidates, in their order.
        counts: how many may be left: one number, or several where rounding decides.
    """

    rank: Tensor
    counts: Sequence[int]


@frozen
class StageOptions(AlgorithmOptions):
    """Options that the author of a stage gives the suite; the fixture ``options`` returns it.

    Each of the formulas may be left out, and is given the bench, an ``AlgorithmBench`` with
    ``bench.keys[slot]``, a request slot, and queries ``[1, H, D]`` in the dtype of the model.
    Values of the bench are its keys backwards.

    Attributes:
        left: ``(bench, slot, q, lane, among) -> Left`` of a ``refine`` that drops some of the
            candidates ``among``, units in ascending order, at least one. For a ``refine`` that
            leaves the best K there is ``oracle``.
        estimate: ``(bench, slot, q) -> (weights, values)`` of a ``correct``: of all selectable
            units, were they left out, the logarithms of what their tokens weigh together for each
            query head, float64 ``[H, units]``, and what stands for their values, ``[H, units,
            Dv]``.
        worth: ``(bench, slot, position) -> (scores, error)`` of a ``keep``: float64
            ``[lane_heads, pages]`` of the full pages, and by how much rounding may change one.
        exactly: keys that the stage keeps exactly, ``[n, Hkv, D]``, made of drawn ones: for stages
            that keep few bits. None for the drawn keys.
        near: by how much, relative to the best, ranks may be off.
    """

    left: Callable[[Any, int, Tensor, int, list[int]], Left] | None = None
    estimate: Callable[[Any, int, Tensor], tuple[Tensor, Tensor]] | None = None
    worth: Callable[[Any, int, int], tuple[Tensor, float]] | None = None
    exactly: Callable[[Tensor], Tensor] | None = None
    near: float = 1e-5


def stage_options_of(subject: Subject) -> StageOptions:
    """The subject's options; options without formulas where it has none of a stage."""
    options = subject.options
    return options if isinstance(options, StageOptions) else StageOptions()


def exact_keys(subject: Subject, keys: Tensor) -> Tensor:
    """Drawn keys, or what the author makes of them."""
    exactly = stage_options_of(subject).exactly
    return keys if exactly is None else exactly(keys).to(keys.dtype)


def along_a_line(keys: Tensor) -> Tensor:
    """Keys ``[n, H, D]`` that few bits keep exactly: every second channel is 0, and the others are
    alike, a multiple of 15/64. So is any mean of them, or less such a mean, but for one rounding.
    """
    size = (keys[..., :1].float() * 4).round().clamp(-16, 16) * (15 / 64)
    return size * (torch.arange(keys.shape[-1], device=keys.device) % 2 == 0)


def fewest(share: Tensor, p: float, most: int, near: float) -> Left:
    """Leave as few of the highest candidates as give every query head the share p, at most K; the
    rank of a candidate is its largest share of a head.

    Args:
        share: float64 ``[h, n]`` of each head, which sum up to 1.
        p: share of each head; 1 leaves all candidates.
        most: K.
        near: by how much a sum of shares may be off.
    """
    rank, candidates = share.amax(0), share.shape[1]
    # Of equal ones the lower.
    order = sorted(range(candidates), key=lambda at: (-float(rank[at]), at))
    sums = share[:, order].cumsum(1).amin(0).tolist()
    if p == 1:
        return Left(rank, [min(most, candidates)])
    least, enough = (
        next((n for n, held in enumerate(sums, 1) if held >= p + slack), candidates)
        for slack in (-near, near)
    )
    return Left(rank, range(min(least, most), min(enough, most) + 1))


def assert_left(reported: Left, among: Sequence[int], kept: Sequence[int], near: float) -> None:
    """Assert that the units left of a lane's candidates are those of the formula, up to rounding.

    Raises:
        AssertionError: another number is left, or one that ranks lower than one that is not.
    """
    rank = dict(zip(among, reported.rank.tolist(), strict=True))
    if len(kept) not in reported.counts:
        raise AssertionError(
            f"left are {sorted(kept)}, {len(kept)} of {len(among)} candidates, by the formula "
            f"{' or '.join(map(str, reported.counts))}; ranks are {rank}"
        )
    dropped = [unit for unit in among if unit not in kept]
    if not kept or not dropped:
        return
    worst, best = min(kept, key=lambda unit: rank[unit]), max(dropped, key=lambda u: rank[u])
    if rank[worst] < rank[best] - near * max(map(abs, rank.values())):
        raise AssertionError(
            f"left is unit {worst} of rank {rank[worst]:.6g}, and not unit {best} of rank "
            f"{rank[best]:.6g}: {sorted(kept)} of {rank}"
        )
