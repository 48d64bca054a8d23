"""``attend`` over latent rows: both formats, every implementation, against float64."""

from __future__ import annotations

import math
from itertools import product

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.triton_attention.tests.latent_cases import (
    NAN_CODES,
    NUMBERS,
    LatentCase,
    latent_cases,
    unpack,
    with_queries,
)
from plugins.triton_attention.tests.making import made
from topkv.errors import CapabilityError
from topkv_authoring.latent_fp8 import encode_fp8
from topkv_testing.kit import examples
from topkv_testing.tiers import CUDA, Tier, tier
from topkv_triton_attention import reference
from topkv_triton_attention.mla_reference import LatentShape

KERNELS = tier("gpu" if CUDA else "interpret")
TIERS = [tier("cpu"), KERNELS]
if CUDA:
    TIERS.append(Tier("gpu", "reference", torch.device("cuda"), None))
PLAIN = LatentCase("model", torch.float32, 3, 32, 8, 1, (5, 0, 40))
PACKED = LatentCase("fp8", torch.bfloat16, 3, 512, 64, 1, (5, 0, 40))

every_tier = pytest.mark.parametrize("where", TIERS, ids=str)
both_formats = pytest.mark.parametrize("case", [PLAIN, PACKED], ids=["model", "fp8"])


@every_tier
def test_attends_to_the_listed_rows(where):
    @examples(where, cpu=100, interpret=60)
    @given(latent_cases())
    def check(case):
        case.check(case.backend(where.impl, where.device), where.device)

    check()


@every_tier
def test_each_query_sees_what_stands_before_it(where):
    @examples(where, cpu=100, interpret=30)
    @given(with_queries(latent_cases()))
    def check(case):
        case.check(case.backend(where.impl, where.device), where.device)

    check()


