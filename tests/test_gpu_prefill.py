"""Long prompts on a GPU: memory that they take, its bound, and their outputs."""

from __future__ import annotations

import pytest
import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.prompts.ahead import PLACES
from topkv.types import ModelShape
from topkv_testing.machines.delays import fetched_in_time

pytestmark = pytest.mark.gpu

LAYERS, HEADS, KV_HEADS, DIM, CHUNK = 4, 32, 8, 128, 8192
MODEL = ModelShape(LAYERS, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)
ROW = KV_HEADS * DIM * 2 * 2
"""Bytes of a token's key and value in a layer."""


def make(length, **options):
    config = SparseConfig(
        **{
            "algorithm": "quest",
            "backend": "triton_attention",
            "max_requests": 1,
            "max_tokens": length,
            "dense_layers": [],
            **options,
        }
    )
    device = torch.device("cuda", 0)
    return SparseCoordinator(lower(config, MODEL, device=device, registry=registry()))


def random(generator, count, heads):
    shape = (count, heads, DIM)
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def chunks_of(coordinator, length, chunk):
    """Yield outputs of each forward, ``[L, chunk, H, D]``; rows differ from layer to layer."""
    generator = torch.Generator("cuda").manual_seed(0)
    slot = coordinator.request_begin()
    for _ in range(length // chunk):
        coordinator.forward_begin(prefill=[(slot, chunk)])
        outs = []
        for layer in range(LAYERS):
            q, k, v = (random(generator, chunk, n) for n in (HEADS, KV_HEADS, KV_HEADS))
            outs.append(coordinator.attention(layer, q, k, v))
        coordinator.forward_end()
        yield torch.stack(outs)


def test_a_prompt_takes_the_same_memory_however_long_it_is():
    """Chunks behind two blocks of history and behind four, and less in all than the prompt."""
    length = 65536
    coordinator = make(length)
    before = torch.cuda.memory_allocated()
    taken = []
    for outs in chunks_of(coordinator, length, CHUNK):
        del outs
        taken.append(torch.cuda.max_memory_allocated() - before)
        torch.cuda.reset_peak_memory_stats()
    torch.cuda.synchronize()
    block_tokens = coordinator.config.prefill_block_tokens
    blocks, behind_two = PLACES * (block_tokens + CHUNK) * ROW, block_tokens // CHUNK + 1
    # The allocator hands out pieces that are somewhat larger than it was asked for.
    most, least = max(taken[behind_two:]), min(taken[behind_two:])
    assert most - least < blocks / 4, [each / 2**20 for each in taken]
    # Queries, keys, values and outputs of the model here, and two results of attention in fp32
    # with what merges them.
    rows = CHUNK * (HEADS * DIM * 2 * (2 + LAYERS) + 2 * ROW + LAYERS * HEADS * DIM * 2)
    parts = 3 * CHUNK * HEADS * DIM * 4
    assert taken[-1] <= rows + parts + blocks, f"{taken[-1] / 2**20:.0f} MiB"
    report = coordinator.memory()
    assert report.device + parts + blocks < LAYERS * length * ROW <= report.host_used
    coordinator.close()


BUFFERED = {"prefill_buffer_tokens": 20480}


@pytest.mark.parametrize(
    "options",
    [{}, {"host_format": "fp8"}, {"layers": {"1": "resident"}}, BUFFERED],
)
def test_outputs_are_those_of_history_that_is_fetched_in_time(options):
    """Sizes at which attention and copies take long enough to overlap."""
    length, chunk = 40960, 4096
    made = [make(length, prefill_block_tokens=4096, **options) for _ in range(2)]
    fetched_in_time(made[1])
    pairs = zip(*(chunks_of(each, length, chunk) for each in made), strict=True)
    for number, (ahead, in_time) in enumerate(pairs):
        assert torch.equal(ahead, in_time), f"chunk {number}"
    for each in made:
        each.close()
