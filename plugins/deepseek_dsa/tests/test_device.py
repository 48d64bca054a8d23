"""The kernels at the shapes of the model, on a CUDA device: tensor cores and far rows."""

from __future__ import annotations

import pytest
import torch

from topkv.types import Selection
from topkv_deepseek_dsa import launch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]
SHAPE = {"heads": 64, "dim": 128, "select": 2048}


def truth_of(w, slot, q, weights):
    """float64 scores on the device."""
    products = w.rounded(q).cuda() @ w.decoded(slot).cuda().T
    return weights.double().cuda() @ products.relu()


def check(w, slots):
    q, weights = w.queries(len(slots))
    w.indexer.launcher.scores.fill_(torch.nan)
    sets = w.retrieve(q, weights, slots)
    for row, slot in enumerate(slots):
        length = len(w.keys[slot]) if slot >= 0 else 0
        if length <= w.group.select:
            assert sets[row] == set(range(length))
            continue
        truth = truth_of(w, slot, q[row, 0], weights[row])
        found = w.indexer.launcher.scores[row, :length].double()
        rough = w.rough(slot, q[row, 0], weights[row]).cuda().double()
        band = 2 * (rough - truth).abs().max() + 2**-21 * truth.abs().max()
        band += w.slack(slot, q[row, 0], weights[row])
        off = (found - truth).abs().max()
        assert off <= band
        chosen = torch.zeros(length, dtype=torch.bool, device="cuda")
        chosen[sorted(sets[row])] = True
        assert truth[chosen].min() >= truth[~chosen].max() - 2 * off
        # Behind the length nothing is written.
        assert w.indexer.launcher.scores[row, length:].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("scale_format", ["fp32", "ue8m0"])
def test_long_requests(world, form, dtype, scale_format):
    lengths = (16384, 9001, 2048, 2049, 1, 4097)
    make = {"keys": form, "dtype": dtype, "scale_format": scale_format, "requests": 6}
    w = world.filled("triton", "cuda", lengths=lengths, pages=256, **make, **SHAPE)
    check(w, [0, 1, 2, 3, 4, 5])
    check(w, [5, -1, 1, -1, 0])
    w.append([5, -1, 1], w.random(3))
    check(w, [1, 5])


@pytest.mark.parametrize("queries", [2, 3, 4, 8])
def test_long_requests_of_several_queries(world, form, queries):
    """A token is worth the best of its row's queries, which one product holds, or two."""
    lengths = (16384, 9001, 2050, 4097)
    make = {"keys": form, "requests": 5, "max_queries": 8}
    w = world.filled("triton", "cuda", lengths=lengths, pages=256, **make, **SHAPE)
    slots, appended = [3, 0, -1, 1, 2], [1, queries, 0, queries - 1, 0]
    q, weights = w.several(5, queries)
    w.indexer.launcher.scores.fill_(torch.nan)
    sets = w.retrieve_several(q, weights, slots, appended)
    for row, slot in enumerate(slots):
        new = max(appended[row], 1)
        length = len(w.keys[slot]) - new if slot >= 0 else 0
        assert w.indexer.launcher.scores[row, length:].isnan().all()
        if not length:
            continue
        asked = [(slot, q[row, nth], weights[row, nth]) for nth in range(new)]
        truth = torch.stack([truth_of(w, *each) for each in asked]).amax(0)[:length]
        rough = torch.stack([w.rough(*each) for each in asked]).amax(0)[:length].cuda().double()
        off = (w.indexer.launcher.scores[row, :length].double() - truth).abs().max()
        band = 2 * (rough - truth).abs().max() + 2**-21 * truth.abs().max()
        assert off <= band + max(w.slack(*each) for each in asked)
        chosen = torch.zeros(length, dtype=torch.bool, device="cuda")
        chosen[sorted(sets[row])] = True
        assert truth[chosen].min() >= truth[~chosen].max() - 2 * off


