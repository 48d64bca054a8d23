"""Rows as the core hands them over, lanes as a library takes them.

The library itself runs on a device alone (``test_gpu``). Here something in its place refuses what
it refuses, and attends in float64 to the pages that the table names.
"""

from __future__ import annotations

import os

import pytest
import torch

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.errors import CapabilityError  # noqa: E402
from topkv.hooks.backend import BackendSetup  # noqa: E402
from topkv.types import GroupShape, ModelShape, Tables  # noqa: E402
from topkv_authoring.libraries import Places  # noqa: E402
from topkv_flash_attention import backend, providers  # noqa: E402
from topkv_flash_attention.hopper import GIVEN, SETTLED, FlashAttention3  # noqa: E402
from topkv_testing.backend.cases import AttendCase, by_lane  # noqa: E402
from topkv_testing.backend.queries import with_queries  # noqa: E402
from topkv_testing.oracle import attention  # noqa: E402
from topkv_testing.strategies import Geometry  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
MARKS = [pytest.mark.gpu] if CUDA else []
LENGTHS = (5, 0, 33, 16, 1, 40)
NAMES = (*GIVEN, *SETTLED)
ON = pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=MARKS)])


def seen(length, queries, nth):
    """Tokens that a query sees under a causal mask whose corner is at the bottom right."""
    return max(length - (queries - 1 - nth), 0)


