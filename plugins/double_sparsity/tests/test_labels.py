"""Labels of keys: channels bit for bit, or 4-bit codes within half a scale."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv_double_sparsity import reference
from topkv_testing.kit import examples

DTYPES = [torch.bfloat16, torch.float16, torch.float32]
FLOATS = st.floats(-65000, 65000, width=32) | st.floats(-(2.0**-20), 2.0**-20, width=32)


def half_a_scale(x, decoded, scale):
    """Return True if each channel is off by half a scale at most, but for the rounding of fp32."""
    slack = 2.0**-22 * x.double().abs().amax(-1, keepdim=True)
    return ((x.double() - decoded).abs() <= scale.double() / 2 + slack).all()


@given(
    seed=st.integers(0, 999),
    large=st.sets(st.integers(0, 15), max_size=7),
    bias=st.floats(50, 1000, width=32),
)
def test_large_channels_leave_the_others_their_codes(seed, large, bias):
    generator = torch.Generator().manual_seed(seed)
    keys = torch.rand(40, 16, generator=generator) * 2 - 1
    keys[0], keys[1] = -1, 1
    shifted = keys.clone()
    shifted[:, [*large]] = bias + keys[:, [*large]] * bias / 10
    ranges = reference.ranges(shifted.amin(0), shifted.amax(0))
    shift, divisor = ranges.unbind(-1)
    others = sorted(set(range(16)) - large)
    assert (shift[others] == 0).all()
    assert (divisor[others] == 1).all()
    assert (torch.frexp(divisor).mantissa == 0.5).all()
    narrowed = reference.narrowed(shifted, ranges)
    assert narrowed.abs().amax() <= 2 * (1 + 2.0**-20)
    codes, meta = reference.quantize(narrowed)
    read = reference.dequantize(codes, meta, 16).double() * divisor + shift
    off = (read - shifted).abs()
    assert off[:, others].amax() <= 4 / 15 / 2 + 2.0**-9
    assert (off <= divisor * (4 / 15 / 2 + 2.0**-9)).all()


def test_ordinary_keys_are_coded_as_they_are():
    keys = torch.randn(500, 3, 32, generator=torch.Generator().manual_seed(0))
    for rows in (keys, keys[:1], torch.zeros_like(keys)):
        ranges = reference.ranges(rows.amin(0), rows.amax(0))
        ordinary = ranges == torch.tensor([0.0, 1.0])
        # One key alone may have a channel that is large beside its others; nothing divides it.
        assert ordinary.all() if len(rows) > 1 else ordinary[..., 1].all()


@given(rows=st.lists(st.lists(FLOATS, min_size=5, max_size=5), min_size=1, max_size=4))
def test_a_code_is_off_by_half_a_scale_at_most(rows):
    for width in (1, 2, 5):
        x = torch.tensor(rows)[:, :width]
        codes, meta = reference.quantize(x)
        assert codes.shape == (len(rows), (width + 1) // 2)
        scale, zero = meta[:, :1].double(), meta[:, 1:].double()
        nibbles = torch.cat([codes % 16, codes // 16], -1)[:, :width]
        decoded = nibbles.double() * scale + zero
        assert half_a_scale(x, decoded, scale)
        # No wider than needed: what the range of fp16 zero and scale costs is a rounding each.
        span = (x.double().amax(-1) - x.double().amin(-1))[:, None]
        largest = x.double().abs().amax(-1)[:, None]
        assert (scale * 15 <= span + 2.0**-9 * (largest + span) + 2.0**-19).all()
        exact = reference.dequantize(codes, meta, width).double()
        assert ((exact - decoded).abs() <= 2.0**-22 * (zero.abs() + 15 * scale)).all()


def test_channels_that_are_alike_and_saturated_ones():
    codes, meta = reference.quantize(torch.tensor([[0.5, 0.5], [-0.0, 0.0], [1e9, -1e9]]))
    assert meta.isfinite().all()
    assert reference.dequantize(codes, meta, 2)[:2].tolist() == [[0.5, 0.5], [0.0, 0.0]]
    assert meta[:2, 0].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_whole_labels_are_the_channels_bit_for_bit(bench, tier, dtype):
    b = bench(tier, dtype=dtype, channels=5, label="bf16")
    keys = b.case.tokens(0)[:9]
    tiny = torch.finfo(dtype).smallest_normal
    keys[3], keys[4], keys[5] = tiny / 4, -0.0, -tiny / 2
    b.prefill(0, keys[:6])
    b.extend(0, keys[6:])
    channels = b.chosen_channels(0)
    expected = torch.stack([keys[:, head, channels[head]] for head in range(2)], 1)
    stored = b.stored(0)["labels"]
    assert stored.dtype is dtype
    assert torch.equal(stored.view(torch.uint8), expected.contiguous().view(torch.uint8))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("channels", [5, 8])
def test_packed_labels_are_those_of_the_reference(bench, tier, dtype, channels):
    @examples(tier, cpu=15, interpret=3)
    @given(seed=st.integers(0, 999), power=st.integers(-12, 8), bias=st.sampled_from([100.0, 0.0]))
    def check(seed, power, bias):
        b = bench(tier, dtype=dtype, channels=channels, label="int4", seed=seed)
        keys = torch.randn(11, 2, 16, generator=b.case.generator(1))
        keys = (keys + bias * (torch.arange(16) == seed % 16)) * 2.0**power
        keys[2], keys[3, :, :9], keys[4] = 0.0, -0.0, keys[4, :, :1]
        keys = keys.to(dtype)
        b.prefill(0, keys[:8], cuts=(3,))
        b.extend(0, keys[8:])
        picked = reference.gather(keys, b.chosen_channels(0)[None])
        ranges = b.algorithm.ranges(b.layer)[0].cpu()
        narrowed = reference.narrowed(picked, ranges)
        codes, meta = reference.quantize(narrowed)
        stored = b.stored(0)
        assert torch.equal(stored["labels"], codes)
        assert torch.equal(stored["meta"].view(torch.int16), meta.view(torch.int16))
        decoded = b.labels(0) / ranges[..., 1].double()
        assert half_a_scale(narrowed, decoded, stored["meta"][..., :1])

    check()


@pytest.mark.parametrize("label", ["bf16", "int4"])
@pytest.mark.parametrize("channels", [4, 7])
def test_bytes_of_a_token_are_those_of_the_readme(bench, tier, label, channels):
    b = bench(tier, dtype=torch.bfloat16, label=label, channels=channels, kv_heads=3)
    specs = [spec for spec in b.spec.representations if spec.grain == "token"]
    per_token = sum(b.pools[spec.name].nbytes / len(b.pools[spec.name]) for spec in specs)
    each = 2 * channels if label == "bf16" else math.ceil(channels / 2) + 4
    assert per_token == 3 * each


def test_non_contiguous_keys_and_rows_that_move(bench, tier):
    b, twin = bench(tier, channels=4), bench(tier, channels=4)
    keys = b.case.tokens(0)[:8]
    for one in (b, twin):
        one.prefill(0, keys[:6])
    staged = b.stage([-1, 0], keys[[6, 6]])
    wide = torch.full((2, 2, 32), torch.nan, device=b.device)
    wide[..., ::2] = staged
    b.update(wide[..., ::2])
    twin.append([0], keys[6:7])
    assert torch.equal(b.stored(0)["labels"], twin.stored(0)["labels"])
