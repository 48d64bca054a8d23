"""The real libraries on a real GPU, against float64: each one that is installed."""

from __future__ import annotations

import pytest
import torch

from plugins.flash_attention.tests.gpu_cases import (
    EACH,
    LIBRARIES,
    MARKS,
    SCALE,
    check_latent,
    grouped,
    latent,
    latent_case,
    ragged,
    results,
)
from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape, Tables
from topkv_flash_attention import backend as module
from topkv_flash_attention import providers
from topkv_flash_attention.backend import FlashAttention
from topkv_testing.backend.bench import columns_of, expect
from topkv_testing.backend.cases import AttendCase, by_lane
from topkv_testing.oracle import attention
from topkv_testing.strategies import Geometry
from topkv_testing.tolerance import assert_as_good

pytestmark = MARKS


@EACH
@pytest.mark.parametrize("scope", ["shared", "kv_head"])
@pytest.mark.parametrize("unit", [1, 16, 64, 256])
@pytest.mark.parametrize(("dim", "group"), [(64, 1), (64, 8), (128, 1), (128, 4), (128, 8)])
def test_decode_over_scattered_units(place, scope, unit, dim, group):
    """Unlisted units and columns behind the last one used hold NaN, -1 and worse."""
    geometry = Geometry(2, group, dim, unit, 1, scope, torch.bfloat16)
    batch = 8 // geometry.lane_heads
    instance, model = grouped(place, geometry, batch)
    for layout in ("buffer", "pages"):
        case = AttendCase(geometry, ragged(unit, 8), spare=5, layout=layout)
        inputs = case.make()
        inputs.expected(model.scale).check(*inputs.attend(instance, "cuda"))


@EACH
def test_float16(place):
    instance, model = grouped(place, Geometry(2, 4, 128, 16, 1, "shared", torch.float16), 8)
    inputs = AttendCase(Geometry(2, 4, 128, 16, 1, "shared", torch.float16), ragged(16, 8)).make()
    inputs.expected(model.scale).check(*inputs.attend(instance, "cuda"))


@EACH
@pytest.mark.parametrize(("softcap", "scale"), [(50.0, 0.0884), (50.0, 20.0), (0.5, 20.0)])
@pytest.mark.parametrize("dim", [128, 256])
def test_capped_logits(place, softcap, scale, dim):
    """Plain logits would reach hundreds where the scale is 20; dim 256 and 50 are Gemma 2's."""
    geometry = Geometry(2, 4, dim, 16, 1, "shared", torch.bfloat16)
    more = {"scale": scale, "softcap": softcap}
    instance, _ = grouped(place, geometry, 1, 4, **more)
    draw = torch.Generator("cuda").manual_seed(0)
    q, k, v = (
        torch.randn(rows, heads, dim, generator=draw, device="cuda", dtype=torch.bfloat16)
        for rows, heads in ((37, 8), (500, 2), (500, 2))
    )
    out = torch.full((37, 8, dim), torch.nan, device="cuda")
    lse = torch.full((37, 8), torch.nan, device="cuda")
    for shift in (463, 200):
        instance.prefill(q, k, v, shift, 0, out, lse)
        seen = torch.arange(500)[None] <= torch.arange(37)[:, None] + shift
        want, log = attention(q.cpu(), k.cpu(), v.cpu(), scale, seen, softcap)
        assert (out.cpu().double() - want).norm() <= 0.01 * want.norm()
        torch.testing.assert_close(lse.cpu().double(), log, rtol=1e-3, atol=1e-3)
    stored = torch.full((40, 2, 16, dim), torch.nan, dtype=torch.bfloat16, device="cuda")
    place_of = torch.randperm(40, generator=torch.Generator().manual_seed(1))[:32]
    rows = [torch.nn.functional.pad(each, (0, 0, 0, 0, 0, 12)) for each in (k, v)]
    pools = []
    for each in rows:
        pool = stored.clone()
        pool[place_of.cuda()] = each.view(32, 16, 2, dim).transpose(1, 2)
        pools.append(pool)
    table = place_of.int()[None].cuda()
    lengths = torch.tensor([500], dtype=torch.int32, device="cuda")
    for most in (1, 4):
        out, lse = results(1, 8, dim, most=most)
        queries = torch.tensor([most], dtype=torch.int32, device="cuda") if most > 1 else None
        tables = Tables(table, lengths, queries=queries)
        instance.attend(q[:most][None], *pools, tables, out, lse)
        seen = torch.arange(500) <= torch.arange(500 - most, 500)[:, None]
        want, log = attention(q[:most].cpu(), k.cpu(), v.cpu(), scale, seen, softcap)
        assert (out[0].cpu().double() - want).norm() <= 0.01 * want.norm()
        torch.testing.assert_close(lse[0].cpu().double(), log, rtol=1e-3, atol=1e-3)


