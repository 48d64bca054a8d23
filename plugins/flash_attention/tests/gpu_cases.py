"""Backends over the libraries that are installed, and inputs of them on a GPU."""

from __future__ import annotations

import pytest
import torch

from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape
from topkv_flash_attention import providers
from topkv_flash_attention.backend import FlashAttention
from topkv_testing.backend.bench import expect

CUDA = torch.cuda.is_available()
FOUND = list(providers.BUILDS.look()) if CUDA else []
LIBRARIES = {place: library for place, library, _ in FOUND if library}
MARKS = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.skipif(
        CUDA and not LIBRARIES, reason="; ".join(f"{place}: {why}" for place, _, why in FOUND)
    ),
]
EACH = pytest.mark.parametrize("place", list(LIBRARIES) or ["none"])
SCALE = 576**-0.5


def made(place, model, group, lanes, most=1):
    """The backend with this very library; skips where that does not take the shapes."""
    library = LIBRARIES[place]
    refusals = library.refusals(model, group, torch.cuda.get_device_capability())
    if refusals:
        pytest.skip("; ".join(refusals))
    sizes = (torch.device("cuda"), lanes, model.group_size)
    instance = FlashAttention(BackendSetup(model, group, *sizes, max_queries=most))
    instance.library = library
    return instance


def grouped(place, geometry, batch, most=1, **more):
    """A backend for a geometry of the kit, and of a model with ``more``."""
    g = geometry
    heads = g.kv_heads * g.group
    scale = more.pop("scale", 0.75 * g.dim**-0.5)
    model = ModelShape(1, heads, g.kv_heads, g.dim, g.dtype, scale, **more)
    group = GroupShape(
        *((0,), g.unit, g.lane_heads, g.kv_heads // g.lane_heads, g.dim, g.dtype),
        *(g.page_tokens, batch, 2**20, 8, 8, 2),
    )
    return made(place, model, group, batch, most), model


def latent(place, heads, unit=1, lanes=4, dtype=torch.bfloat16, most=1):
    model = ModelShape(1, heads, 1, 576, dtype, SCALE, "mla", 512)
    group = GroupShape(*((0,), unit, 1, 1, 576, dtype, 64, lanes, 4096, 64, 128, 4), planes=1)
    return made(place, model, group, lanes, most)


def results(lanes, heads, dim, dtype=torch.bfloat16, most=1):
    out = torch.full((lanes, most, heads, dim), torch.nan, dtype=dtype, device="cuda")
    return out, torch.full((lanes, most, heads), torch.nan, device="cuda")


def ragged(unit, lanes):
    """Lengths: none, one token, partial last units, whole ones, many."""
    some = (0, 1, unit, 2 * unit + unit // 2 + 1, 3000, 7 * unit, max(1, unit - 1), 999)
    return tuple(some[lane % len(some)] for lane in range(lanes))


def counts(rows, most):
    """Queries of each row: one, all, and between."""
    return [(1, most, max(1, most - 1), most, 2)[row % 5] for row in range(rows)]


def latent_case(heads, unit, lengths, seed=0, dtype=torch.bfloat16, most=1):
    """Rows in random slots, NaN where nothing is listed or behind a length; -1 in the table."""
    generator = torch.Generator().manual_seed(seed)
    used = [-(-length // unit) for length in lengths]
    stored = torch.full((sum(used) + 5, 1, unit, 576), torch.nan, dtype=dtype)
    table = torch.full((len(lengths), max(65, *used)), -1, dtype=torch.int32)
    order = torch.randperm(len(stored), generator=generator).int()
    for lane, (length, units) in enumerate(zip(lengths, used, strict=True)):
        mine, order = order[:units], order[units:]
        table[lane, :units] = mine
        fresh = torch.full((units * unit, 576), torch.nan)
        fresh[:length] = torch.randn(length, 576, generator=generator)
        stored[mine.long()] = fresh.view(units, 1, unit, 576).to(dtype)
    q = torch.randn(len(lengths), most, heads, 576, generator=generator).to(dtype)
    return q, stored, table


def check_latent(q, stored, table, lengths, unit, out, lse, queries=None):
    nth = torch.arange(q.shape[1])[:, None]
    for lane, length in enumerate(lengths):
        count = queries[lane] if queries else 1
        if length == 0:
            assert (out[lane] == 0).all()
            assert (lse[lane] == -torch.inf).all()
            continue
        units = table[lane, : -(-length // unit)].long()
        rows = stored[units].transpose(1, 2).flatten(0, 1)[:length]
        mask = torch.arange(length) < torch.where(nth < count, length - (count - 1 - nth), 0)
        expected = expect(q[lane].nan_to_num(), rows, rows[..., :512], SCALE, mask)
        expected.check(out[lane].cpu(), lse[lane].cpu())
