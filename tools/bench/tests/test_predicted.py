"""The prediction of a step, in the rows of ``topkv bench``."""

from __future__ import annotations

import torch

from topkv.config import SparseConfig
from topkv_bench import runs


def test_a_prediction_stands_beside_each_step_of_topkv_where_rates_are_known():
    sparse = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "unit": 16}
    options = runs.Options(
        model="tiny",
        config_path=None,
        contestants=("dense", "topkv-resident", "topkv"),
        contexts=(512,),
        requests=(2,),
        fill="pool",
        drift=0.25,
        steps=2,
        warmup=2,
        profiled=0,
        kv_limit=None,
        chunk=256,
        settings=SparseConfig(**sparse),
        device=torch.device("cpu"),
        dtype=torch.float32,
    )
    bench = runs.Bench(options)
    assert bench.rates is None  # there is no GPU to measure
    bench.rates = {"bandwidth": 400.0, "link": 1.0}
    dense, resident, sparse = bench.run()
    assert "predicted_step_ms" not in dense
    assert resident["predicted_step_ms"] > 0.5
    waits = sparse["predicted_step_ms"] - resident["predicted_step_ms"]
    # A link of 1 GB/s is so slow that it decides: 2 requests of 2 sparse layers of 2 lanes.
    loaded = (1 - sparse["hit_rate"]) * 2 * 2 * 2 * 7 * (2 * 16 * 64 * 4)
    assert 0.7 < waits / (loaded / 1e6) < 1.5
