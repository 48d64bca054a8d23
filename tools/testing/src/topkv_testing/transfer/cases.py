"""Benches of a subject, shapes and a fetch, for all parts of the transfer suite."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from hypothesis import strategies as st

from topkv_testing import strategies
from topkv_testing.kit import Subject
from topkv_testing.transfer.bench import TransferBench, group_shape
from topkv_testing.transfer.token_cache import TokenCache

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def bench_of(subject: Subject, seed: int = 0, max_queries: int = 1, **shape: Any) -> Any:
    """A bench with the engine under test; ``shape`` as in ``group_shape``."""
    return TransferBench(
        *(subject.make, group_shape(**shape), subject.tier.device, subject.tier.impl),
        seed=seed,
        max_queries=max_queries,
    )


def cache_of(subject: Subject, **options: Any) -> TokenCache:
    return TokenCache(bench_of(subject, **options), options.get("seed", 0))


@st.composite
def shapes(draw: Callable[..., Any], tier: str) -> dict[str, Any]:
    """Options of ``bench_of``: small groups of every kind, K == C among them."""
    select = draw(st.integers(1, 5))
    unit = draw(st.sampled_from([1, 2, 4]))
    wide = unit > 1  # entries are whole words of 16 bytes
    return {
        "seed": draw(strategies.seeds()),
        "select": select,
        "slots": select + draw(st.integers(0, 4)),
        "unit": unit,
        "ring": draw(st.integers(2, 3)),
        "lane_heads": draw(st.integers(1, 2 if tier == "interpret" else 3)),
        "heads_per_lane": draw(st.integers(1, 2)),
        "page_units": draw(st.sampled_from([1, 2, 4])),
        "dtype": draw(st.sampled_from([t for t in DTYPES if wide or t == torch.float32])),
        "requests": 2 if tier == "interpret" else 3,
        "units": 16,
        "planes": draw(st.sampled_from([2, 2, 1])),
    }


def fetch(bench: TransferBench, layer: int, slot: int, start: int, count: int) -> torch.Tensor:
    """Fetch ``[count, Hkv, planes, D]`` through the engine; nothing else may change."""
    group = bench.group
    shape = (count, group.num_kv_heads, group.head_dim)
    k, v = (torch.empty(shape, dtype=group.dtype, device=bench.device) for _ in range(2))
    for tensor in (k, v):
        tensor.view(torch.uint8).fill_(0x77)
    with bench.touching():
        bench.engine.fetch(bench.views[layer], slot, start, k, v)
    return torch.stack([k, v][: group.planes], 2).cpu()
