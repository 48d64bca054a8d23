"""Estimates of ``correct``. Part of the stage suite."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithm.correct import Attended, attended, corrected, corrects, selections
from topkv_testing.kit import Data, KitTests, Subject, drawn
from topkv_testing.stage.oracles import exact_keys, stage_options_of


def merged(bench: AlgorithmBench, slot: int, q: Tensor, before: Attended) -> tuple[Tensor, Tensor]:
    """float64 ``[H, Dv]`` and ``[H]``: attention of the only row, with the estimate of the options
    added for the units that were left out of each lane."""
    estimate = stage_options_of(bench.subject).estimate
    assert estimate is not None  # callers have asked
    weights, values = estimate(bench, slot, q)
    units, size = torch.arange(bench.selectable(slot)), len(weights) // bench.group.lane_heads
    held = torch.stack([torch.isin(units, lane.cpu()) for lane in before.ids])
    weights = weights.masked_fill(held.repeat_interleave(size, 0), -torch.inf)
    out, lse = before.out[0, 0].cpu().double(), before.lse[0, 0].cpu().double()
    total = torch.logaddexp(lse, weights.logsumexp(1))
    part = torch.einsum("hu,huv->hv", (weights - total[:, None]).exp(), values)
    return (lse - total).exp()[:, None] * out + part, total


class EstimateTests(KitTests):
    """Corrections by the formula of the options, where they have one."""

    kind = "stage"

    @drawn(
        cpu=40,
        interpret=4,
        gpu=20,
        case=partial(cases, keys=("normal", "ties"), dtypes=("float32",), exact=False),
    )
    def test_what_is_added_is_what_the_formula_says(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Output and log-sum-exp, in fp32, of any selection; at each of several calls."""
        if stage_options_of(subject).estimate is None:
            pytest.skip(f"{subject.entry.name}: the options do not say what is estimated")
        bench = AlgorithmBench(subject, case, values=None)
        corrects(bench)
        keys = exact_keys(subject, case.tokens(1))[: data.draw(bench.long_lengths())]
        bench.prefill(1, keys[:-1])
        bench.append([1], keys[-1:])
        for salt in range(3):
            q = case.queries(1, salt=50 + salt)
            before = attended(bench, [1], q, data.draw(selections(bench, [1])))
            after = corrected(bench, q, [1], before)
            out, lse = merged(bench, 1, q[0], before)
            for got, expected in ((after.out, out), (after.lse, lse)):
                one = got[0, 0].cpu().double()
                torch.testing.assert_close(one, expected, rtol=1e-4, atol=1e-4)
