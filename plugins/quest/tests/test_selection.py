"""Selections of Quest against float64 scores of the bounds that it keeps."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from topkv_quest import quest
from topkv_quest.quest import Quest

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def raw_scores(w, q, slots):
    """The implementation's own scaled scores ``[B, H, U]`` and lane scores ``[B, lanes, U]``."""
    w.retrieve(q, slots)
    heads, lanes, width = w.model.num_heads, w.group.lane_heads, w.group.max_units
    if type(w.quest) is Quest:
        scores, _ = w.quest.lane_scores(w.layer, q[:, 0].to(w.device))
        return reference_raw(w, q, slots), scores.cpu().view(-1, lanes, width)
    raw = w.quest.heads.raw[: len(slots) * heads].cpu()
    scores = w.quest.heads.scores[: len(slots) * lanes].cpu()
    return raw.view(-1, heads, width), scores.view(-1, lanes, width)


def reference_raw(w, q, slots):
    """fp32 scores by the formula of the reference, ``[B, H, U]``."""
    width = w.group.max_units
    rows = []
    for row, slot in enumerate(slots):
        stored = w.stored(slot, w.closed(slot))
        scale = stored["scale"][None] if "scale" in stored else None
        scores = quest.head_scores(q[row], stored["bounds"][None], scale)[0] * w.model.scale
        rows.append(torch.nn.functional.pad(scores, (0, width - scores.shape[1])))
    return torch.stack(rows)


def check_against_float64(w, slots, sums=0):
    """Compare scores with float64.

    Tensor cores cut the fp32 sum of each 16 products off instead of rounding it; ``sums`` says
    how many sums there are, where they are more than a few.
    """
    q = w.queries(len(slots))
    ids = w.retrieve(q, slots)
    raw, scores = raw_scores(w, q, slots)
    plain = reference_raw(w, q, slots)
    for row, slot in enumerate(slots):
        closed = w.closed(slot)
        true_raw, true_scores = w.oracle(q[row], slot)
        # Twice the error of plain fp32, and the rounding of a few sums of that size.
        error = (plain[row, :, :closed] - true_raw).abs().max()
        band = 2 * error + (2 + sums) * 2**-23 * w.magnitude(q[row], slot)
        assert (raw[row, :, :closed] - true_raw).abs().max() <= band
        # A logit off by e moves a log-probability by at most 2 e; sums add more.
        allowed = 2 * band + 2**-20
        assert (scores[row, :, :closed] - true_scores).abs().max() <= allowed
        for lane in range(w.group.lane_heads):
            chosen = [unit for unit in ids[row, lane].tolist() if unit >= 0]
            left = sorted(set(range(closed)) - set(chosen))
            if left:
                least = true_scores[lane, chosen].min()
                assert least >= true_scores[lane, left].max() - 2 * allowed


@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads"),
    [
        (torch.bfloat16, 4, 2),
        (torch.bfloat16, 6, 1),
        (torch.float16, 2, 2),
        (torch.float32, 6, 2),
    ],
)
def test_scores_and_selection_agree_with_float64(
    world, impl, device, metadata, scope, dtype, heads, kv_heads
):
    make = {"metadata": metadata, "scope": scope, "dtype": dtype}
    make |= {"heads": heads, "kv_heads": kv_heads}
    check_against_float64(world.filled(impl, device, sinks=0, select=5, **make), [0, 1, 2])


@pytest.mark.parametrize(("units", "kv_heads"), [(300, 2), (8400, 1)])
def test_many_units(world, impl, device, scope, units, kv_heads):
    make = {"scope": scope, "heads": 2, "kv_heads": kv_heads, "unit": 1, "units": units}
    w = world(impl, device, dim=16, select=40, sinks=0, requests=1, **make)
    # The bounds of units of one key are that key.
    w.keys[0] = w.random(units)
    w.pools["bounds"][w.host(0, units)] = w.keys[0][:, :, None].to(device)
    check_against_float64(w, [0])


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_score_bounds_every_key_of_its_unit(world, impl, device, metadata, dtype):
    w = world.filled(impl, device, metadata=metadata, dtype=dtype)
    q, slots = w.queries(3), [0, 1, 2]
    raw, _ = raw_scores(w, q, slots)
    for row, slot in enumerate(slots):
        keys = w.keys[slot][: w.closed(slot) * w.unit].double()
        keys = keys.repeat_interleave(w.model.group_size, 1)
        logits = torch.einsum("hd,nhd->hn", q[row, 0].double(), keys) * w.model.scale
        best = logits.unflatten(1, (-1, w.unit)).amax(2)
        slack = 2**-18 * logits.abs().max()  # fp32 sums of the score
        assert (raw[row, :, : w.closed(slot)] >= best - slack).all()


@pytest.mark.parametrize("unit", [1, 4])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_bound_is_tight_where_all_keys_of_a_unit_are_equal(world, impl, device, unit, dtype):
    w = world(impl, device, unit=unit, dtype=dtype, units=40, select=4, sinks=0)
    copies = w.random(31).repeat_interleave(unit, 0)
    w.prefill(0, copies)
    q = w.queries(1)
    raw, _ = raw_scores(w, q, [0])
    keys = copies[::unit][:30].double().repeat_interleave(w.model.group_size, 1)
    logits = torch.einsum("hd,nhd->hn", q[0, 0].double(), keys) * w.model.scale
    fp32 = torch.einsum("hd,nhd->hn", q[0, 0].float(), keys.float()) * w.model.scale
    band = 2 * (fp32 - logits).abs().max() + 2**-22 * logits.abs().max()
    assert (raw[0, :, :30] - logits).abs().max() <= band


