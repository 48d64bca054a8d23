"""Tests that need a GPU: replayed drift, the offloaded cache, times of kernels."""

from __future__ import annotations

import pytest
import torch

from topkv.config import SparseConfig
from topkv_bench import drift_kernels, runs
from topkv_bench.contestants import NAMES
from topkv_bench.drift import rate_of, write
from topkv_bench.phases import MODEL, PHASES

pytestmark = pytest.mark.gpu


def test_a_graph_replays_the_drift():
    """Lengths change below it, nothing else does."""

    def ints(*values):
        return torch.tensor(values, dtype=torch.int32, device="cuda")

    slots, lengths, limit, rate = ints(2, -1, 0), ints(1, 0, 1), ints(2047, 0, 2100), rate_of(0.15)
    ids = torch.zeros((24, 127), dtype=torch.int32, device="cuda")
    ids[8:16] = -1
    ids[:, 5] = -1
    before = ids.clone()
    drift_kernels.write(ids, slots, lengths, limit, 3, 2047, rate)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        drift_kernels.write(ids, slots, lengths, limit, 3, 2047, rate)
    for length in (1, 2, 4095, 32768, 2**20):
        lengths.copy_(ints(length, 0, length + 7))
        graph.replay()
        expected = before.cpu()
        rows = (slots.cpu(), lengths.cpu(), limit.cpu())
        write(expected, *rows, 3, 2047, rate)
        assert torch.equal(ids.cpu(), expected)


@pytest.mark.parametrize("fill", ["prompt", "pool"])
@pytest.mark.parametrize("compiled", [False, True])
def test_steps_of_several_tokens_are_replayed(fill, compiled):
    """Misses are those of the tokens that a graph verifies, whatever is accepted."""
    sparse = {"algorithm": "quest", "backend": "triton_attention", "budget": 256, "unit": 16}
    more = ("topkv-compiled",) if compiled else ("topkv-resident", "topkv")
    options = runs.Options(
        model="tiny",
        config_path=None,
        contestants=("dense", *more),
        contexts=(2048,),
        requests=(2,),
        fill=fill,
        drift=0.125,
        steps=16,
        warmup=3,
        profiled=4,
        kv_limit=None,
        chunk=512,
        settings=SparseConfig(**sparse, buffer=512),
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
        queries=(1, 4),
        accepts=(0.0, 0.75),
    )
    rows = list(runs.Bench(options).run())
    assert not [row["reason"] for row in rows if row["status"] != "ok"]
    for row in rows:
        queries = row["queries"]
        assert row["tokens_per_step"] == (1 + 3 * row["accept"] if queries > 1 else 1)
        if row["contestant"] != "dense":
            named = "2 rows" if queries == 1 else f"2 rows of {queries} tokens"
            assert f"{named} recorded in" in row["capture"]
            assert "not" not in row["capture"]
        if row["contestant"] in ("topkv", "topkv-compiled"):
            # 2 requests of 2 sparse layers of 2 lanes of 15 units.
            assert abs(row["misses_per_step"] - 120 * 0.125 * queries) < 6


@pytest.mark.parametrize("fill", ["prompt", "pool"])
def test_every_contestant_decodes(fill):
    sparse = {"algorithm": "quest", "backend": "triton_attention", "budget": 256, "unit": 16}
    options = runs.Options(
        model="tiny",
        config_path=None,
        contestants=NAMES,
        contexts=(2048,),
        requests=(2,),
        fill=fill,
        drift=0.25,
        steps=16,
        warmup=2,
        profiled=4,
        kv_limit=None,
        chunk=512,
        settings=SparseConfig(**sparse),
        device=torch.device("cuda", 0),
        dtype=torch.bfloat16,
    )
    rows = {row["contestant"]: row for row in runs.Bench(options).run()}
    assert not {name: row["reason"] for name, row in rows.items() if row["status"] != "ok"}
    whole = 2 * 4 * 2 * 2 * 64 * 2 * 2048
    assert rows["dense"]["bytes"]["device"] >= whole
    assert rows["offloaded"]["bytes"]["host"] >= whole / 2
    assert rows["offloaded"]["bytes"]["device"] <= whole / 2
    assert rows["topkv"]["bytes"]["host"] >= whole / 2  # of the layers that are not resident
    assert abs(rows["topkv"]["hit_rate"] - 0.75) < 0.05
    assert "2 rows compiled in" in rows["topkv-compiled"]["capture"]
    for row in rows.values():
        assert row["peak_bytes"] > 0
        device = row["profile"]["device_ms"]
        assert set(device) == {*PHASES, MODEL}
        assert device[MODEL] > 0
    predicted = [name for name, row in rows.items() if row.get("predicted_step_ms", 0) > 0]
    assert predicted == ["topkv-resident", "topkv"]
    sparse = rows["topkv"]["profile"]["device_ms"]
    assert all(sparse[phase] > 0 for phase in ("append", "select", "plan", "load", "attend"))
