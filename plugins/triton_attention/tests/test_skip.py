"""The option ``skip_softmax`` beside float64: what is left out, what it costs, and what stays."""

from __future__ import annotations

import math

import pytest
import torch
from attrs import evolve
from hypothesis import example, given
from hypothesis import strategies as st

from plugins.triton_attention.tests.skip_cases import SCALE, TILE, kept, make, skip_cases
from topkv.errors import CapabilityError
from topkv.hooks.backend import BackendSetup
from topkv.types import ModelShape
from topkv_skip_softmax.entry import SkipParams
from topkv_testing.backend.bench import make_backend
from topkv_testing.kit import examples, subject_of
from topkv_testing.strategies import Geometry
from topkv_testing.tiers import CUDA, tier
from topkv_triton_attention import skip_reference
from topkv_triton_attention.backend import TritonAttention
from topkv_triton_attention.reference import Attend

TIERS = [tier("cpu"), tier("gpu" if CUDA else "interpret")]
GEOMETRY = Geometry(1, 2, 64, 4, 1, "shared", torch.float32)
NEVER = 1e-300
"""A factor with which nothing is left out."""

on_all = pytest.mark.parametrize("where", TIERS, ids=str)


class Called:
    """``attend`` of a case, with the lengths of requests beside the table.

    Attributes:
        skipped: int32 ``[N * kv-heads, splits]`` of the last call, on the CPU.
    """

    def __init__(self, where, case, factor=None, softcap=None):
        heads = case.inputs.q.shape[2] * case.inputs.lane_heads
        group = heads // (case.inputs.lane_heads * len(case.each[0]))
        batch = len(case.contexts)
        factor = case.factor if factor is None else factor
        if where.impl == "reference":
            made = skip_reference.SkippingAttend(
                SCALE, batch, softcap, case.most, factor=factor, tile=TILE, splits=case.splits
            )
            self._attend = made
        else:
            from topkv_triton_attention import launch

            made = launch.SkippingDecoder(
                *(batch, heads, group, case.inputs.q.shape[-1], SCALE, where.device),
                launch.DecodeLaunch(TILE, 4, 2, 1), case.splits, softcap, case.most, factor=factor,
            )  # fmt: skip
            made.part.fill_(math.nan)
            made.part_lse.fill_(math.nan)
            self._attend = made.attend
        shape = (len(case.each) * len(case.each[0]), case.splits)
        made.skipped = torch.full(shape, -77, dtype=torch.int32, device=where.device)
        self.made, self.where, self.case = made, where, case

    def attend(self, q, k, v, tables, out, lse):
        contexts = torch.tensor(self.case.contexts, dtype=torch.int32, device=self.where.device)
        self._attend(q, k, v, evolve(tables, attached=contexts), out, lse)

    def __call__(self, case=None):
        """out ``[N * kv-heads * Q, G, D]`` and lse ``[N * kv-heads * Q, G]``, on the CPU."""
        case = case or self.case
        out, lse = case.inputs.attend(self, self.where.device)
        heads = len(self.case.each[0])
        self.skipped = self.made.skipped.cpu()
        rows = (each.unflatten(0, (-1, case.most)) for each in (out, lse))
        return tuple(x.unflatten(2, (heads, -1)).transpose(1, 2).flatten(0, 2) for x in rows)


@on_all
def test_what_is_left_out_and_what_is_attended_are_those_of_the_formula(where):
    """Values of what is left out are NaN and infinity, and so are rows of padding."""
    seen = []

    @examples(where, cpu=100, interpret=25, gpu=60)
    @given(case=skip_cases(most=4))
    @example(case=make(GEOMETRY, [400], [3000], 30.0, 1, 3, sizes=(0.05, 1.0, 2.0)))
    @example(case=make(GEOMETRY, [401], [3000], 300.0, 2, 4, "pages", (0.05, 1.0, 2.0), [3], 4))
    @example(case=make(GEOMETRY, [400], [3000], 300.0, 1, 4, sizes=(0.05, 1.0, 2.0)))
    def check(case):
        case.poison()
        call = Called(where, case)
        out, lse = call()
        case.expected().check(out, lse)
        assert torch.equal(call.skipped, case.counts)
        seen.append(int(case.counts.sum()))

    check()
    assert sum(seen) > 10, "nothing is left out, so nothing is shown"