def test_lengths_at_their_edges(world, impl, device, metadata, scope):
    lengths = [1, 2, 3, 4, 5, 7, 8, 9, 16, 17, 18, 79, 80]
    w = world(impl, device, metadata=metadata, scope=scope, requests=13)
    for slot, length in enumerate(lengths):
        w.prefill(slot, w.random(length))
    ids = w.retrieve(w.queries(13), list(range(13)))
    for slot in range(13):
        few = min(w.closed(slot), w.group.select)
        if w.closed(slot) <= w.group.select:
            assert (ids[slot, :, :few] == torch.arange(few)).all()


def test_sinks_are_forced(world, impl, device, scope):
    for sinks in (0, 1, 3):
        w = world(impl, device, scope=scope, select=4, sinks=sinks)
        keys = w.random(80) * 3
        keys[: 3 * w.unit] = 0
        w.prefill(0, keys)
        ids = w.retrieve(w.queries(1), [0])
        for lane in ids[0].tolist():
            assert set(range(sinks)) <= set(lane)
            assert not set(range(sinks, 3)) & set(lane)


def test_budgets_are_nested(world, impl, device, metadata, scope):
    sets = []
    for select in (3, 7, 20):
        w = world.filled(impl, device, metadata=metadata, scope=scope, select=select)
        q = torch.randn(1, 1, 4, 12, generator=torch.Generator().manual_seed(9)).bfloat16()
        sets.append([set(lane) - {-1} for lane in w.retrieve(q, [0])[0].tolist()])
    for smaller, larger in pairwise(sets):
        assert all(few <= many for few, many in zip(smaller, larger, strict=True))


def test_negating_queries_and_keys_changes_nothing(world, impl, device, metadata, scope):
    w = world(impl, device, metadata=metadata, scope=scope)
    # Small integers: every product and sum is exact, in any order.
    keys = torch.randint(-3, 4, (80, 2, 12), generator=w.generator).bfloat16()
    keys[::4, :, 0] = 127
    q = torch.randint(-3, 4, (1, 1, 4, 12), generator=w.generator).bfloat16()
    w.prefill(0, keys)
    first = w.retrieve(q, [0])
    w.prefill(0, -keys)
    assert torch.equal(first, w.retrieve(-q, [0]))


def test_a_head_selects_for_itself(world, impl, device, metadata):
    w = world(impl, device, metadata=metadata)
    keys, q = w.random(60), w.queries(1)
    w.prefill(0, keys)
    first = w.retrieve(q, [0])
    keys, q = keys.clone(), q.clone()
    keys[:, 1] = w.random(60)[:, 1] * 100
    q[:, :, 2:] *= -50
    w.prefill(0, keys)
    assert torch.equal(first[0, 0], w.retrieve(q, [0])[0, 0])


def test_a_row_does_not_depend_on_its_batch_or_its_pages(world, impl, device, metadata, scope):
    make = {"metadata": metadata, "scope": scope}
    w, moved = (world(impl, device, seed=seed, **make) for seed in (0, 1))
    assert not torch.equal(w.step.page_table, moved.step.page_table)
    q = w.queries(3)
    for slot, length in enumerate((80, 33, 6)):
        keys = w.random(length)
        w.prefill(slot, keys)
        moved.prefill(slot, keys)
    alone = [w.retrieve(q[slot : slot + 1], [slot])[0] for slot in range(3)]
    for other in (w, moved):
        ids = other.retrieve(q[[2, 0, 1]], [2, -1, 1])
        assert torch.equal(ids[0], alone[2])
        assert (ids[1] == -1).all()
        assert torch.equal(ids[2], alone[1])
        assert (other.retrieve(q, [-1, -1, -1]) == -1).all()


def test_what_is_not_closed_has_no_influence(world, impl, device, metadata):
    w = world.filled(impl, device, metadata=metadata, lengths=(43, 43, 43))
    q = w.queries(1)
    first = w.retrieve(q, [1])
    for name, pool in w.pools.items():
        kept = pool[w.host(1, 10)].clone()
        pool.fill_(float("nan") if name == "scale" or metadata == "bf16" else 127)
        pool[w.host(1, 10)] = kept
    assert torch.equal(first, w.retrieve(q, [1]))


def test_strided_queries(world, impl, device):
    w = world.filled(impl, device)
    q = w.queries(3).to(device)
    first = w.retrieve(q, [0, 1, 2])
    wide = torch.full((3, 2, 4, 24), float("nan"), dtype=q.dtype, device=device)
    wide[:, :1, :, 12:] = q
    assert torch.equal(first, w.retrieve(wide[:, :1, :, 12:], [0, 1, 2]))


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("dtype", "heads", "kv_heads", "dim", "unit"),
    [
        (torch.bfloat16, 128, 1, 576, 4),  # latent rows
        (torch.float32, 20, 1, 320, 1),
        (torch.float16, 70, 1, 40, 16),
        (torch.bfloat16, 4, 2, 260, 2),
    ],
)
def test_keys_and_groups_too_large_for_registers(
    world, impl, device, metadata, dtype, heads, kv_heads, dim, unit
):
    make = {"metadata": metadata, "dtype": dtype, "heads": heads, "kv_heads": kv_heads}
    w = world(impl, device, sinks=0, select=5, dim=dim, unit=unit, units=140, requests=2, **make)
    for slot, units in enumerate((131, 60)):
        w.prefill(slot, w.random(units * unit + 1))
    check_against_float64(w, [1, 0], sums=2 * dim // 16 if w.device.type == "cuda" else 0)