def fwd(*values):
    """The operator ``fwd`` as its sources state it: a batch of single queries, or packed ones.

    What it need not write is NaN: rows of a sequence from ``seqused_q`` on, and the LSE of rows
    that see nothing. Of several queries without starts it would merge the parts of one sequence.
    """
    given = dict(zip(NAMES, values, strict=True))
    q, k, table, out = given["q"], given["k"], given["page_table"], given["out"]
    starts, used = given["cu_seqlens_q"], given["seqused_q"]
    lanes, most, unit = len(table), given["max_seqlen_q"], k.shape[1]
    for each in (starts, used, given["seqused_k"]):
        assert each is None or (each.is_contiguous() and each.dtype is torch.int32)
    assert (starts is None) == (used is None) == (not given["is_causal"]) == (most == 1)
    assert used is None or (len(used), len(starts)) == (lanes, lanes + 1)
    assert q.stride(-1) == out.stride(-1) == 1
    if starts is None:
        starts, used = torch.arange(lanes + 1), torch.ones(lanes, dtype=torch.int32)
        q, out = q[:, 0], out[:, 0]
    assert q.shape == out.shape
    assert int(starts[-1]) == len(q)
    out.fill_(torch.nan)
    lse = torch.full((q.shape[1], len(q)), torch.nan, device=q.device)
    for lane, length in enumerate(given["seqused_k"].tolist()):
        units = table[lane, : -(-length // unit)].long()
        rows = [each[units].flatten(0, 1)[:length] for each in (k, given["v"])]
        count, first = int(used[lane]), int(starts[lane])
        for nth in range(count):
            end = seen(length, count, nth)
            if end:
                row = first + nth
                few = (each[:end] for each in rows)
                values, log = attention(q[row][None], *few, given["softmax_scale"])
                out[row], lse[:, row] = values[0].to(out.dtype), log[0].float()
    if most > 1:
        return given["out"], lse
    return given["out"], lse.T.unsqueeze(-1)


class Pages:
    """Contract of ``FlashAttention3.attend``, one lane at a time, in memory of its own.

    Of what sees no tokens both results are NaN.
    """

    name = "documented"

    def refusals(self, model, group, capability):
        return []

    def attend(
        self, q, k, v, table, lengths, scale, softcap, splits, zeros, out, counts=None
    ):  # fmt: skip
        lanes, most, heads, _ = q.main.shape
        assert (len(table), len(zeros)) == (lanes, lanes)
        assert (counts is None) == (most == 1)
        assert out.shape == (lanes, most, heads, v.shape[-1])
        assert q.main.stride(-1) == out.stride(-1) == 1
        result = torch.full_like(out, torch.nan, memory_format=torch.contiguous_format)
        lse = torch.full((lanes, most, heads), torch.nan, device=out.device)
        for lane, length in enumerate(lengths.tolist()):
            units = table[lane, : -(-length // k.shape[2])].long()
            rows = [each[units].transpose(1, 2).flatten(0, 1)[:length] for each in (k, v)]
            count = 1 if counts is None else int(counts.queries[lane])
            for nth in range(count):
                end = seen(length, count, nth)
                if end:
                    few = (each[:end] for each in rows)
                    values, log = attention(q.main[lane, nth][None], *few, scale)
                    result[lane, nth], lse[lane, nth] = values[0].to(out.dtype), log[0].float()
        return result, lse


class Operator(FlashAttention3):
    """``FlashAttention3`` over ``fwd``, for any device."""

    def refusals(self, model, group, capability):
        return []


DOUBLES = {
    "writes to out": lambda: Operator("documented", fwd, NAMES, SETTLED),
    "returns its own": Pages,
}


def made(monkeypatch, double, scope, batch, device, most=1):
    """A backend over a double, with its geometry and model."""
    geometry = Geometry(2, 3, 64, 16, 1, scope, torch.float16)
    model = ModelShape(1, 6, 2, 64, torch.float16, 0.1)
    group = GroupShape(
        *((0,), 16, geometry.lane_heads, 2 // geometry.lane_heads, 64, torch.float16, 16),
        *(batch, 2**20, 8, 8, 2),
    )
    monkeypatch.setattr(providers, "BUILDS", Places("", {"double": DOUBLES[double]}))
    monkeypatch.setattr(backend, "_refusals", lambda _: [])
    sizes = (torch.device(device), batch, model.group_size)
    setup = BackendSetup(model, group, *sizes, max_queries=most)
    return backend.FlashAttention(setup), geometry, model


@ON
@pytest.mark.parametrize("most", [1, 4])
@pytest.mark.parametrize("double", DOUBLES)
@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize("scope", ["shared", "kv_head"])
def test_rows_of_any_stride(scope, apart, double, most, device, monkeypatch):
    """Rows have other numbers of queries, more than a lane has tokens among them."""
    batch = len(LENGTHS) // (2 if scope == "kv_head" else 1)
    instance, geometry, model = made(monkeypatch, double, scope, batch, device, most)
    inputs = AttendCase(geometry, LENGTHS, spare=2).make()
    tables = Tables(inputs.table.to(device), inputs.lengths.to(device))
    if most > 1:
        inputs = with_queries(inputs, [(4, 1, 3, 2, 4, 1)[row] for row in range(batch)], most)
        tables.queries = inputs.queries.to(device)
    k, v = (each.to(device) for each in inputs.views())
    shape = (batch, most, 6 + apart, 64)
    wide = torch.full(shape, torch.nan, dtype=torch.float16, device=device)
    rows = inputs.q.unflatten(0, (-1, geometry.lane_heads)).transpose(1, 2).flatten(2, 3)
    wide[:, :, :6] = rows.to(device)
    results = torch.full_like(wide, -77)
    out, lse = results[:, :, :6], torch.full((batch, most, 6), torch.nan, device=device)
    for _ in range(2):  # scratch of the first call
        instance.attend(wide[:, :, :6], k, v, tables, out, lse)
    got = (by_lane(each, geometry.lane_heads).cpu() for each in (out, lse))
    inputs.expected(model.scale).check(*got)
    assert (results[:, :, 6:] == -77).all(), "wrote between rows"


@ON
def test_outputs_whose_queries_lie_apart_are_copied(device, monkeypatch):
    """Such as a packed sequence cannot show."""
    instance, geometry, model = made(monkeypatch, "writes to out", "shared", 6, device, 2)
    inputs = with_queries(AttendCase(geometry, LENGTHS).make(), [2, 1, 2, 2, 1, 2], 2)
    k, v = (each.to(device) for each in inputs.views())
    results = torch.full((6, 3, 6, 64), -77, dtype=torch.float16, device=device)
    out, lse = results[:, :2], torch.full((6, 2, 6), torch.nan, device=device)
    counts = inputs.queries.to(device)
    tables = Tables(inputs.table.to(device), inputs.lengths.to(device), queries=counts)
    instance.attend(inputs.q.to(device), k, v, tables, out, lse)
    inputs.expected(model.scale).check(*(each.flatten(0, 1).cpu() for each in (out, lse)))
    assert (results[:, 2] == -77).all(), "wrote between rows"


def test_more_queries_than_were_announced_are_refused(monkeypatch):
    instance, geometry, _ = made(monkeypatch, "returns its own", "shared", 6, "cpu", 2)
    inputs = with_queries(AttendCase(geometry, LENGTHS).make(), [3] * 6, 3)
    tables = Tables(inputs.table, inputs.lengths, queries=inputs.queries)
    out, lse = torch.empty_like(inputs.q), torch.empty(6, 3, 6)
    with pytest.raises(CapabilityError, match="made for 2 queries a row"):
        instance.attend(inputs.q, *inputs.views(), tables, out, lse)
