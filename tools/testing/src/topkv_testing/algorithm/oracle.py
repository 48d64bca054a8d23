"""Selections, compared with the author's formula in float64. Part of the algorithm suite.

Reference and kernels are often written by one hand, with the same mistake in both. The oracle is
the formula of the paper, from the keys alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import pytest
import torch
from attrs import evolve
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases, sizes_of
from topkv_testing.algorithm.options import options_of
from topkv_testing.kit import Data, KitTests, Subject, drawn

ROUNDING = ("bfloat16", "float16", "float32")
"""Dtypes of a long request: one that rounds comes first."""

QUERIES = 64
"""Queries of a long request."""


def oracle_scores(bench: AlgorithmBench, slot: int, q: Tensor) -> Tensor:
    """float64 ``[lane_heads, units]`` of the selectable units, from the oracle of the options.

    Raises:
        ValueError: the oracle gives another shape or dtype, or NaN.
    """
    oracle = options_of(bench.subject).oracle
    assert oracle is not None  # callers have asked
    scores = oracle(bench, slot, q)
    shape = (bench.group.lane_heads, bench.selectable(slot))
    if tuple(scores.shape) != shape or scores.dtype != torch.float64 or scores.isnan().any():
        raise ValueError(
            f"the oracle must give float64 {list(shape)} (lanes, selectable units) without NaN, "
            f"got {scores.dtype} {list(scores.shape)}"
        )
    return scores


def require_best(
    bench: AlgorithmBench, slot: int, scores: Tensor, lanes: Sequence[Sequence[int]]
) -> None:
    """Assert that each lane selects the units of the largest scores, up to ties.

    Args:
        bench: the bench that selected.
        slot: the request.
        scores: from ``oracle_scores``.
        lanes: ids of each lane, -1 anywhere.

    Raises:
        AssertionError: with the worst unit that was selected and the best that was left out.
    """
    promised, share = bench.promised(slot), options_of(bench.subject).mass
    for number, (lane, row) in enumerate(zip(lanes, scores, strict=True)):
        chosen = {unit for unit in lane if unit >= 0}
        counted = sorted(chosen - promised)
        left = sorted(set(range(len(row))) - chosen - promised)
        if not counted or not left:
            continue
        worst = counted[int(row[counted].argmin())]
        best = left[int(row[left].argmax())]
        tie = share * float(row[row.isfinite()].abs().max())
        if row[worst] < row[best] - tie:
            raise AssertionError(
                f"lane {number} of a request of {len(bench.keys[slot])} tokens selects unit "
                f"{worst} of score {float(row[worst]):.9g} and leaves out unit {best} of score "
                f"{float(row[best]):.9g} by the oracle; scores within {tie:.3g} would tie"
            )


def _require_oracle(subject: Subject) -> None:
    if options_of(subject).oracle is None:
        pytest.skip(f"{subject.entry.name}: the options have no oracle")


class OracleTests(KitTests):
    """Selections by the formula of the options, where they have one."""

    kind = "algorithm"

    @drawn(
        cpu=60,
        interpret=5,
        gpu=20,
        needs=[_require_oracle],
        case=lambda subject: cases(subject) | cases(subject, exact=False),
    )
    def test_selections_are_those_of_the_oracle(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """After a prompt and a step, with zero keys and ties among the others."""
        bench, slots = AlgorithmBench(subject, case), [2, 0]
        for slot in slots:
            keys = case.tokens(slot)[: data.draw(bench.long_lengths())]
            bench.prefill(slot, keys)
        bench.append(slots, case.tokens(9)[:2])
        _compare(bench, slots, case.queries(2))

    @drawn(
        cpu=0,
        interpret=0,
        needs=[_require_oracle],
        case=partial(cases, keys=("normal",), dtypes=ROUNDING, units=(1, 4), exact=False),
    )
    def test_long_selections_are_those_of_the_oracle(self, subject: Subject, case: Case) -> None:
        """Many queries over ``long_units``: rounding too early changes some of the selections."""
        if subject.tier.name == "interpret":
            pytest.skip("the kernels are compared with the reference, and the reference with this")
        options = options_of(subject)
        widest = max(sizes_of(subject).selects)
        case = evolve(case, least_units=options.long_units, select=widest)
        bench = AlgorithmBench(subject, case)
        bench.prefill(1, case.tokens(1)[:-1])
        for q in case.queries(QUERIES).split(1):
            _compare(bench, [1], q)


def _compare(bench: AlgorithmBench, slots: Sequence[int], q: Tensor) -> None:
    """Select for rows of these slots, and compare each with the oracle."""
    ids = bench.retrieve(q, slots).tolist()
    for row, slot in enumerate(slots):
        require_best(bench, slot, oracle_scores(bench, slot, q[row]), ids[row])
