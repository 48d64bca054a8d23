"""Error of the estimate: none where units are uniform, bounded where they are not."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.residual.tests.test_conformance import ENTRY
from topkv.errors import ConfigError
from topkv.hooks.stage import StageSetup
from topkv_residual import reference
from topkv_residual.stage import Residual
from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.correct import attended, corrected
from topkv_testing.kit import params_of, subject_of
from topkv_testing.models.oracle import attention
from topkv_testing.strategies import KEYS, Geometry, key_kinds


def case_of(unit=4, dim=16, dtype=torch.float32, scope="kv_head", units=40, **params):
    geometry = Geometry(2, 2, dim, unit, 2, scope, dtype)
    return Case(geometry, params, 3, 2, "normal", 7, units, math.nan, exact=False)


def filled(on, case, keys, rows=(1, -1, 0)):
    """A bench with these keys in two slots, and a step."""
    bench = AlgorithmBench(subject_of(ENTRY, "stage", on), case, values=None)
    for slot in (0, 1):
        bench.prefill(slot, keys[: len(keys) - 5 * slot - 1])
    bench.append(rows, torch.stack([keys[-1]] * len(rows)))
    return bench, list(rows)


def selection(bench, rows, seed=0):
    ids = torch.full((len(rows) * bench.group.lane_heads, bench.group.select), -1)
    generator = torch.Generator().manual_seed(seed)
    for lane, chosen in enumerate(ids):
        slot = rows[lane // bench.group.lane_heads]
        units = torch.randperm(bench.selectable(slot), generator=generator)[: len(chosen) - 1]
        chosen[1 : 1 + len(units)] = units
    return ids.int()


def dense(bench, rows, q):
    """Attention to everything, float64 ``[B, H, Dv]``, and its log-sum-exp; 0 in padded rows."""
    outs = [
        attention(q[row], bench.keys[slot], bench.keys[slot].flip(-1), bench.model.scale)
        for row, slot in enumerate(rows)
        if slot >= 0
    ]
    return (torch.cat(each) for each in zip(*outs, strict=True))


@pytest.mark.parametrize("scope", ["kv_head", "shared"])
def test_uniform_units_give_attention_to_everything(on, scope):
    """Keys and values are equal within a unit: the estimate is what was left out."""
    case = case_of(scope=scope)
    keys = case.tokens(0).unflatten(0, (-1, 4))[:, :1].expand(-1, 4, -1, -1).flatten(0, 1)
    bench, rows = filled(on, case, keys)
    q = case.queries(3) * 2
    before = attended(bench, rows, q, selection(bench, rows))
    after = corrected(bench, q, rows, before)
    live = [row for row, slot in enumerate(rows) if slot >= 0]
    truth, lse = dense(bench, rows, q)
    assert (before.out[live, 0].cpu().double() - truth).abs().max() > 0.05
    torch.testing.assert_close(after.out[live, 0].cpu().double(), truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.lse[live, 0].cpu().double(), lse, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_random_keys_come_nearer_to_attention_to_everything(on, dtype):
    """Keys are alike within a unit, as those of neighbours are: a third of the error is left."""
    case = case_of(unit=8, dtype=dtype, units=48)
    base = case.tokens(0).float().unflatten(0, (-1, 8))
    keys = (base[:, :1] + 0.5 * base).flatten(0, 1).to(dtype)
    bench, rows = filled(on, case, keys)
    q = case.queries(3)
    before = attended(bench, rows, q, selection(bench, rows))
    after = corrected(bench, q, rows, before)
    truth, lse = dense(bench, rows, q)
    live = [row for row, slot in enumerate(rows) if slot >= 0]
    errors = [
        ((each.out[live, 0].cpu().double() - truth).norm(), (each.lse[live, 0].cpu() - lse).abs())
        for each in (before, after)
    ]
    assert errors[1][0] < errors[0][0] / 3
    assert errors[1][1].max() < 0.25 * errors[0][1].max()


def test_a_weight_is_at_most_the_true_one():

    @given(
        seed=st.integers(0, 999),
        unit=st.sampled_from([1, 2, 7, 16]),
        size=st.sampled_from([0.1, 1.0, 30.0]),
        kind=key_kinds(),
    )
    @settings(deadline=None, max_examples=80)
    def check(seed, unit, size, kind):
        generator = torch.Generator().manual_seed(seed)
        k = size * KEYS[kind]((unit, 1, 1), generator)[None].float()
        q = torch.randn(1, 3, 1, generator=generator)
        mean, _ = reference.summary(k, k, torch.ones(1, unit, dtype=torch.bool))
        reported = reference.logits(q, mean[None], unit, 1.0)[0, :, 0]
        logits = torch.einsum("hd,ud->hu", q[0].double(), k[0, :, 0].double())
        slack = 1e-4 * (1 + logits.abs().amax(1))
        assert (reported <= logits.logsumexp(1) + slack).all(), "Jensen"
        assert (reported >= logits.amin(1) + math.log(unit) - slack).all()

    check()


def test_extreme_logits_stay_finite(on):
    """Attended logits far above or below those of what was left out."""
    for factor in (60.0, -60.0):
        case = case_of(unit=4, units=12)
        keys = case.tokens(0)
        bench, rows = filled(on, case, keys)
        q = factor * case.queries(3)
        before = attended(bench, rows, q, selection(bench, rows))
        after = corrected(bench, q, rows, before)
        assert after.out.isfinite().all()
        assert (after.lse >= before.lse - 1e-3).all()
        assert after.out.abs().max() <= keys.abs().max() * 1.01


def test_many_shares_and_many_ids(on):
    """More units than a program takes, and a selection wider than a block of ids."""
    case = case_of(unit=1, dim=4, units=400)
    case = evolve(case, select=150)
    keys = case.tokens(0)
    bench, rows = filled(on, case, keys)
    q = case.queries(3)
    before = attended(bench, rows, q, selection(bench, rows))
    after = corrected(bench, q, rows, before)
    truth, lse = dense(bench, rows, q)  # a unit of one token is its own mean
    live = [row for row, slot in enumerate(rows) if slot >= 0]
    torch.testing.assert_close(after.out[live, 0].cpu().double(), truth, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.lse[live, 0].cpu().double(), lse, rtol=1e-5, atol=1e-5)


def test_wrong_parameters_are_refused_with_every_reason(on):
    bench = AlgorithmBench(subject_of(ENTRY, "stage", on), case_of())
    model = evolve(bench.model, softcap=30.0, dtype=torch.float64)
    setup = StageSetup(model, bench.group, params_of(ENTRY, {}), bench.device)
    with pytest.raises(ConfigError) as error:
        Residual(setup)
    reported = "\n".join(error.value.reasons)
    for part in ("softcap", "kv_format"):
        assert part in reported
