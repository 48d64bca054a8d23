"""Index keys in the pool: their bytes, their places, and how they get there."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def bits(w):
    return w.pool.view(torch.uint8).cpu().clone()


@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
@pytest.mark.parametrize("dtype", DTYPES)
def test_bytes_are_the_nearest_codes(world, encode, impl, device, dtype, scale_format):
    w = world(impl, device, dtype=dtype, scale_format=scale_format)
    keys = w.random(100) * 2.0 ** torch.randint(-9, 9, (100, 1), generator=w.generator)
    keys = keys.to(dtype)
    keys[3], keys[4, 2:] = 0, -0.0
    w.prefill(0, keys)
    codes, scales = w.stored(0, torch.arange(100))
    expected, wanted = encode(keys, w.power_of_two)
    assert torch.equal(codes.long(), expected)
    assert torch.equal(scales.double(), wanted)


@pytest.mark.parametrize("dtype", DTYPES)
def test_bf16_keys_are_kept_bit_for_bit(world, impl, device, dtype):
    w = world(impl, device, keys="bf16", dtype=dtype)
    integer = {2: torch.int16, 4: torch.int32}[dtype.itemsize]
    tiny = torch.randint(-99, 99, (100, w.dim), generator=w.generator).to(integer).view(dtype)
    keys = torch.where(w.random(100) < 0, tiny.abs(), w.random(100))  # with subnormal ones
    w.prefill(0, keys)
    held = w.pool[w.host(0, torch.arange(100)).to(device)].cpu()
    assert torch.equal(held.view(torch.uint8), keys.view(torch.uint8))


def test_fp32_keys_of_a_16_bit_model_are_rounded_once(world, impl, device, form):
    w = world(impl, device, keys=form)
    keys = torch.randn(70, w.dim, generator=w.generator)
    w.prefill(0, keys)
    if form == "bf16":
        held = w.pool[w.host(0, torch.arange(70)).to(device)].cpu()
        assert torch.equal(held, keys.bfloat16())
    else:
        plain = world("reference", "cpu", dtype=torch.float32)
        plain.prefill(0, keys)
        for mine, exact in zip(
            w.stored(0, torch.arange(70)), plain.stored(0, torch.arange(70)), strict=True
        ):
            assert torch.equal(mine, exact)


@pytest.mark.parametrize("page", [64, 192])
def test_a_block_is_64_rows_of_codes_and_64_scales(world, encode, impl, device, page):
    """A block is as DeepGEMM reads it, for D = 128: 8192 bytes of codes and 256 of scales."""
    w = world(impl, device, dim=128, page=page, pages=2)
    w.prefill(1, w.random(page))
    start = int(w.table[1, 0]) * page * 132
    held = bits(w).flatten()[start : start + page * 132]
    codes, scales = encode(w.keys[1])
    for block in range(page // 64):
        mine, its = held[block * 8448 :], slice(block * 64, block * 64 + 64)
        assert torch.equal(mine[:8192].view(64, 128).long(), codes[its])
        assert torch.equal(mine[8192:8448].view(torch.float32).double(), scales[its])


@pytest.mark.parametrize("hadamard", [False, True])
def test_a_token_touches_its_own_bytes_alone(world, impl, device, hadamard):
    """D + 4 of them, read back where a reader of the format looks for them."""

    @given(token=st.integers(0, 255))
    @settings(deadline=None, max_examples=12)
    def check(token):
        w = world(impl, device, dim=128, hadamard=hadamard)
        before = bits(w).flatten()
        w.construct(2, token, w.random(1))
        (changed,) = (bits(w).flatten() != before).nonzero(as_tuple=True)
        own = set(w.bytes_of(2, torch.tensor([token])).tolist())
        assert len(own) == 132
        assert set(changed.tolist()) <= own
        assert len(changed) >= 128  # the poison is NaN, which no code is

    check()


@pytest.mark.parametrize("hadamard", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_kernels_write_what_the_reference_writes(world, device, form, dtype, hadamard):
    """Bit for bit, from prompts and steps."""
    made = {"keys": form, "dtype": dtype, "hadamard": hadamard, "dim": 128, "pages": 2}
    worlds = [world("reference", "cpu", **made), world("triton", device, **made)]
    for w in worlds:
        for slot, length in enumerate((77, 63, 1)):
            w.prefill(slot, w.random(length), chunks=(min(10, length),))
        for _ in range(2):
            w.append([2, -1, 1], w.random(3))
    assert torch.equal(*(bits(w) for w in worlds))


@pytest.mark.parametrize("params", [{}, {"hadamard": True}, {"scale_format": "ue8m0"}])
def test_chunks_and_steps_give_the_bits_of_a_prompt(world, impl, device, form, params):
    @given(seed=st.integers(0, 99), cut=st.integers(0, 120), prompt=st.integers(60, 130))
    @settings(deadline=None, max_examples=5)
    def check(seed, cut, prompt):
        at_once, by_steps = (world(impl, device, keys=form, seed=seed, **params) for _ in range(2))
        keys = at_once.random(prompt + 3)
        at_once.prefill(0, keys)
        by_steps.prefill(0, keys[:prompt], chunks=(min(cut, prompt),))
        for key in keys[prompt:]:
            by_steps.append([-1, 0], torch.stack([by_steps.random(1)[0], key]))
        assert torch.equal(bits(at_once), bits(by_steps))

    check()


def test_rows_that_append_nothing_write_nothing(world, impl, device, form):
    w = world.filled(impl, device, keys=form)
    before = bits(w)
    w.rows([0, -1, 1])
    w.update(w.random(3))
    assert torch.equal(bits(w), before)
    w.rows([-1, -1, -1], appended=1)
    w.layer.step.appended.fill_(1)
    w.update(w.random(3))
    assert torch.equal(bits(w), before)
    w.construct(0, 250, w.random(0))
    assert torch.equal(bits(w), before)


def test_a_token_that_was_rejected_leaves_nothing(world, impl, device, form):
    w, fresh = (world(impl, device, keys=form, seed=3) for _ in range(2))
    keys, draft = w.random(70), w.random(5) * 9
    fresh.prefill(0, keys)
    w.prefill(0, torch.cat([keys[:65], draft]))
    w.construct(0, 65, keys[65:])
    assert torch.equal(bits(w), bits(fresh))


def test_keys_may_lie_at_any_stride(world, impl, device, form):
    w, fresh = (world(impl, device, keys=form, seed=4) for _ in range(2))
    keys = w.random(40)
    wide = torch.full((40, 3, w.dim), torch.nan, dtype=keys.dtype, device=device)
    wide[:, 1] = keys.to(device)
    w.indexer.construct(w.layer, 0, 0, wide[:, 1:2], wide, wide, wide)
    fresh.prefill(0, keys)
    assert torch.equal(bits(w), bits(fresh))
    apart = torch.full((3, 1, 2 * w.dim), torch.nan, dtype=keys.dtype, device=device)
    apart[:, 0, ::2] = keys[:3].to(device)
    for each, given_keys in ((w, apart[..., ::2]), (fresh, keys[:3, None].to(device))):
        each.rows([0, 1, 2])
        each.layer.step.lengths.fill_(41)
        each.layer.step.appended.fill_(1)
        each.indexer.update(each.layer, given_keys[:, None], given_keys[:, None])
    assert torch.equal(bits(w), bits(fresh))


@pytest.mark.parametrize(
    ("kept", "dtype", "expected"),
    [
        ("fp8", torch.bfloat16, 132),
        ("fp8", torch.float32, 132),
        ("bf16", torch.bfloat16, 256),
        ("bf16", torch.float16, 256),
        ("bf16", torch.float32, 512),
    ],
)
def test_bytes_of_a_token(world, kept, dtype, expected):
    """Counted from the tensors, and from what a prompt of 64 tokens changes."""
    w = world("reference", "cpu", keys=kept, dtype=dtype, dim=128)
    (spec,) = w.indexer.spec().representations
    assert (spec.name, spec.grain, spec.bytes) == ("index", "token", expected)
    assert w.pool.numel() * w.pool.element_size() == expected * w.pool.shape[0]
    page = slice(int(w.table[0, 0]) * 64, int(w.table[0, 0]) * 64 + 64)
    w.pool.view(torch.uint8).fill_(0)
    w.prefill(0, w.random(64))
    outside = bits(w)
    inside = int((outside[page] != 0).sum())
    outside[page] = 0
    assert not outside.any()
    assert 0.9 * 64 * expected < inside <= 64 * expected