@EACH
@pytest.mark.parametrize("lanes", [1, 300, 1100])
def test_any_batch(place, lanes):
    """Batches, split or not, exceed the 992 sequences that one scheduling kernel takes."""
    geometry = Geometry(1, 4, 128, 16, 1, "shared", torch.bfloat16)
    instance, model = grouped(place, geometry, lanes)
    inputs = AttendCase(geometry, tuple((97 * n + 31) % 90 for n in range(lanes)), 40).make()
    inputs.expected(model.scale).check(*inputs.attend(instance, "cuda"))


@EACH
@pytest.mark.parametrize("share", [1, 1 << 18])
def test_bounded_splits(place, share, monkeypatch):
    """The result does not depend on how many parts the library may make."""
    monkeypatch.setattr(module, "ACCUMULATORS", share)
    geometry = Geometry(2, 4, 128, 16, 1, "shared", torch.bfloat16)
    instance, model = grouped(place, geometry, 2)
    inputs = AttendCase(geometry, (5000, 77)).make()
    assert module._most_splits(2 * 8 * 128, 5008) in (1, 32)
    inputs.expected(model.scale).check(*inputs.attend(instance, "cuda"))


@EACH
@pytest.mark.parametrize("heads", [128, 64, 16, 5])
@pytest.mark.parametrize("unit", [1, 16, 64])
def test_latent_decode_over_scattered_rows(place, heads, unit):
    """Cases have 128 heads and units of 64 too, where TMA would bring what is behind a length."""
    instance, lengths = latent(place, heads, unit), (2048, 1, 0, 1000)
    q, stored, table = latent_case(heads, unit, lengths)
    out, lse = results(4, heads, 512)
    where = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    rows = stored.cuda()
    instance.attend(q.cuda(), rows, rows, Tables(table.cuda(), where), out, lse)
    check_latent(q, stored, table, lengths, unit, out, lse)


@EACH
def test_latent_replays_follow_lengths_and_tables(place):
    instance = latent(place, 128)
    first, then = (512, 3, 0, 77), (9, 0, 512, 300)
    cases = [latent_case(128, 1, lengths, seed) for lengths, seed in ((first, 0), (then, 5))]
    # Both cases in memory of one size.
    slots = max(len(stored) for _, stored, _ in cases)
    width = max(table.shape[1] for _, _, table in cases)
    q = torch.empty(4, 1, 128, 576, dtype=torch.bfloat16, device="cuda")
    rows = torch.full((slots, 1, 1, 576), torch.nan, dtype=torch.bfloat16, device="cuda")
    table = torch.full((4, width), -1, dtype=torch.int32, device="cuda")
    where = torch.zeros(4, dtype=torch.int32, device="cuda")
    out, lse = results(4, 128, 512)

    def decode():
        instance.attend(q, rows, rows, Tables(table, where), out, lse)

    decode()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for lengths, (queries, stored, listed) in zip((first, then), cases, strict=True):
        q.copy_(queries)
        rows[: len(stored)].copy_(stored)
        table[:, : listed.shape[1]].copy_(listed)
        where.copy_(torch.tensor(lengths))
        out.fill_(torch.nan)
        lse.fill_(torch.nan)
        graph.replay()
        check_latent(queries, stored, listed, lengths, 1, out, lse)


