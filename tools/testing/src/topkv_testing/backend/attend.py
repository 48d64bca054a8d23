"""``attend`` against float64 attention over explicit tokens."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from attrs import evolve
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.backend.bench import make_backend, plain_geometries, rounded_sums
from topkv_testing.backend.cases import LAYOUTS, AttendCase, AttendInputs, attend_cases
from topkv_testing.kit import KitTests, Subject, drawn
from topkv_testing.strategies import seeds


def check_attend(
    subject: Subject,
    backend: Any,
    scale: float,
    inputs: AttendInputs,
    truth: AttendInputs | None = None,
    host: bool = False,
) -> None:
    """Attend and compare with the oracle over ``truth``, by default ``inputs``."""
    expected = (truth or inputs).expected(scale)
    out, lse = inputs.attend(backend, subject.tier.device, host)
    expected.check(out, lse, rounded_sums(subject))


def check_case(subject: Subject, case: AttendCase) -> None:
    """Call ``check_attend`` on a fresh instance."""
    backend, model, _ = make_backend(subject, case.geometry, case.batch)
    check_attend(subject, backend, model.scale, case.make())


def merged(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Join results over disjoint tokens by their natural log-sum-exp, in float64."""
    outs = torch.stack([out.double() for out, _ in parts])
    logs = torch.stack([lse.double() for _, lse in parts])
    whole = torch.logsumexp(logs, 0)
    weights = torch.exp(logs - whole.masked_fill(whole == -torch.inf, 0.0))
    return (weights[..., None] * outs).sum(0), whole


class AttendTests(KitTests):
    """``attend`` of a backend. Guards and inputs are compared in every call."""

    kind = "backend"

    @drawn(cpu=100, interpret=20, case=attend_cases)
    def test_attends_to_the_listed_tokens(self, subject: Subject, case: AttendCase) -> None:
        check_case(subject, case)

    def test_ragged_lengths_in_every_layout(self, subject: Subject) -> None:
        """Lengths of 0, 1, one unit less one, one unit, and one more; more columns than used."""
        for geometry in plain_geometries(subject):
            unit = geometry.unit
            lengths = (0, 1, max(unit - 1, 1), unit, unit + 1, 2 * unit + unit // 2 + 1)
            for layout in LAYOUTS:
                check_case(subject, AttendCase(geometry, lengths, 3, layout))

    def test_an_empty_lane_gives_zero_and_minus_infinity(self, subject: Subject) -> None:
        for geometry in plain_geometries(subject):
            for first in (0, 1):
                case = AttendCase(geometry, (first, *[0] * (2 * geometry.lane_heads - 1)), 2)
                backend, _, _ = make_backend(subject, geometry, case.batch)
                out, lse = case.make().attend(backend, subject.tier.device)
                assert bool((out[first:] == 0).all()), f"out of an empty lane: {out[first:]}"
                wanted = torch.full_like(lse[first:], -torch.inf)
                assert torch.equal(lse[first:], wanted), f"lse of an empty lane: {lse[first:]}"

    @drawn(cpu=30, interpret=6, case=attend_cases, units=st.integers(0, 8))
    def test_lse_is_a_natural_log_that_merges_parts(
        self, subject: Subject, case: AttendCase, units: int
    ) -> None:
        """Attention over a part of the units and over the rest, joined, is that over all."""
        backend, model, _ = make_backend(subject, case.geometry, case.batch)
        whole = case.make()
        cut = min(units, whole.table.shape[1] - 1)
        size = torch.full_like(whole.lengths, cut * case.geometry.unit)
        first = torch.minimum(whole.lengths, size)
        parts = [
            evolve(whole, lengths=first),
            evolve(whole, table=whole.table[:, cut:], lengths=whole.lengths - first),
        ]
        got = merged([part.attend(backend, subject.tier.device) for part in parts])
        whole.expected(model.scale).check(*got, rounded_sums(subject))

    @drawn(
        cpu=40,
        interpret=10,
        case=partial(attend_cases, batch=2, kv_heads=(2, 3)),
        chosen=st.integers(0, 5),
    )
    def test_a_lane_reads_nothing_of_other_lanes(
        self, subject: Subject, case: AttendCase, chosen: int
    ) -> None:
        """One lane is right while the queries, keys and values of all others are NaN.

        With a table for each head, head h therefore reads no unit that only head g lists.
        """
        backend, model, _ = make_backend(subject, case.geometry, case.batch)
        inputs = case.make()
        mine = chosen % len(case.lengths)
        expected = inputs.permuted([mine]).expected(model.scale)
        k, v = inputs.views()
        for lane, (where, place) in enumerate(inputs.tokens):
            if lane != mine:
                k[where, :, place] = v[where, :, place] = torch.nan
                inputs.q[lane] = torch.nan
        out, lse = inputs.attend(backend, subject.tier.device)
        only = slice(mine, mine + 1)
        expected.check(out[only], lse[only], rounded_sums(subject))

    @drawn(cpu=30, interpret=6, case=attend_cases, random=st.randoms(use_true_random=False))
    def test_permuted_lanes_permute_the_result(
        self, subject: Subject, case: AttendCase, random: Any
    ) -> None:
        backend, model, _ = make_backend(subject, case.geometry, case.batch)
        inputs = case.make()
        check_attend(subject, backend, model.scale, inputs)
        order = random.sample(range(len(case.lengths)), len(case.lengths))
        check_attend(subject, backend, model.scale, inputs.permuted(order))

    @drawn(cpu=30, interpret=6, case=attend_cases, seed=seeds())
    def test_order_and_place_of_units_do_not_matter(
        self, subject: Subject, case: AttendCase, seed: int
    ) -> None:
        """Full units of a lane in another order, and all units in other slots."""
        backend, model, _ = make_backend(subject, case.geometry, case.batch)
        inputs, moved = case.make(), case.make()
        random = torch.Generator().manual_seed(seed)
        source, target = inputs.views(), moved.views()
        place = torch.randperm(len(source[0]), generator=random)
        for old, new in zip(source, target, strict=True):
            new[place] = old
        for lane, length in enumerate(case.lengths):
            used, full = -(-length // case.geometry.unit), length // case.geometry.unit
            ids = inputs.table[lane, :used].clone()
            ids[:full] = ids[:full][torch.randperm(full, generator=random)]
            moved.table[lane, :used] = place[ids.long()]
        check_attend(subject, backend, model.scale, moved, truth=inputs)

    @drawn(cpu=30, interpret=6, case=partial(attend_cases, keys=100.0))
    def test_large_logits_do_not_overflow(self, subject: Subject, case: AttendCase) -> None:
        check_case(subject, case)

    def test_serves_call_after_call_of_any_batch(self, subject: Subject) -> None:
        """One instance, made for four rows, with other inputs and batches in every call."""
        for geometry in plain_geometries(subject):
            backend, model, _ = make_backend(subject, geometry, 4)
            for seed, batch in enumerate((3, 3, 1, 4, 2)):
                lanes = batch * geometry.lane_heads
                lengths = [(7 * seed + 11 * lane) % (3 * geometry.unit) for lane in range(lanes)]
                case = AttendCase(geometry, tuple(lengths), 2, seed=seed)
                check_attend(subject, backend, model.scale, case.make())
