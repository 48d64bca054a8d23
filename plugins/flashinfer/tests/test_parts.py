"""The backend around the documented library: what the conformance kit does not ask."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from attrs import evolve
from documented import documented
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv.types import GroupShape, ModelShape, Tables
from topkv_flashinfer import latent
from topkv_testing.backend.bench import columns_of
from topkv_testing.backend.plans import AdaptCase, StepInputs
from topkv_testing.oracle import attention
from topkv_testing.strategies import Geometry

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="where there is a CUDA device nothing is interpreted"
)

MODEL = ModelShape(1, 4, 2, 64, torch.float16, 64**-0.5)
GROUP = GroupShape((0,), 4, 1, 2, 64, torch.float16, 16, 4, 99, 4, 8, 2)


@pytest.fixture(autouse=True)
def _room(monkeypatch):
    """No multiprocessors to ask for."""
    monkeypatch.setattr(latent, "workspace", lambda device: torch.zeros(1, device=device))


def rows_backend(heads, unit, select=3, lanes=4, most=1):
    model = ModelShape(1, heads, 1, 576, torch.float16, 576**-0.5, "mla", 512)
    group = GroupShape(
        *((0,), unit, 1, 1, 576, torch.float16, 64, lanes, 4096, select, 2 * select, 4), planes=1
    )
    return documented(model, group, "cpu", lanes, most)


@pytest.mark.parametrize(("softcap", "scale"), [(50.0, 0.1), (50.0, 20.0), (0.5, 20.0)])
def test_capped_logits(softcap, scale):
    """Logits are of prompts, whole and by a selection, and of steps; plain ones reach hundreds."""
    model = evolve(MODEL, softcap=softcap, scale=scale)
    made, draw = documented(model, GROUP, "cpu", 2), torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, 64, generator=draw).half()
        for rows, heads in ((5, 4), (16, 2), (16, 2))
    )
    for keep in (None, torch.ones(5, 16, dtype=torch.bool)):
        out, lse = torch.full((5, 4, 64), torch.nan), torch.full((5, 4), torch.nan)
        made._prompts(q, k, v, 9, 0, keep, out, lse)
        seen = torch.arange(16)[None] <= torch.arange(5)[:, None] + 9
        want, log = attention(q, k, v, scale, seen, softcap)
        torch.testing.assert_close(out.double(), want, rtol=2e-3, atol=2e-3)
        torch.testing.assert_close(lse.double(), log, rtol=1e-4, atol=1e-4)
    pools = [each.view(4, 4, 2, 64).transpose(1, 2).contiguous() for each in (k, v)]
    tables = Tables(torch.arange(4, dtype=torch.int32)[None], torch.tensor([15]).int())
    out = torch.full((1, 1, 4, 64), torch.nan, dtype=torch.float16)
    lse = torch.full((1, 1, 4), torch.nan)
    made.attend(q[:1][None], *pools, tables, out, lse)
    want, log = attention(q[:1], k[:15], v[:15], scale, softcap=softcap)
    torch.testing.assert_close(out[0].double(), want, rtol=2e-3, atol=2e-3)
    torch.testing.assert_close(lse[0].double(), log, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("unit", [1, 4])
def test_latent_lanes_of_any_length_call_after_call(unit):
    """And of any number of queries, in one instance; padding is NaN."""
    made, generator = rows_backend(3, unit, most=3), torch.Generator().manual_seed(0)

    @given(st.data(), st.lists(st.integers(0, 4 * unit), min_size=1, max_size=4))
    @settings(deadline=None, max_examples=15)
    def check(data, lengths):
        lanes, most = len(lengths), data.draw(st.integers(1, 3))
        counts = [data.draw(st.integers(1, most)) for _ in lengths]
        rows = torch.full((lanes * 9, 1, unit, 576), torch.nan, dtype=torch.float16)
        table = torch.full((lanes, 4), -(2**31), dtype=torch.int32)
        order = torch.randperm(len(rows), generator=generator).view(lanes, 9)
        q = torch.randn(lanes, most, 3, 576, generator=generator).half()
        lists = []
        for lane, length in enumerate(lengths):
            used = -(-length // unit)
            table[lane, :used] = order[lane, :used].int()
            tokens = torch.arange(length)
            rows[order[lane][tokens // unit], 0, tokens % unit] = torch.randn(
                length, 576, generator=generator
            ).half()
            lists.append(rows[order[lane][tokens // unit], 0, tokens % unit][:, None])
        out = torch.full((lanes, most, 3, 512), torch.nan, dtype=torch.float16)
        lse = torch.full((lanes, most, 3), torch.nan)
        sizes = torch.tensor(lengths, dtype=torch.int32)
        tables = Tables(table, sizes)
        if most > 1:
            tables.queries = torch.tensor(counts, dtype=torch.int32)
        made.attend(q, rows, rows, tables, out, lse)
        for (lane, mine), nth in product(enumerate(lists), range(most)):
            count = counts[lane]
            seen = mine[: max(len(mine) - (count - 1 - nth), 0) if nth < count else 0]
            if not len(seen):
                assert (out[lane, nth] == 0).all()
                assert (lse[lane, nth] == -torch.inf).all()
                continue
            want, log = attention(q[lane, nth][None], seen, seen[..., :512], 576**-0.5)
            got, norm = out[lane, nth][None].double(), lse[lane, nth][None].double()
            torch.testing.assert_close(got, want, rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(norm, log, rtol=1e-5, atol=1e-5)

    check()


@pytest.mark.parametrize("attend", ["mla", "gqa"])
@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("keys", [0, 1, 70])
def test_prompts(attend, selected, keys):
    generator = torch.Generator().manual_seed(3)
    if attend == "mla":
        made, heads, kv_heads, dim, out_dim = rows_backend(3, 1), 3, 1, 576, 512
    else:
        made = documented(MODEL, GROUP, "cpu", 2)
        heads, kv_heads, dim, out_dim = 4, 2, 64, 64
    q = torch.randn(9, heads, dim, generator=generator).half()
    k = torch.randn(keys, kv_heads, dim, generator=generator).half()
    v = k[..., :out_dim] if attend == "mla" else torch.randn(k.shape, generator=generator).half()
    keep = torch.rand(9, keys, generator=generator) < 0.3
    keep[4] = False
    for q_start, k_start in ((61, 0), (200, 0), (50, 48), (3, 5), (3, 40)):
        rows, columns = q_start + torch.arange(9), k_start + torch.arange(keys)
        mask = columns[None] <= rows[:, None]
        mask = mask & keep if selected else mask
        out = torch.full((9, heads, out_dim), torch.nan)
        lse = torch.full((9, heads), torch.nan)
        if selected:
            made.prefill_selected(q, k, v, q_start, k_start, columns_of(keep), out, lse)
        else:
            made.prefill(q, k, v, q_start, k_start, out, lse)
        seen = mask.any(1)
        assert (out[~seen] == 0).all()
        assert (lse[~seen] == -torch.inf).all()
        if seen.any():
            want, log = attention(q, k, v, made_scale(dim), mask)
            torch.testing.assert_close(out[seen].double(), want[seen], rtol=2e-3, atol=2e-3)
            torch.testing.assert_close(lse[seen].double(), log[seen], rtol=1e-5, atol=1e-5)


def made_scale(dim):
    return dim**-0.5


@pytest.mark.parametrize("latent_rows", [False, True])
def test_an_adapted_table_is_attended_as_its_copy_is(latent_rows):
    """A plan may be made in between, which writes where the pages are."""
    if latent_rows:
        made, group = (
            rows_backend(3, 1),
            GroupShape(*((0,), 1, 1, 1, 576, torch.float16, 64, 4, 4096, 3, 6, 4), planes=1),
        )
        geometry, shape, out_dim = Geometry(1, 3, 576, 1, 1, "shared", group.dtype), (3, 576), 512
    else:
        made, group = documented(MODEL, GROUP, "cpu", 4), GROUP
        geometry, shape, out_dim = Geometry(2, 2, 64, 4, 1, "shared", group.dtype), (4, 64), 64
    generator = torch.Generator().manual_seed(2)
    slots = group.max_requests * group.slots
    pool = torch.randn(slots, group.heads_per_lane, 2, group.unit, shape[1], generator=generator)
    k, v = (pool.half()[:, :, plane] for plane in (0, 0 if latent_rows else 1))
    for requests, counts in (
        (((3, 30), (-1, 0), (1, 2)), (group.select, 2, 0)),  # no plan yet
        (((2, 9),), (1,)),  # nor one of this shape
        (((0, 5), (2, 30), (-1, 0)), (1, 2, 0)),
    ):
        lanes, sizes = len(requests), (group.select, group.buffer_slots, group.ring_slots)
        case = AdaptCase(geometry, requests, counts, *sizes, group.max_requests)
        inputs = StepInputs.empty(group, lanes, "cpu")
        case.fill(inputs)
        table = torch.full((lanes, group.select + 1), -7, dtype=torch.int32)
        lengths = torch.full((lanes,), -7, dtype=torch.int32)
        tables = Tables(table, lengths)
        made.adapt_page_table(inputs.view, inputs.plan, tables)
        case.check(table, lengths)
        assert tables.attached is not None
        q = torch.randn(lanes, 1, *shape, generator=generator).half()
        results = []
        for each in (tables, tables, Tables(table, lengths)):
            out = torch.full((lanes, 1, shape[0], out_dim), torch.nan).half()
            lse = torch.full((lanes, 1, shape[0]), torch.nan)
            made.attend(q, k, v, each, out, lse)
            results.append((out, lse))
        for out, lse in results:
            assert torch.equal(out, results[2][0])
            assert torch.equal(lse, results[2][1])
        assert len({float(lse.sum()) for lse in results[2][1]}) == lanes, "lanes are alike"


@pytest.mark.parametrize("lane_heads", [1, 2])
def test_rows_may_lie_apart(lane_heads):
    """An engine's rows have a stride of their own; the library writes contiguous outputs."""
    group = evolve(GROUP, lane_heads=lane_heads, heads_per_lane=2 // lane_heads)
    made, lanes = documented(MODEL, group, "cpu", 3), 3 * lane_heads
    generator = torch.Generator().manual_seed(1)
    pool = torch.randn(5 * lanes, 2 // lane_heads, 2, 4, 64, generator=generator).half()
    queries = torch.randn(3, 1, 4, 64, generator=generator).half()
    table = torch.arange(5 * lanes, dtype=torch.int32).view(lanes, 5)
    tables = Tables(table, torch.tensor([17, 0, 3, 20, 1, 8][:lanes], dtype=torch.int32))
    results = []
    for heads in (7, 4):
        q = torch.full((3, 1, heads, 64), torch.nan).half()
        q[:, :, :4], wide = queries, torch.full_like(q, 9.0)
        out, lse = wide[:, :, :4], torch.full((3, 1, 4), torch.nan)
        made.attend(q[:, :, :4], pool[:, :, 0], pool[:, :, 1], tables, out, lse)
        results.append((out.clone(), lse))
        assert (wide[:, :, 4:] == 9).all()
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])


def test_calls_beyond_the_workspace_are_refused():
    made = documented(MODEL, GROUP, "cpu", 2)
    lanes = torch.zeros(3, 1, 4, 64).half()
    pool = torch.zeros(4, 2, 4, 64).half()
    table, lengths = torch.zeros(3, 2, dtype=torch.int32), torch.ones(3, dtype=torch.int32)
    with pytest.raises(ValueError, match="3 lanes, and the workspace holds 2"):
        made.attend(lanes, pool, pool, Tables(table, lengths), lanes, torch.zeros(3, 1, 4))
    with pytest.raises(ValueError, match="lse must be contiguous"):
        made.attend(
            *(lanes[:2], pool, pool, Tables(table[:2], lengths[:2]), lanes[:2]),
            torch.zeros(4, 1, 2).transpose(0, 2)[:2],
        )
