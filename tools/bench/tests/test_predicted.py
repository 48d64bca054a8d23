"""The prediction of a step, in the rows of ``topkv bench``."""

from __future__ import annotations

import torch

from topkv.config import SparseConfig
from topkv_bench import runs


def made(contestants, **given):
    """A bench that knows the rates of a GPU, of which there is none to measure."""
    sparse = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "unit": 16}
    options = runs.Options(
        model="tiny",
        config_path=None,
        contestants=contestants,
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
        **given,
    )
    bench = runs.Bench(options)
    assert bench.rates is None
    bench.rates = {"bandwidth": 400.0, "link": 1.0}
    return bench


def test_a_prediction_stands_beside_each_step_of_topkv_where_rates_are_known():
    dense, resident, sparse = made(("dense", "topkv-resident", "topkv")).run()
    assert "predicted_step_ms" not in dense
    assert resident["predicted_step_ms"] > 0.5
    waits = sparse["predicted_step_ms"] - resident["predicted_step_ms"]
    # A link of 1 GB/s is so slow that it decides: 2 requests of 2 sparse layers of 2 lanes.
    loaded = (1 - sparse["hit_rate"]) * 2 * 2 * 2 * 7 * (2 * 16 * 64 * 4)
    assert 0.7 < waits / (loaded / 1e6) < 1.5


def test_steps_of_several_tokens_are_predicted_with_their_own_misses():
    one, four = made(("topkv",), queries=(1, 4)).run()
    assert one["hit_rate"] > four["hit_rate"]
    entry = 2 * 16 * 64 * 4
    more = (four["misses_per_step"] - one["misses_per_step"]) * entry / 1e6  # ms at 1 GB/s
    assert 0.7 < (four["predicted_step_ms"] - one["predicted_step_ms"]) / more < 1.5
