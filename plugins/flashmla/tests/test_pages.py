"""Layers that take the library's dense decode, and the arguments of that.

The library itself runs on a device alone (``test_pages_gpu``). Here something in its place refuses
what it refuses, and attends in float64 to the pages that the table names.
"""

from __future__ import annotations

import os
from itertools import product

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from plugins.flashmla.tests.page_cases import PageCase, setup_of, shapes  # noqa: E402
from topkv.errors import CapabilityError  # noqa: E402
from topkv.types import Tables  # noqa: E402
from topkv_authoring.libraries import Places  # noqa: E402
from topkv_flashmla import backend, providers  # noqa: E402
from topkv_flashmla.support import attends_by_pages  # noqa: E402
from topkv_testing.oracle import attention  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
MARKS = [pytest.mark.gpu] if CUDA else []
ON = pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=MARKS)])


@pytest.mark.parametrize(
    ("expected", "changes"),
    [
        (True, {}),
        (False, {"residency": "streamed"}),
        (False, {"residency": "sparse"}),
        (False, {"page": 32}),
        (False, {"page": 128}),
        (False, {"fp8": True}),
    ],
)
def test_resident_pages_of_64_model_rows_take_it(expected, changes):
    assert attends_by_pages(shapes(16, 2, **changes)[1]) is expected


class Holder:
    """Scheduler metadata: the lengths that it was filled from."""

    lengths = None


def dense_decode(
    q, cache, table, lengths, value_dim, holder,
    *, softmax_scale, is_fp8_kvcache, use_legacy, causal=False,
):  # fmt: skip
    """Contract of the library's dense decode as its source states it; under its causal mask the
    last query of a lane sees all of its tokens.

    Queries that see nothing give +inf as log-sum-exp. Their output is 0 in the library and NaN
    here.
    """
    lanes, queries, heads, dim = q.shape
    assert use_legacy
    assert not is_fp8_kvcache
    assert (dim, value_dim) == (576, 512)
    assert causal == (queries > 1)
    assert not q.isnan().any()
    assert cache.shape[1:] == (64, 1, 576)
    assert cache.dtype is q.dtype is torch.bfloat16
    assert q.is_contiguous()
    assert cache.stride(-1) == table.stride(-1) == 1
    assert table.dtype is lengths.dtype is torch.int32
    assert table.shape[0] == lanes
    assert lengths.shape == (lanes,)
    assert lengths.is_contiguous()
    if holder.lengths is None:
        holder.lengths = lengths.tolist()
    assert holder.lengths == lengths.tolist(), "it would use the lengths of another call"
    out = torch.full((lanes, queries, heads, 512), torch.nan, dtype=q.dtype, device=q.device)
    lse = torch.full((lanes, heads, queries), torch.inf, device=q.device)
    for lane, nth in product(range(lanes), range(queries)):
        length = int(lengths[lane]) - (queries - 1 - nth)
        if length > 0:
            pages = table[lane, : -(-length // 64)].long()
            rows = cache[pages].flatten(0, 1)[:length]
            values, log = attention(q[lane, nth][None], rows, rows[..., :512], softmax_scale)
            out[lane, nth], lse[lane, :, nth] = values[0].bfloat16(), log[0].float()
    return out, lse


@pytest.fixture
def made(monkeypatch):
    """Backends over ``dense_decode``, on any device."""

    def sparse(*_, **__):
        raise AssertionError("the sparse kernel was called")

    found = providers.Provider("double", dense_decode, sparse, Holder, {"use_legacy": True})
    monkeypatch.setattr(providers, "BUILDS", Places("", {"double": lambda: found}))
    monkeypatch.setattr(backend, "refusals", lambda *_: [])

    def make(heads, lanes, most=1):
        return backend.FlashMLA(setup_of(heads, lanes, DEVICE, most))

    return make


@ON
@pytest.mark.parametrize("heads", [3, 16])
def test_what_the_library_is_handed(made, device, heads):
    """One instance serves all: a holder that outlived its call would be met by other lengths."""
    serves = made(heads, 4)
    for seed, lengths in enumerate([(64, 0, 65, 1), (0, 63, 130, 64), (2, 0)]):
        case = PageCase.make(heads, lengths, width=5, pages=9, seed=seed)
        q, pool, table, counts = (x.to(device) for x in case.inputs)
        out, lse = case.results(device)
        serves.attend(q, pool, pool, Tables(table, counts), out, lse)
        case.check(out, lse)


@ON
@pytest.mark.parametrize(("queries", "most"), [((), 1), ((3, 1, 4), 4), ((2, 2, 1), 2)])
def test_rows_that_lie_apart(made, device, queries, most):
    """Rows are of a fused projection. The library gets contiguous ones, and its last query sees
    all tokens of a lane, whatever number of queries that has."""
    case = PageCase.make(3, (64, 0, 65), width=5, pages=9, queries=queries, most=most)
    q, pool, table, counts = (x.to(device) for x in case.inputs)
    wide = torch.full((3, most, 5, 576), torch.nan, dtype=q.dtype, device=device)
    wide[:, :, :3] = q
    results = torch.full((3, most, 5, 512), -77.0, dtype=q.dtype, device=device)
    out, lse = results[:, :, :3], case.results(device)[1]
    tables = Tables(table, counts)
    if most > 1:
        tables.queries = case.queries.to(device)
    made(3, 3, 4).attend(wide[:, :, :3], pool, pool, tables, out, lse)
    case.check(out, lse)
    assert (results[:, :, 3:] == -77).all()


@ON
def test_no_workspace_of_the_sparse_kernels(made, device):
    """Dense layers no longer need indices of 32768 tokens for each lane."""
    serves = made(16, 2)
    assert not hasattr(serves, "indices")
    assert not hasattr(serves, "queries")
    assert not hasattr(serves, "shifted")


@ON
def test_more_queries_than_were_announced_are_refused(made, device):
    case = PageCase.make(3, (9, 9), width=2, pages=4, queries=(3, 3), most=3)
    q, pool, table, counts = (x.to(device) for x in case.inputs)
    tables = Tables(table, counts, queries=case.queries.to(device))
    with pytest.raises(CapabilityError, match="made for 2 queries a row"):
        made(3, 2, 2).attend(q, pool, pool, tables, *case.results(device))


@ON
def test_lanes_beyond_the_batch_are_refused(made, device):
    serves = made(16, 2)
    case = PageCase.make(16, (1, 1, 1), width=2, pages=4)
    q, pool, table, counts = (x.to(device) for x in case.inputs)
    with pytest.raises(ValueError, match=r"3 lanes.*made for 2.*max_requests"):
        serves.attend(q, pool, pool, Tables(table, counts), *case.results(device))
