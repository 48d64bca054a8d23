"""What a long prefill takes on the device, beside what it may take."""

from __future__ import annotations

import pytest
import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.types import ModelShape

pytestmark = pytest.mark.gpu


def test_prefill_takes_at_most_two_layers_of_history_and_a_chunk():
    layers, heads, kv_heads, dim, length, chunk = 4, 32, 8, 128, 65536, 8192
    model = ModelShape(layers, heads, kv_heads, dim, torch.bfloat16, dim**-0.5)
    config = SparseConfig(
        algorithm="quest", backend="triton_attention", max_requests=1, max_tokens=length,
        dense_layers=[],
    )  # fmt: skip
    device = torch.device("cuda", 0)
    coordinator = SparseCoordinator(lower(config, model, device=device, registry=registry()))
    generator = torch.Generator("cuda").manual_seed(0)

    def random(count):
        shape = (chunk, count, dim)
        return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)

    slot = coordinator.request_begin()
    q, k, v, out = random(heads), random(kv_heads), random(kv_heads), random(heads)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(length // chunk):
        coordinator.forward_begin(prefill=[(slot, chunk)])
        for layer in range(layers):
            coordinator.attention(layer, q, k, v, out=out)
        coordinator.forward_end()
    torch.cuda.synchronize()
    taken = torch.cuda.max_memory_allocated() - before
    history = length * kv_heads * dim * 2 * 2
    own = sum(tensor.numel() * tensor.element_size() for tensor in (q, k, v, out))
    assert taken <= 2 * history + own, f"{taken / 2**20:.0f} MiB"
    coordinator.close()
