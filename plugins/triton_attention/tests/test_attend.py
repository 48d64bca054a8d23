"""``attend`` of both implementations against a float64 oracle over explicit token ids."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from topkv.errors import CapabilityError
from topkv.types import GroupShape, ModelShape
from topkv_triton_attention import reference
from topkv_triton_attention.backend import TritonAttention

CUDA = torch.cuda.is_available()
TARGETS = [("reference", "cpu"), ("triton", "cuda" if CUDA else "cpu")]
if CUDA:
    TARGETS.append(("reference", "cuda"))
DTYPES = (torch.float16, torch.bfloat16, torch.float32)


def shapes(dim, group, unit, kv_heads, lane_heads, dtype, scale=None):
    """A model and a group whose sizes matter to the backend only as far as it checks them."""
    heads = kv_heads * group
    model = ModelShape(1, heads, kv_heads, dim, dtype, scale or dim**-0.5)
    per_lane = kv_heads // lane_heads
    return model, GroupShape((0,), unit, lane_heads, per_lane, dim, dtype, 128, 4, 99, 8, 8, 2)


class Case:
    """Random inputs; all that ``lengths`` does not cover is NaN in k and v, garbage in table."""

    def __init__(self, *, unit, group, dim, dtype, kv_heads, lengths, spare, layout, seed):
        torch.manual_seed(seed)
        lanes = len(lengths)
        self.unit, self.lengths = unit, lengths
        used = [-(-length // unit) for length in lengths]
        width = max(1, *used) + spare
        slots = sum(used) + 3
        order = torch.randperm(slots).tolist()
        trash = torch.tensor([-1, -(2**31), 2**31 - 1, slots, 0])
        self.table = trash[torch.randint(0, 5, (lanes, width))].int()
        self.ids = []
        for lane, count in enumerate(used):
            mine = [order.pop() for _ in range(count)]
            self.ids.append(mine)
            self.table[lane, :count] = torch.tensor(mine, dtype=torch.int32)
        nan = float("nan")
        self.layout = layout
        if layout == "buffer":
            self.pools = [torch.full((slots, kv_heads, 2, unit, dim), nan, dtype=dtype)]
        else:  # k and v in separate places, the tokens of a head far apart
            self.pools = [
                torch.full((slots, unit, kv_heads, dim + 8), nan, dtype=dtype),
                torch.full((kv_heads, slots, unit, dim), nan, dtype=dtype),
            ]
        self.k, self.v = self.views("cpu")
        for lane in range(lanes):
            for slot, place in self.tokens(lane):
                self.k[slot, :, place] = torch.randn(kv_heads, dim).to(dtype)
                self.v[slot, :, place] = torch.randn(kv_heads, dim).to(dtype)
        heads = kv_heads * group
        self.q = (2 * torch.randn(lanes, heads, 1, dim)).to(dtype).transpose(1, 2)

    def views(self, device):
        """k and v ``[slots, kv_heads, unit, dim]``, with equal strides on every device."""
        pools = [pool.to(device) for pool in self.pools]
        if self.layout == "buffer":
            return pools[0][:, :, 0], pools[0][:, :, 1]
        dim = pools[1].shape[-1]
        return pools[0][..., :dim].permute(0, 2, 1, 3), pools[1].transpose(0, 1)

    def tokens(self, lane):
        """(slot, place in the unit) of each token of a lane."""
        return [
            (self.ids[lane][token // self.unit], token % self.unit)
            for token in range(self.lengths[lane])
        ]

    def expected(self, scale, dtype):
        """out and lse with products, weights and sums rounded to ``dtype``."""
        lanes, _, heads, dim = self.q.shape
        group = heads // self.k.shape[1]
        out = torch.zeros(lanes, 1, heads, dim, dtype=dtype)
        lse = torch.full((lanes, 1, heads), -math.inf, dtype=dtype)
        for lane in range(lanes):
            where = self.tokens(lane)
            if not where:
                continue
            for head in range(heads):
                k = torch.stack([self.k[slot, head // group, place] for slot, place in where])
                v = torch.stack([self.v[slot, head // group, place] for slot, place in where])
                logits = k.to(dtype) @ self.q[lane, 0, head].to(dtype) * scale
                lse[lane, 0, head] = torch.logsumexp(logits, 0)
                out[lane, 0, head] = torch.softmax(logits, 0) @ v.to(dtype)
        return out, lse


def run(attend, case, device):
    q, table = case.q.to(device), case.table.to(device)
    lengths = torch.tensor(case.lengths, dtype=torch.int32, device=device)
    out = torch.full(case.q.shape, math.nan, dtype=case.q.dtype, device=device)
    lse = torch.full(case.q.shape[:3], math.nan, device=device)
    attend(q, *case.views(device), table, lengths, out, lse)
    return out.cpu(), lse.cpu()


def check(case, scale, out, lse):
    """Error at most twice that of torch in the same dtype, and a few roundings."""
    dtype = case.q.dtype
    true_out, true_lse = case.expected(scale, torch.float64)
    rough_out, _ = case.expected(scale, dtype)
    _, rough_lse = case.expected(scale, torch.float32)
    empty = true_lse == -math.inf
    assert torch.equal(lse == -math.inf, empty)
    assert not out[empty].any()
    assert not out.isnan().any()
    assert not lse.isnan().any()
    if empty.all():
        return
    live = ~empty
    size = max(1.0, true_out.abs().max().item())
    # Weights move by as much as a few fp32 roundings of their logits.
    logit = 8 * torch.finfo(torch.float32).eps * max(1.0, true_lse[live].abs().max().item())
    allowed = 2 * (rough_out.double() - true_out).abs().max()
    allowed += (torch.finfo(dtype).eps + logit) * size
    assert (out.double() - true_out).abs().max() <= allowed
    allowed = 2 * (rough_lse.double() - true_lse)[live].abs().max() + logit
    assert (lse.double() - true_lse)[live].abs().max() <= allowed


@st.composite
def cases(draw):
    unit = draw(st.sampled_from((1, 2, 16, 64, 128)))
    kv_heads = draw(st.sampled_from((1, 1, 2, 3)))
    longest = max(2 * unit + 1, 150) if kv_heads == 1 else max(unit + 1, 70)
    length = st.one_of(st.sampled_from((0, 1, unit)), st.integers(0, longest))
    return Case(
        unit=unit,
        group=draw(st.integers(1, 16)),
        dim=draw(st.sampled_from((64, 96, 128, 256))),
        dtype=draw(st.sampled_from(DTYPES)),
        kv_heads=kv_heads,
        lengths=draw(st.lists(length, min_size=1, max_size=3)),
        spare=draw(st.integers(0, 200 // unit)),
        layout=draw(st.sampled_from(("buffer", "apart"))),
        seed=draw(st.integers(0, 2**16)),
    )


def backend_for(case, impl, device):
    kv_heads, unit, dim = case.k.shape[1:]
    group = case.q.shape[2] // kv_heads
    model, shape = shapes(dim, group, unit, kv_heads, 1, case.q.dtype)
    return TritonAttention(model, shape, impl, torch.device(device), len(case.lengths))


@pytest.mark.parametrize(("impl", "device"), TARGETS)
def test_equals_the_oracle(impl, device):
    @settings(deadline=None, max_examples=60, suppress_health_check=list(HealthCheck))
    @given(case=cases())
    def inner(case):
        backend = backend_for(case, impl, device)
        check(case, backend.model.scale, *run(backend.attend, case, device))

    inner()


@pytest.mark.parametrize("splits", [1, 2, 5])
@pytest.mark.parametrize("unit", [1, 16])
def test_splits_of_any_number_agree(unit, splits):
    from topkv_triton_attention.launch import DecodeLaunch, Decoder

    case = Case(
        unit=unit, group=4, dim=64, dtype=torch.bfloat16, kv_heads=1,
        lengths=[0, 1, 17, 100], spare=9, layout="buffer", seed=splits,
    )  # fmt: skip
    device = torch.device(TARGETS[1][1])
    launch = DecodeLaunch(block=16, num_warps=4, num_stages=2, resident=1)
    decoder = Decoder(4, 4, 4, 64, 0.3, device, launch, splits)
    decoder.part.fill_(math.nan)
    decoder.part_lse.fill_(math.nan)
    check(case, 0.3, *run(decoder.attend, case, device))


@pytest.mark.parametrize("budget", [1, 3000])
def test_reference_in_pieces(monkeypatch, budget):
    monkeypatch.setattr(reference, "BUDGET", budget)
    case = Case(
        unit=2, group=2, dim=64, dtype=torch.float32, kv_heads=2,
        lengths=[31, 0, 9, 40], spare=3, layout="apart", seed=0,
    )  # fmt: skip
    backend = backend_for(case, "reference", "cpu")
    check(case, backend.model.scale, *run(backend.attend, case, "cpu"))


@pytest.mark.parametrize(("impl", "device"), TARGETS)
def test_a_lane_per_kv_head(impl, device):
    """Lanes of one request are rows of one q; their tables differ."""
    case = Case(
        unit=16, group=4, dim=64, dtype=torch.float16, kv_heads=1,
        lengths=[33, 16, 0, 40], spare=1, layout="buffer", seed=3,
    )  # fmt: skip
    model, group = shapes(64, 4, 16, 2, 2, torch.float16)
    backend = TritonAttention(model, group, impl, torch.device(device), 2)
    packed = case.q.reshape(2, 8, 64)
    case.q = packed.view(2, 2, 4, 64).flatten(0, 1)[:, None]
    check(case, model.scale, *run(backend.attend, case, device))


@pytest.mark.parametrize(("impl", "device"), TARGETS)
def test_refuses_what_it_does_not_offer(impl, device):
    case = Case(
        unit=1, group=1, dim=64, dtype=torch.float32, kv_heads=1,
        lengths=[3, 2], spare=0, layout="buffer", seed=0,
    )  # fmt: skip
    backend = backend_for(case, impl, device)
    q = case.q
    case.q = q.expand(2, 2, 1, 64)
    with pytest.raises(CapabilityError, match="one query per lane"):
        run(backend.attend, case, device)
    case.q = q.half()
    with pytest.raises(CapabilityError, match="share a dtype"):
        run(backend.attend, case, device)
    case.q = q.expand(2, 1, 1, 64).repeat(2, 1, 1, 1)
    with pytest.raises(ValueError, match="max_batch"):
        run(backend.attend, case, device)


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 4096), st.integers(1, 2**17), st.integers(1, 800), st.sampled_from((16, 64)))
def test_split_count(programs, tokens, slots, block):
    from topkv_triton_attention.launch import MAX_SPLITS, MAX_WAVES, split_count

    splits = split_count(programs, tokens, slots, block)
    blocks = -(-tokens // block)
    assert 1 <= splits <= min(MAX_SPLITS, blocks)
    assert splits == 1 or programs * splits <= MAX_WAVES * slots
    run_of = -(-blocks // splits)
    assert (splits - 1) * run_of < blocks, "a split without tokens"


@settings(deadline=None, max_examples=30)
@given(st.integers(1, 64), st.sampled_from((1, 8)), st.integers(1, 16), st.integers(1, 2**17))
def test_workspace_holds_every_call(lanes, kv_heads, group, tokens):
    from topkv_triton_attention.launch import Decoder, decode_launch, split_count

    decoder = Decoder(lanes, kv_heads * group, group, 64, 1.0, torch.device("cpu"))
    launch = decode_launch(64, 16, 2)
    slots = decoder.processors * launch.resident
    for some in range(1, lanes + 1):
        splits = split_count(some * kv_heads, tokens, slots, launch.block)
        if splits > 1:
            assert some * kv_heads * group * splits <= decoder.part_lse.numel()