@every_tier
@both_formats
@pytest.mark.parametrize("unit", [1, 2, 64, 128])
def test_ragged_lengths(where, case, unit):
    """No, one, all but one, all tokens of a unit, and one more; more columns than used."""
    lengths = (0, 1, max(unit - 1, 1), unit, unit + 1, 2 * unit + unit // 2 + 1)
    case = evolve(case, unit=unit, lengths=lengths, spare=3)
    case.check(case.backend(where.impl, where.device), where.device)


@every_tier
@both_formats
@pytest.mark.parametrize("heads", [1, 16, 64, 128])
def test_any_number_of_heads(where, case, heads):
    case = evolve(case, heads=heads, lengths=(37, 0))
    case.check(case.backend(where.impl, where.device), where.device)


@every_tier
@both_formats
def test_order_of_units_and_lanes_does_not_matter(where, case):
    case = evolve(case, unit=2, lengths=(40, 0, 13))
    inputs = case.make()
    moved = evolve(inputs, table=inputs.table.clone())
    moved.table[0, :20] = moved.table[0, :20].flip(0)
    moved.table[2, :6] = moved.table[2, :6].roll(1)
    order = [2, 0, 1]
    moved.q, moved.table = moved.q[order], moved.table[order]
    moved.lengths, moved.listed = moved.lengths[order], [inputs.listed[lane] for lane in order]
    case.check(case.backend(where.impl, where.device), where.device, moved)


@every_tier
def test_large_logits_do_not_overflow(where):
    @examples(where, cpu=30, interpret=10)
    @given(latent_cases(size=100.0))
    def check(case):
        case.check(case.backend(where.impl, where.device), where.device)

    check()


@every_tier
@both_formats
def test_serves_call_after_call_of_any_batch(where, case):
    backend = case.backend(where.impl, where.device, 4)
    for seed, batch in enumerate((3, 3, 1, 4, 2)):
        lengths = tuple((7 * seed + 31 * lane) % 90 for lane in range(batch))
        evolve(case, lengths=lengths, seed=seed).check(backend, where.device)
    empty = evolve(case, lengths=()).backend(where.impl, where.device, 4)
    inputs = case.make()
    inputs.q, inputs.table, inputs.lengths = inputs.q[:0], inputs.table[:0], inputs.lengths[:0]
    inputs.attend(empty, where.device, case.latent)


@every_tier
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_every_code_means_its_number(where, dtype):
    """Attention to one token alone gives its latents as they are."""
    codes = torch.arange(256, dtype=torch.uint8).repeat(2)
    for code in NAN_CODES:
        codes[codes == code] = 0
    scale = 2.0 ** torch.tensor([-13, 0, 3, -1]).float()
    rope = torch.zeros(128, dtype=torch.uint8)
    case = evolve(PACKED, dtype=dtype, lengths=(1,))
    inputs = case.make()
    inputs.pool[inputs.table[0, 0], 1, 0] = torch.cat([codes, scale.view(torch.uint8), rope])
    out, _ = inputs.attend(case.backend(where.impl, where.device), where.device, 512)
    wanted = NUMBERS[codes.long()] * scale.double().repeat_interleave(128)
    assert torch.equal(out[0].double(), wanted.expand(3, -1))


def test_rows_that_the_core_packs_are_those_of_the_oracle():
    """The largest error of e4m3 is half its last bit: 2 ** -4 of the value, or of the scale."""
    rows = torch.randn(50, 576, dtype=torch.float64) * 3
    got = unpack(encode_fp8(rows.float()))
    assert bool(((got - rows).abs()[:, :512] <= rows.abs()[:, :512] / 16 + 2**-10).all())
    assert torch.equal(got[:, 512:], rows[:, 512:].float().bfloat16().double())


@pytest.mark.sampled(3)
@both_formats
@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("heads", [3, 20])
@pytest.mark.parametrize("most", [1, 3])
def test_splits_of_any_number_agree(case, splits, heads, most):
    from topkv_triton_attention.mla_launch import LatentDecoder, LatentLaunch

    case = evolve(case, heads=heads, lengths=(0, 1, 17, 100), spare=9, seed=splits, most=most)
    case = evolve(case, queries=(1, 1, 3, 2) if most > 1 else ())
    model, group = case.shapes
    launch = LatentLaunch(16, 16, num_warps=4, num_stages=2, resident=1)
    shape = LatentShape.of(model, group)
    decoder = LatentDecoder(
        *(4, heads, shape, model.dtype, model.scale, KERNELS.device, launch, splits, most)
    )
    decoder.part.fill_(math.nan)
    decoder.part_lse.fill_(math.nan)
    case.check(decoder, KERNELS.device)


@settings(deadline=None, max_examples=50)
@given(
    st.integers(1, 300),
    st.integers(1, 130),
    st.integers(1, 2**17),
    st.sampled_from((2, 4)),
    st.integers(1, 8),
)
def test_workspace_holds_every_call(lanes, heads, tokens, itemsize, most):
    from topkv_triton_attention.mla_launch import LatentDecoder

    dtype = torch.bfloat16 if itemsize == 2 else torch.float32
    shape = LatentShape(32, 8)
    device = torch.device("cpu")
    decoder = LatentDecoder(lanes, heads, shape, dtype, 1.0, device, max_queries=most)
    for some, queries in product(range(1, lanes + 1), range(1, most + 1)):
        splits = decoder.split_count(some, tokens, queries)
        if splits > 1:
            assert some * heads * queries * splits <= decoder.part_lse.numel()
            assert some * heads * queries * splits * 32 <= decoder.part.numel()


@both_formats
@pytest.mark.parametrize("budget", [1, 3000])
def test_reference_in_pieces(monkeypatch, case, budget):
    monkeypatch.setattr(reference, "BUDGET", budget)
    for queries, most in (((), 1), ((3, 2, 1), 3)):
        case = evolve(case, unit=2, queries=queries, most=most)
        case.check(case.backend("reference", torch.device("cpu")), "cpu")


@every_tier
@both_formats
def test_refuses_what_it_does_not_offer(where, case):
    backend = case.backend(where.impl, where.device, 3)
    good = case.make()
    two, many = good.q.expand(-1, 2, -1, -1), good.q.repeat(2, 1, 1, 1)
    for changed, error, reason in (
        ({"q": two}, CapabilityError, "made for 1 queries a row"),
        ({"pool": good.pool.double()}, CapabilityError, r"uint8|share a dtype"),
        ({"q": many}, ValueError, "max_batch"),
    ):
        with pytest.raises(error, match=reason):
            evolve(good, **changed).attend(backend, where.device, case.latent)


@pytest.mark.parametrize(
    ("case", "model", "group", "reason"),
    [
        (PLAIN, {"value_dim": 600, "head_dim": 600}, {"head_dim": 600}, "latent rows: expected"),
        (PLAIN, {"head_dim": 200}, {"head_dim": 200}, "latent rows: expected"),
        (PLAIN, {}, {"head_dim": 48}, "row: expected 40 elements"),
        (PLAIN, {}, {"dtype": torch.float16}, "row dtype"),
        (PLAIN, {"dtype": torch.float64}, {"dtype": torch.float64}, "dtype: expected float16"),
        (PLAIN, {}, {"lane_heads": 2}, "one kv-head"),
        (PLAIN, {}, {"unit": 48}, "unit"),
        (PACKED, {"head_dim": 544}, {}, "fp8 rows"),
        (PACKED, {}, {"head_dim": 576}, "row: expected 656"),
    ],
)
def test_refuses_with_the_reason(case, model, group, reason):
    shapes = case.shapes
    changed = evolve(shapes[0], **model), evolve(shapes[1], **group)
    with pytest.raises(CapabilityError, match=reason) as caught:
        made(*changed, "reference", torch.device("cpu"), 1)
    assert len(caught.value.reasons) == 1
