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

from topkv.hooks.backend import BackendSetup  # noqa: E402
from topkv.types import GroupShape, ModelShape, Tables  # noqa: E402
from topkv_authoring.libraries import Places  # noqa: E402
from topkv_flash_attention import backend, providers  # noqa: E402
from topkv_testing.backend.cases import AttendCase, by_lane  # noqa: E402
from topkv_testing.oracle import attention  # noqa: E402
from topkv_testing.strategies import Geometry  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
MARKS = [pytest.mark.gpu] if CUDA else []
LENGTHS = (5, 0, 33, 16, 1, 40)


class Pages:
    """Contract of ``FlashAttention3.attend``, one lane at a time.

    Of lanes without tokens both results are NaN. ``places``: it can write to ``out``.
    """

    name = "documented"

    def __init__(self, places):
        self.places = places

    def refusals(self, model, group, capability):
        return []

    def attend(self, q, k, v, table, lengths, scale, softcap, splits, zeros, out):
        lanes, queries, heads, _ = q.main.shape
        assert (queries, len(table), len(zeros)) == (1, lanes, lanes)
        assert out.shape == (lanes, 1, heads, v.shape[-1])
        assert q.main.stride(-1) == out.stride(-1) == 1
        result = out if self.places else torch.empty_like(out)
        result.fill_(torch.nan)
        lse = torch.full((lanes, heads), torch.nan, device=out.device)
        for lane, length in enumerate(lengths.tolist()):
            if length:
                units = table[lane, : -(-length // k.shape[2])].long()
                rows = [each[units].transpose(1, 2).flatten(0, 1)[:length] for each in (k, v)]
                values, log = attention(q.main[lane], *rows, scale)
                result[lane], lse[lane] = values.to(out.dtype), log[0].float()
        return result, lse


@pytest.mark.parametrize("device", [pytest.param(DEVICE, marks=MARKS)])
@pytest.mark.parametrize("places", [True, False], ids=["writes to out", "returns its own"])
@pytest.mark.parametrize("apart", [0, 3])
@pytest.mark.parametrize("scope", ["shared", "kv_head"])
def test_rows_of_any_stride(scope, apart, places, device, monkeypatch):
    geometry = Geometry(2, 3, 64, 16, 1, scope, torch.float16)
    batch = len(LENGTHS) // geometry.lane_heads
    model = ModelShape(1, 6, 2, 64, torch.float16, 0.1)
    group = GroupShape(
        *((0,), 16, geometry.lane_heads, 2 // geometry.lane_heads, 64, torch.float16, 16),
        *(batch, 2**20, 8, 8, 2),
    )
    builds = Places("", {"double": lambda: Pages(places)})
    monkeypatch.setattr(providers, "BUILDS", builds)
    monkeypatch.setattr(backend, "_refusals", lambda _: [])
    setup = BackendSetup(model, group, torch.device(device), batch, model.group_size)
    made = backend.FlashAttention(setup)
    inputs = AttendCase(geometry, LENGTHS, spare=2).make()
    k, v = (each.to(device) for each in inputs.views())
    wide = torch.full((batch, 1, 6 + apart, 64), torch.nan, dtype=torch.float16, device=device)
    wide[:, :, :6] = inputs.q.view(batch, 1, 6, 64)
    results = torch.full_like(wide, -77)
    out, lse = results[:, :, :6], torch.full((batch, 1, 6), torch.nan, device=device)
    tables = Tables(inputs.table.to(device), inputs.lengths.to(device))
    made.attend(wide[:, :, :6], k, v, tables, out, lse)
    got = (by_lane(each, geometry.lane_heads).cpu() for each in (out, lse))
    inputs.expected(model.scale).check(*got)
    assert (results[:, :, 6:] == -77).all(), "wrote between rows"
