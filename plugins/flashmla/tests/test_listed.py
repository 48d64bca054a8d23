"""Arguments of the library's sparse kernel: indices, and queries in the shape that it takes.

The library itself runs on a device alone (``test_gpu``). Here something in its place refuses what
it refuses, and attends in float64 to the rows that the indices name.
"""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch
from attrs import evolve

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.hooks.backend import BackendSetup  # noqa: E402
from topkv.types import GroupShape, ModelShape, Tables  # noqa: E402
from topkv_authoring.libraries import Places  # noqa: E402
from topkv_flashmla import backend, providers  # noqa: E402
from topkv_testing.backend.bench import columns_of  # noqa: E402
from topkv_testing.backend.plans import AdaptCase, StepInputs  # noqa: E402
from topkv_testing.oracle import attention  # noqa: E402
from topkv_testing.strategies import Geometry  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
ON = pytest.mark.parametrize(
    "device", [pytest.param(DEVICE, marks=[pytest.mark.gpu] if CUDA else [])]
)
HEADS, SELECT, BUFFER, RING, REQUESTS, SCALE, MOST = 3, 5, 8, 4, 4, 0.03, 4


def sparse(q, rows, indices, scale, topk_length=None):
    """Contract of ``flash_mla_sparse_fwd`` as its source states it; +inf for empty lanes."""
    if topk_length is not None:
        assert (topk_length > 0).all()
        behind = torch.arange(indices.shape[2], device=q.device) >= topk_length[:, None]
        assert (indices[:, 0][behind] == -1).all()
    lanes, heads, dim = q.shape
    assert (heads, dim, rows.shape[1:]) == (64, 576, (1, 576))
    assert q.is_contiguous()
    assert q.dtype is rows.dtype is torch.bfloat16
    assert indices.dtype is torch.int32
    assert (len(indices), indices.shape[1], indices.shape[2] % 128) == (lanes, 1, 0)
    out = torch.full((lanes, heads, 512), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full((lanes, heads), torch.inf, device=q.device)
    for lane, listed in enumerate(indices[:, 0]):
        mine = rows[listed[listed >= 0].long()]
        if len(mine):
            values, log = attention(q[lane : lane + 1], mine, mine[..., :512], scale)
            out[lane], lse[lane] = values[0].bfloat16(), log[0].float()
    return out, None, lse


def group_of(unit):
    return GroupShape(
        *((0,), unit, 1, 1, 576, torch.bfloat16, 64, REQUESTS, 256, SELECT, BUFFER, RING),
        planes=1,
    )


@pytest.fixture
def make(monkeypatch):
    """A backend over ``sparse``, for a unit and a device."""
    found = providers.Provider("double", None, sparse, None)
    monkeypatch.setattr(providers, "BUILDS", Places("", {"double": lambda: found}))
    monkeypatch.setattr(backend, "refusals", lambda _: [])
    model = ModelShape(1, HEADS, 1, 576, torch.bfloat16, SCALE, "mla", 512)
    return lambda unit, device: backend.FlashMLA(
        BackendSetup(model, group_of(unit), torch.device(device), 3, HEADS, max_queries=MOST)
    )


@ON
@pytest.mark.parametrize("apart", [0, 2])
@pytest.mark.parametrize("unit", [1, 16])
@pytest.mark.parametrize("most", [1, MOST])
def test_rows_of_the_table_are_attended(make, unit, apart, most, device):
    """Indices are those written along with the table, or those that ``attend`` makes; rows have
    other numbers of queries."""
    geometry = Geometry(1, HEADS, 576, unit, 1, "shared", torch.bfloat16)
    made, random = make(unit, device), torch.Generator().manual_seed(0)
    slots = REQUESTS * (BUFFER + RING)
    pool = torch.randn(slots, 1, unit, 576, generator=random).bfloat16()
    for seed, requests in enumerate((((2, 40), (-1, 0), (0, 7)), ((1, 9),), ((3, 1), (2, 90)))):
        lanes = len(requests)
        counts = tuple((seed + 3 * lane) % (SELECT + 1) for lane in range(lanes))
        sizes = (SELECT, BUFFER, RING, REQUESTS)
        queries = tuple(
            max(1, min(most, length) - row) for row, (_, length) in enumerate(requests)
        )
        case = AdaptCase(
            *(geometry, requests, counts, *sizes), seed=seed, queries=queries, most=most
        )
        inputs = StepInputs.empty(group_of(unit), lanes, device)
        case.fill(inputs)
        tables = Tables(
            torch.full((lanes, case.width), -7, dtype=torch.int32, device=device),
            torch.full((lanes,), -7, dtype=torch.int32, device=device),
            attached="of the step before",
        )
        if most > 1:
            tables.queries = torch.tensor(queries, dtype=torch.int32, device=device)
        made.adapt_page_table(inputs.view, inputs.plan, tables)
        case.check(tables.table, tables.lengths)
        assert (tables.attached is None) == (unit > 1 or most > 1)
        wide = torch.randn(lanes, most, HEADS + apart, 576, generator=random).bfloat16().to(device)
        q, rows = wide[:, :, :HEADS], pool.to(device)
        for given in (tables, evolve(tables, attached=None)):
            shape = (lanes, most, HEADS + apart, 512)
            results = torch.full(shape, -77.0, device=device).bfloat16()
            out, lse = results[:, :, :HEADS], torch.full(q.shape[:3], -77.0, device=device)
            made.attend(q, rows, rows, given, out, lse)
            assert (results[:, :, HEADS:] == -77).all(), "wrote between rows"
            for (lane, listed), nth in product(enumerate(case.lanes()), range(most)):
                mine = [pool[slot, 0, :count] for slot, count in listed]
                if not mine or nth >= queries[lane]:
                    assert (out[lane, nth] == 0).all()
                    assert (lse[lane, nth] == -torch.inf).all()
                    continue
                keys = torch.cat(mine)[:, None]
                keys = keys[: len(keys) - (queries[lane] - 1 - nth)]
                query = q[lane, nth][None].cpu()
                want, log = attention(query, keys, keys[..., :512], SCALE)
                got, norm = out[lane, nth][None].cpu(), lse[lane, nth][None].cpu().double()
                torch.testing.assert_close(got, want.bfloat16(), rtol=0.01, atol=1e-3)
                torch.testing.assert_close(norm, log, rtol=1e-5, atol=1e-5)


@ON
@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_prompts(make, selected, dtype, device, monkeypatch):
    """A prompt is more than a block of rows, some of which see nothing."""
    monkeypatch.setattr(backend, "PROMPT_ROWS", 4)
    made, random = make(1, device), torch.Generator().manual_seed(0)
    q = torch.randn(9, HEADS, 576, generator=random).bfloat16()
    k = torch.randn(20, 1, 576, generator=random).bfloat16()
    keep = torch.rand(9, 20, generator=random) < 0.3
    keep[4] = False
    for q_start, k_start in ((11, 0), (30, 0), (5, 8), (0, 40)):
        rows, columns = q_start + torch.arange(9), k_start + torch.arange(20)
        mask = columns[None] <= rows[:, None]
        mask = mask & keep if selected else mask
        wide = torch.full((9, HEADS * 512 + 8), -77.0, dtype=dtype, device=device)
        out = wide[:, :-8].unflatten(1, (HEADS, 512))
        lse = torch.full((9, HEADS), torch.nan, device=device)
        given = (q.to(device), k.to(device), k[..., :512].to(device), q_start, k_start)
        if selected:
            made.prefill_selected(*given, columns_of(keep).to(device), out, lse)
        else:
            made.prefill(*given, out, lse)
        assert (wide[:, -8:] == -77).all()
        seen = mask.any(1)
        assert (out.cpu()[~seen] == 0).all()
        assert (lse.cpu()[~seen] == -torch.inf).all()
        if seen.any():
            want, log = attention(q, k, k[..., :512], SCALE, mask)
            got, norm = out.cpu()[seen].double(), lse.cpu()[seen].double()
            torch.testing.assert_close(got, want[seen], rtol=0.01, atol=1e-3)
            torch.testing.assert_close(norm, log[seen], rtol=1e-5, atol=1e-5)