@on_all
def test_with_a_factor_of_nothing_no_bit_changes(where):
    @examples(where, cpu=40, interpret=8, gpu=20)
    @given(case=skip_cases(most=3))
    def check(case):
        call = Called(where, case, NEVER)
        out, lse = call()
        assert not call.skipped.any()
        plain = Called(where, case)
        if where.impl == "reference":
            plain._attend = Attend(SCALE, len(case.contexts), None, case.most)
        else:
            from topkv_triton_attention.launch import Decoder

            plain._attend = lambda *args: Decoder.attend(plain.made, *args)
        expected, norm = plain()
        assert torch.equal(out, expected)
        assert torch.equal(lse, norm)
        assert bool((plain.made.skipped == -77).all())

    check()


@on_all
def test_what_is_left_out_has_little_weight(where):
    """Each key that is left out weighs less than lambda of the largest; all together weigh delta,
    and the error is 2 delta max|v| at most."""

    @examples(where, cpu=60, interpret=12, gpu=30)
    @given(case=skip_cases((torch.float32,)))
    def check(case):
        out, lse = Called(where, case)()
        results = zip(out.double(), lse.double(), strict=True)
        for lane, heads in enumerate(case.each):
            k, v = (x.double() for x in case.inputs.listed(lane))
            threshold = case.factor / case.contexts[lane // case.inputs.lane_heads]
            threshold = min(1.0, threshold)
            queries = case.inputs.q[lane, 0].double().unflatten(0, (len(heads), -1))
            for head in range(len(heads)):
                logits = queries[head] @ k[:, head].T * SCALE
                gone, (found, norm) = ~heads[head].tokens, next(results)
                if not len(k):
                    continue
                whole = logits.logsumexp(1)
                count = threshold * int(gone.sum())
                most = count / (1 + count)
                left = 1 - (norm - whole).exp()
                assert bool((left <= most + 1e-4).all()), f"{left} of the mass, {most} may go"
                truth = logits.softmax(1) @ v[:, head]
                size = float(v[:, head].norm(dim=1).max())
                error = (found - truth).norm(dim=1)
                assert bool((error <= 2 * most * size + 1e-4 * max(1.0, size)).all())

    check()


@on_all
def test_a_larger_factor_leaves_out_no_less(where):
    @examples(where, cpu=30, interpret=5, gpu=15)
    @given(seed=st.integers(0, 999), splits=st.sampled_from([1, 3]))
    def check(seed, splits):
        before, counts = None, []
        for factor in (1.0, 30.0, 300.0, 3000.0):
            case = make(GEOMETRY, [200], [3000], factor, splits, seed, sizes=(0.05, 1.0, 2.0))
            call = Called(where, case)
            call()
            now = call.skipped
            assert before is None or bool((before <= now).all())
            before = now
            counts.append(int(now.sum()))

    check()


@on_all
@pytest.mark.parametrize("splits", [2, 3, 7])
def test_splits_leave_out_a_part_of_what_one_run_would(where, splits):
    """The formula is compared token by token; the backend leaves out no more blocks."""
    fewer = 0
    for seed in range(12):
        sizes = (0.1, 1.0, 2.0)
        one, many = (
            make(GEOMETRY, [200], [400], 40.0, count, seed, sizes=sizes) for count in (1, splits)
        )
        (((whole,),), ((parts,),)) = one.each, many.each
        assert bool((whole.tokens <= parts.tokens).all())
        calls = [Called(where, case) for case in (one, many)]
        for call in calls:
            call()
        first, second = (int(call.skipped.sum()) for call in calls)
        assert second <= first
        fewer += second < first
    assert fewer, "splits change nothing here"


@on_all
def test_the_block_of_the_maximum_stays_whatever_the_factor(where):
    """The block is at every place in turn; lambda is at most 1."""
    for place in range(5):
        case = make(GEOMETRY, [5 * TILE], [100], 1e12, seed=place)
        keys, _ = case.inputs.views()
        slots, rows = case.inputs.tokens[0]
        mine = slice(place * TILE, place * TILE + TILE)
        keys[slots, :, rows] *= 0.01
        keys[slots[mine], :, rows[mine]] *= 3000.0
        q = case.inputs.q[0, 0]
        found = kept(q, case.inputs.listed(0)[0][:, 0], 1.0)
        assert bool(found.tokens[mine].all())
        case = evolve(case, each=[[found]])
        call = Called(where, case)
        out, lse = call()
        case.expected().check(out, lse)
        assert torch.equal(call.skipped, case.counts)


@on_all
@pytest.mark.parametrize("loud", [0, 1, 2])
def test_query_heads_of_a_kv_head_vote_together(where, loud):
    """A block that one query head needs stays for all."""
    geometry = Geometry(1, 3, 64, 4, 1, "shared", torch.float32)
    case = make(geometry, [3 * TILE], [100], 1.0)
    keys, _ = case.inputs.views()
    slots, rows = case.inputs.tokens[0]
    keys[slots, :, rows] = 0
    case.inputs.q[:] = 0
    for head in range(3):
        case.inputs.q[0, 0, head, head] = 10
    keys[slots[0], 0, rows[0], :3] = 10  # every head finds its maximum in the first block
    keys[slots[TILE], 0, rows[TILE], loud] = 10
    found = kept(case.inputs.q[0, 0], case.inputs.listed(0)[0][:, 0], 0.01)
    assert found.skipped == [1]
    assert bool(found.tokens[: 2 * TILE].all())
    case = evolve(case, each=[[found]])
    call = Called(where, case)
    out, lse = call()
    case.expected().check(out, lse)
    assert call.skipped.tolist() == [[1]]


@on_all
def test_each_row_goes_by_the_length_of_its_own_request(where):
    """Less is left out of the same keys in a row whose request is longer."""
    one = make(GEOMETRY, [12 * TILE], [100], 10.0, seed=3, sizes=(0.3, 1.0))
    twice = make(GEOMETRY, [12 * TILE] * 2, [100, 100_000], 10.0, seed=3, sizes=(0.3, 1.0))
    keys, values = twice.inputs.views()
    for lane in range(2):
        at = twice.inputs.tokens[lane]
        k, v = one.inputs.listed(0)
        keys[at[0], :, at[1]], values[at[0], :, at[1]] = k, v
    twice.inputs.q[:] = one.inputs.q
    call = Called(where, twice)
    call()
    short, long = call.skipped[:, 0].tolist()
    assert short == one.counts.item()
    assert short > long


@on_all
def test_capped_logits_are_compared(where):
    """A cap of 1 leaves no two logits further apart than 2, and lambda is less than exp(-2)."""
    case = make(GEOMETRY, [12 * TILE], [100], 5.0, seed=3, sizes=(0.3, 1.0))
    assert case.counts.sum() > 0
    call, plain = Called(where, case, softcap=1.0), Called(where, case, NEVER, softcap=1.0)
    (out, lse), (expected, norm) = call(), plain()
    assert not call.skipped.any()
    assert torch.equal(out, expected)
    assert torch.equal(lse, norm)


@on_all
def test_tables_without_lengths_are_attended_to_as_a_whole(where):
    case = make(GEOMETRY, [6 * TILE], [100], 50.0, sizes=(0.1, 1.0))
    assert case.counts.sum() > 0
    call = Called(where, case)
    call.attend = call._attend
    out, lse = call()
    every = evolve(case.each[0][0], tokens=torch.ones(6 * TILE, dtype=torch.bool))
    evolve(case, each=[[every]]).expected().check(out, lse)


@on_all
def test_the_option_reaches_what_attends(where):
    """``adapt_page_table`` also attaches lengths for it; without the option neither happens."""
    subject = subject_of("triton_attention", "backend", where)
    backend, model, group = make_backend(subject, GEOMETRY, 2)
    assert backend._adapt.__name__ == "adapt_page_table"
    setup = BackendSetup(model, group, where.device, 2, 2, {"skip_softmax": SkipParams(7.0)})
    made = subject.make(setup)
    assert made._adapt.__name__ == "_adapt_with_lengths"
    attend = made._attend
    skipping = attend if where.impl == "reference" else attend.__self__
    assert skipping.factor == 7.0 if where.impl == "reference" else skipping.factor_log2 > 2.8


def test_latent_rows_are_refused():
    model = ModelShape(1, 4, 1, 40, torch.float32, 0.2, "mla", 32)
    _, _, group = make_backend(subject_of("triton_attention", "backend", TIERS[0]), GEOMETRY, 2)
    setup = BackendSetup(model, group, TIERS[0].device, 2, 4, {"skip_softmax": SkipParams(1.0)})
    with pytest.raises(CapabilityError, match="skip_softmax: blocks of latent rows"):
        TritonAttention(setup)