def test_programs_of_many_tiles(world, form):
    """Programs have as many tiles as in long requests: few run at a time, in several waves too."""
    lengths = (16384, 9001, 2049, 2048, 12345)
    w = world.filled("triton", "cuda", keys=form, lengths=lengths, pages=256, requests=5, **SHAPE)
    for running in (8, 40):
        w.indexer.launcher.running = running
        check(w, [0, 1, 2, 3, 4])
        check(w, [4, -1, 2, 1])


@pytest.mark.parametrize("heads", [32, 64, 128])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_other_indexers(world, form, heads, dim):
    make = {"heads": heads, "dim": dim, "select": 100, "pages": 16}
    check(world.filled("triton", "cuda", keys=form, lengths=(1000, 70, 513), **make), [0, 1, 2])


@pytest.mark.parametrize(
    ("page", "tile"), [(64, 128), (64, 256), (128, 64), (256, 128), (192, 128)]
)
def test_tiles_of_other_sizes_than_pages(world, form, page, tile, monkeypatch):
    for kind in ("fp8", "bf16"):
        monkeypatch.setitem(launch.SCORING, kind, (tile, 3, 4))
    make = {"heads": 64, "dim": 128, "select": 100, "page": page, "pages": 8}
    check(world.filled("triton", "cuda", keys=form, lengths=(510, 70, 321), **make), [2, 0, 1])


def test_e4m3_products_are_exact_where_sums_are_whole(world):
    """Codes of whole numbers: what tensor cores keep of a sum is enough for them."""
    w = world("triton", "cuda", pages=64, heads=64, dim=128, select=300)
    keys = torch.randint(-3, 4, (4000, 128), generator=w.generator).float()
    q = torch.randint(-3, 4, (1, 1, 64, 128), generator=w.generator).float()
    keys[:, 0], keys[:, 1], q[..., 0], q[..., 1] = 448, 0, 0, 448
    weights = torch.randint(-3, 4, (1, 64), generator=w.generator).float()
    w.prefill(0, keys.bfloat16())
    (found,) = w.retrieve(q.bfloat16(), weights, [0])
    exact = (q[0, 0].double() @ keys.double().T).relu().T @ weights[0].double()
    assert torch.equal(w.indexer.launcher.scores[0, :4000].cpu().double(), exact)
    order = sorted(range(4000), key=lambda s: (-float(exact[s]), s))
    assert found == set(order[:300])


def test_rows_beyond_two_gigabytes(world, form):
    """Pages of high numbers, whose bytes no 32-bit offset reaches."""
    spare = 270_000 if form == "fp8" else 140_000
    make = {"heads": 64, "dim": 128, "select": 100, "pages": 32, "spare": spare}
    w = world.filled("triton", "cuda", keys=form, lengths=(2000, 70, 513), **make)
    assert w.pool.numel() * w.pool.element_size() > 1 << 31
    check(w, [1, 0, 2])
    w.append([1, 2], w.random(2))
    check(w, [2, 1])


def test_a_batch_of_many_rows(world, form):
    lengths = [37 * i + 1 for i in range(64)]
    make = {"heads": 64, "dim": 128, "select": 100, "pages": 40, "requests": 64}
    w = world.filled("triton", "cuda", keys=form, lengths=lengths, **make)
    check(w, list(range(63, -1, -1)))


def test_a_prompt_is_its_steps(world, form):
    w = world("triton", "cuda", keys=form, pages=64, **SHAPE)
    w.prefill(0, w.random(4000))
    q, weights = w.queries(60)
    sets = w.prompt(0, 3940, q[:, 0], weights)
    for row in range(60):
        w.rows([0])
        w.layer.step.lengths.fill_(3940 + row + 1)
        ids = torch.full((1, 2048), -7, dtype=torch.int32, device="cuda")
        one = q[row : row + 1].cuda(), weights[row : row + 1, None].cuda()
        w.indexer.retrieve_topk(w.layer, *one, Selection(ids))
        assert w.formed(ids, [3940 + row + 1]) == [sets[row]]
