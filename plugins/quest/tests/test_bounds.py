"""Bounds of Quest: they hold, are tight, and depend on the keys alone."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
LARGEST = {torch.bfloat16: 1e37, torch.float16: 60000.0, torch.float32: 1e37}


def exact(world, keys):
    """float64 minimum and maximum of every unit, the last one partial: ``[units, Hkv, 2, D]``."""
    units = [part.double() for part in keys.split(world.unit)]
    return torch.stack([torch.stack([part.amin(0), part.amax(0)], 1) for part in units])


def check_bounds(world, keys):
    truth = exact(world, keys)
    stored = world.stored(0, len(truth))
    bounds = world.decoded(0, len(truth))
    assert (bounds[:, :, 0] <= truth[:, :, 0]).all()
    assert (bounds[:, :, 1] >= truth[:, :, 1]).all()
    low, high = truth.unbind(2)
    if stored["bounds"].dtype is torch.int8:
        scale = stored["scale"].double()
        amax = truth.abs().amax((2, 3))
        below = (stored["scale"].view(torch.int16) - 1).view(torch.bfloat16).double()
        assert ((127 * below < amax) | (amax == 0)).all(), "a smaller scale would do"
        step = scale[..., None].expand_as(high)
    elif keys.dtype is stored["bounds"].dtype:
        step = torch.zeros_like(high)
        assert torch.equal(bounds, truth)
    else:
        step = torch.maximum(low.abs(), high.abs()) * 2**-7 + 2.0**-133
    assert ((bounds[:, :, 1] - step < high) | (step == 0)).all(), "not the smallest upper bound"
    assert ((bounds[:, :, 0] + step > low) | (step == 0)).all(), "not the largest lower bound"


@pytest.mark.parametrize("dtype", DTYPES)
def test_every_key_is_within_and_closely(world, impl, device, metadata, dtype):
    @given(seed=st.integers(0, 999), tokens=st.integers(1, 30), power=st.integers(-60, 60))
    @settings(deadline=None, max_examples=8)
    def run(seed, tokens, power):
        w = world(impl, device, metadata=metadata, dtype=dtype, seed=seed)
        power = power // 8 if dtype is torch.float16 else power
        keys = (w.random(tokens).double() * 2.0**power).to(dtype)
        w.prefill(0, keys)
        check_bounds(w, keys)

    run()


@pytest.mark.parametrize("dtype", DTYPES)
def test_zeros_signed_zeros_subnormals_and_extremes(world, impl, device, metadata, dtype):
    tiny = torch.finfo(dtype).smallest_normal
    odd = [0.0, -0.0, tiny / 4, -tiny / 4, tiny, 1.0, -1.0, LARGEST[dtype], -LARGEST[dtype]]
    w = world(impl, device, metadata=metadata, dtype=dtype, dim=4, units=50)
    place = torch.randint(0, len(odd), (180, 2, 4), generator=w.generator)
    keys = torch.tensor(odd).to(dtype)[place]
    keys[:40] = torch.tensor(odd[:4]).to(dtype)[place[:40] % 4]
    keys[40:60] = 0
    w.prefill(0, keys)
    check_bounds(w, keys)


def test_order_within_a_unit_does_not_matter(world, bits, impl, device, metadata):
    w = world(impl, device, metadata=metadata)
    keys = w.random(16).mul(4).round().div(4)  # with -0.0 beside +0.0
    w.prefill(0, keys)
    first = w.stored(0, 4)
    shuffled = torch.cat([part[torch.randperm(len(part))] for part in keys.split(w.unit)])
    w.prefill(0, shuffled)
    assert bits(first, w.stored(0, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("unit", [1, 3, 4])
def test_token_by_token_equals_at_once(world, bits, impl, device, metadata, scope, unit, dtype):
    make = {"metadata": metadata, "scope": scope, "unit": unit, "dtype": dtype, "seed": unit}
    step, whole = (world(impl, device, **make) for _ in range(2))
    keys = step.random(7 * unit + 2)
    prompt = 2 * unit + unit // 2
    step.prefill(1, keys[:prompt], chunks=(unit, 2 * unit))
    for key in keys[prompt:]:
        step.append([-1, 1], torch.stack([key, key]))
    whole.prefill(1, keys)
    units = -(-len(keys) // unit)
    assert bits(step.stored(1, units), whole.stored(1, units))


def test_rollback_keeps_nothing_of_what_was_rejected(world, bits, impl, device, metadata):
    w, clean = (world(impl, device, metadata=metadata, seed=5) for _ in range(2))
    keys, rejected = w.random(11), w.random(4) * 50
    w.prefill(0, keys[:9])
    for key in rejected:
        w.append([0], key[None])
    w.keys[0] = keys[:9]  # a change of length; the ring still holds what was rejected
    for key in keys[9:]:
        w.append([0], key[None])
    clean.prefill(0, keys)
    assert bits(w.stored(0, 3), clean.stored(0, 3))


def test_rows_that_append_nothing_and_padded_rows_write_nothing(
    world, bits, impl, device, metadata
):
    w = world(impl, device, metadata=metadata)
    for slot in range(3):
        w.prefill(slot, w.random(6))
    before = {name: pool.clone() for name, pool in w.pools.items()}
    w.rows([0, -1, 2], appended=1)
    w.layer.step.appended[:] = torch.tensor([0, 1, 0])
    w.update(w.random(3))
    assert bits(before, w.pools)
    w.append([-1, 1], w.random(2))
    changed = [
        host
        for host in range(len(before["bounds"]))
        if not torch.equal(
            before["bounds"][host].view(torch.uint8), w.pools["bounds"][host].view(torch.uint8)
        )
    ]
    assert changed in ([], [int(w.host(1, 2)[1])])


def test_construct_touches_its_units_alone(world, bits, impl, device, metadata):
    w = world(impl, device, metadata=metadata)
    w.prefill(0, w.random(20))
    before = {name: pool.clone() for name, pool in w.pools.items()}
    w.construct(0, 8, w.random(6).to(device))
    touched = w.host(0, 4)[2:]
    for name, pool in w.pools.items():
        pool[touched] = before[name][touched]
    assert bits(before, w.pools)
    w.construct(0, 8, w.random(0).to(device))
    assert bits(before, w.pools)


def test_strided_keys_are_read_where_they_lie(world, bits, impl, device, metadata):
    w = world(impl, device, metadata=metadata)
    keys = w.random(10).to(device)
    wide = torch.full((10, 2, 3, 12), float("nan"), dtype=keys.dtype, device=device)
    wide[:, :, 1] = keys
    w.construct(0, 0, keys)
    first = w.stored(0, 3)
    for view in (wide[:, :, 1], keys.permute(2, 0, 1).contiguous().permute(1, 2, 0)):
        w.construct(0, 0, view)
        assert bits(first, w.stored(0, 3))


@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_per_token_follow_the_formula_of_the_readme(world, metadata, dtype):
    for unit, dim in ((1, 8), (4, 12), (16, 128)):
        w = world("reference", "cpu", metadata=metadata, dtype=dtype, unit=unit, dim=dim)
        held = sum(pool[0].numel() * pool.element_size() for pool in w.pools.values())
        per_token = held / unit / w.model.num_kv_heads
        assert per_token == ((4 * dim) / unit if metadata == "bf16" else (2 * dim + 2) / unit)
        assert held == sum(spec.bytes for spec in w.quest.spec().representations)
