"""The buffer is warm when decoding starts: the last prompt query has selected once."""

from __future__ import annotations

import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.types import ModelShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LAYERS, HEADS, KV_HEADS, DIM, PROMPT = 2, 4, 2, 64, 400


def test_the_first_step_hits_what_the_last_prompt_query_selects():
    model = ModelShape(LAYERS, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
    config = SparseConfig(
        algorithm="quest", backend="triton_attention", budget=96, buffer=96, max_requests=2,
        max_tokens=1024, dense_layers=[], ring_tokens=32,
    )  # fmt: skip
    coordinator = SparseCoordinator(lower(config, model, device=DEVICE, registry=registry()))
    generator = torch.Generator().manual_seed(0)

    def random(rows, heads):
        return torch.randn(rows, heads, DIM, generator=generator).to(DEVICE)

    slot = coordinator.request_begin()
    queries = [random(PROMPT, HEADS) for _ in range(LAYERS)]
    coordinator.forward_begin(prefill=[(slot, PROMPT)])
    for layer in range(LAYERS):
        k, v = random(PROMPT, KV_HEADS), random(PROMPT, KV_HEADS)
        coordinator.attention(layer, queries[layer], k, v)
    coordinator.forward_end()

    coordinator.forward_begin(decode=[slot])
    warm = coordinator.transfers_of([slot])
    assert warm.misses > 0
    for layer in range(LAYERS):
        last = queries[layer][-1:]
        coordinator.attention(layer, last, random(1, KV_HEADS), random(1, KV_HEADS))
    coordinator.forward_end()
    after = coordinator.transfers_of([slot])
    assert after.misses == warm.misses
    assert after.hits > warm.hits
    coordinator.close()