@EACH
@pytest.mark.parametrize("scope", ["shared", "kv_head"])
@pytest.mark.parametrize("unit", [1, 16, 256])
def test_decode_never_waits(place, scope, unit):
    """Nothing is moved to the host either: once compiled, decode is launches alone."""
    geometry = Geometry(2, 4, 128, unit, 1, scope, torch.bfloat16)
    instance, model = grouped(place, geometry, 8 // geometry.lane_heads)
    inputs = AttendCase(geometry, ragged(unit, 8)).make()
    k, v = (each.cuda() for each in inputs.views())
    batch, heads = 8 // geometry.lane_heads, 2 * geometry.group
    out, lse = results(batch, heads, geometry.dim)
    q = inputs.q.cuda().view(batch, 1, heads, geometry.dim)
    what = (q, k, v, Tables(inputs.table.cuda(), inputs.lengths.cuda()), out, lse)
    instance.attend(*what)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        instance.attend(*what)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got = (by_lane(each, geometry.lane_heads).cpu() for each in (out, lse))
    inputs.expected(model.scale).check(*got)


@EACH
@pytest.mark.parametrize("scope", ["shared", "kv_head"])
def test_outputs_whose_rows_lie_apart(place, scope):
    """Outputs are of a padded projection: nothing is written between rows."""
    geometry = Geometry(2, 4, 128, 16, 1, scope, torch.bfloat16)
    batch = 8 // geometry.lane_heads
    instance, model = grouped(place, geometry, batch)
    inputs = AttendCase(geometry, ragged(16, 8)).make()
    k, v = (each.cuda() for each in inputs.views())
    wide, lse = results(batch, 11, 128)
    wide.fill_(-77)
    out, lse = wide[:, :, :8], lse[:, :, :8]
    q = inputs.q.cuda().view(batch, 1, 8, 128)
    instance.attend(q, k, v, Tables(inputs.table.cuda(), inputs.lengths.cuda()), out, lse)
    got = (by_lane(each, geometry.lane_heads).cpu() for each in (out, lse))
    inputs.expected(model.scale).check(*got)
    assert (wide[:, :, 8:] == -77).all()


def prompt(place, kind, unit):
    """Instance, and functions that draw queries and keys with their values."""
    if kind == "latent":
        instance, heads, kv_heads, dim = latent(place, 16, unit, 1), 16, 1, 576
    else:
        geometry = Geometry(2, 4, 128, unit, 1, "shared", torch.bfloat16)
        (instance, _), heads, kv_heads, dim = grouped(place, geometry, 1), 8, 2, 128
    generator = torch.Generator().manual_seed(3)

    def draw(rows, keys):
        q = torch.randn(rows, heads, dim, generator=generator).bfloat16()
        pair = torch.randn(keys, kv_heads, 2, dim, generator=generator).bfloat16()
        k, v = pair.unbind(2)
        return q, k, k[..., :512] if kind == "latent" else v

    return instance, draw


CHUNKS = (
    *((130, 130, 7, 7), (130, 70, 30, 5), (3, 270, 500, 0), (40, 50, 10, 0), (40, 50, 0, 15)),
    *((200, 200, 0, 199), (9, 20, 3, 40), (1, 1, 6, 6), (5, 0, 9, 3)),
)


@EACH
@pytest.mark.parametrize("kind", ["grouped", "latent"])
@pytest.mark.parametrize("unit", [1, 256])
@pytest.mark.parametrize("selected", [True, False])
@pytest.mark.parametrize("own", [True, False])
def test_prompts(place, kind, unit, selected, own, monkeypatch):
    """Results are in rows of more elements than the heads have; ``own``: in the model's dtype."""
    monkeypatch.setattr(module, "PROMPT_ROWS", 64)
    instance, draw = prompt(place, kind, unit)
    model = instance.model
    for rows, keys, q_start, k_start in CHUNKS:
        q, k, v = draw(rows, keys)
        keep = torch.rand(rows, keys, generator=torch.Generator().manual_seed(rows)) < 0.3
        mask = (k_start + torch.arange(keys))[None] <= (q_start + torch.arange(rows))[:, None]
        mask = mask & keep if selected else mask
        wide = (rows, model.num_heads * model.out_dim + 8)
        wide = torch.full(wide, torch.nan, dtype=q.dtype if own else None, device="cuda")
        out = wide[:, :-8].unflatten(1, (model.num_heads, model.out_dim))
        lse = torch.full((rows, model.num_heads), torch.nan, device="cuda")
        on = [each.cuda() for each in (q, k)]
        on.append(on[1][..., :512] if kind == "latent" else v.cuda())
        if selected:
            instance.prefill_selected(*on, q_start, k_start, columns_of(keep).cuda(), out, lse)
        else:
            instance.prefill(*on, q_start, k_start, out, lse)
        if keys:
            expected = expect(q, k, v, model.scale, mask)
            expected.check(out.cpu(), lse.cpu())
        else:
            assert (out == 0).all()
            assert (lse == -torch.inf).all()


@EACH
def test_latent_rows_merge_over_blocks(place):
    """The LSE is natural, so that parts of a history join."""
    instance, draw = prompt(place, "latent", 1)
    q, k, _ = draw(20, 90)
    parts = []
    for first, last in ((0, 50), (50, 90)):
        out = torch.full((20, 16, 512), torch.nan, device="cuda")
        lse = torch.full((20, 16), torch.nan, device="cuda")
        part = k[first:last].cuda()
        instance.prefill(q.cuda(), part, part[..., :512], 200, first, out, lse)
        parts.append((out.double().cpu(), lse.double().cpu()))
    want, log = attention(q, k, k[..., :512], SCALE)
    logs = torch.stack([lse for _, lse in parts])
    weights = torch.exp(logs - torch.logsumexp(logs, 0))[..., None]
    joined = (weights * torch.stack([out for out, _ in parts])).sum(0)
    rough = expect(q, k, k[..., :512], SCALE).rough_out
    assert_as_good(joined, want, rough, "joined")
    torch.testing.assert_close(torch.logsumexp(logs, 0), log, rtol=1e-5, atol=1e-4)


def test_the_first_that_serves_is_taken():
    model = ModelShape(1, 8, 2, 128, torch.bfloat16, 0.1)
    group = GroupShape(*((0,), 16, 2, 1, 128, torch.bfloat16, 64, 2, 256, 64, 128, 4))
    capability = torch.cuda.get_device_capability()
    library, tried = providers.BUILDS.first(lambda build: build.refusals(model, group, capability))
    if library is None:
        pytest.skip("; ".join(tried))
    setup = BackendSetup(model, group, torch.device("cuda"), 2, model.group_size)
    instance = FlashAttention(setup)
    assert instance.library.name == library.name
    passed_over = {line.partition(":")[0] for line in tried}
    assert next(iter(LIBRARIES)) == list(providers.BUILDS.loads)[len(passed_over)]
