"""Transfer engines at far addresses and in replays of a graph, which only a GPU can show."""

from __future__ import annotations

import os
from typing import Any

import torch

from topkv.kv.host_memory import HostMemory
from topkv.kv.layout import lay_out
from topkv_testing.kit import Subject
from topkv_testing.transfer.bench import Row, TransferBench, group_shape, raw
from topkv_testing.transfer.token_cache import TokenCache

REQUESTS = 16


def _far_slots(device: torch.device) -> int:
    """Slots of 256 KiB that each request gets: more than 2**31 words of four bytes in all where
    this machine has the memory, else more than 2**31 bytes."""
    free = min(
        torch.cuda.mem_get_info(device)[0],
        os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
    )
    need = 9 << 30 if free > 40 << 30 else 9 << 28
    return need // REQUESTS // (256 << 10)


def check_far_addresses(subject: Subject, host_format: str = "model") -> None:
    """Use the last request of a large group: its rows and pages are at the far ends.

    One-byte elements, so that element offsets pass 2**31 as byte offsets do; coded entries have
    them on the host.
    """
    device = subject.tier.device
    slots = _far_slots(device)
    dtype = torch.uint8 if host_format == "model" else torch.bfloat16
    shape: dict[str, Any] = {"unit": 64, "dim": 256, "heads_per_lane": 8, "dtype": dtype}
    shape |= {"host_format": host_format}
    shape |= {"lane_heads": 1, "layers": 1, "requests": REQUESTS, "select": 4, "ring": 2}
    group = group_shape(slots=slots - 2, units=slots, page_units=1, **shape)
    assert group.entry_bytes == (256 << 10) * dtype.itemsize
    _, size = lay_out([group], 1 + REQUESTS * slots)
    memory = HostMemory(size, device)
    try:
        bench = TransferBench(
            subject.make, group, device, subject.tier.impl, pool=memory.bytes, seed=1
        )
        # The first pages of the last request are the last of the pool.
        bench.set_pages(torch.arange(1, bench.num_pages).view(REQUESTS, -1).flip(1))
        _use_far_end(bench)
    finally:
        memory.close()


def _use_far_end(bench: TransferBench) -> None:
    group, store, last = bench.group, bench.store, REQUESTS - 1
    host = store.host
    cache = TokenCache(bench)
    tokens = cache.new_tokens(401)[0].to(bench.device)  # six closed units, some, and one
    engine, view = bench.engine, bench.views[0]
    k, v = (tokens[:-1, :, i].contiguous() for i in range(2))
    engine.store_chunk(view, last, 0, k[:400], v[:400], 400, False)
    fetched = torch.zeros_like(k[:400]), torch.zeros_like(v[:400])
    engine.fetch(view, last, 0, *fetched)
    torch.cuda.synchronize()
    far = host.decode(host.parts(store.entries[bench.pages[last, :6], 0, 0, 0].cpu()))
    true = tokens[:384].cpu().unflatten(0, (6, 64)).permute(0, 2, 3, 1, 4)  # [6, h, 2, unit, D]
    assert torch.equal(raw(far), raw(true)), "store_chunk to far pages"
    assert torch.equal(raw(fetched[0]), raw(k[:400])), "fetch of keys from far pages"
    assert torch.equal(raw(fetched[1]), raw(v[:400])), "fetch of values from far pages"

    row = Row(last, 384, 384, limit=4)
    bench.put([row])
    plan = bench.run(0, [[3, 0, 2, 1]])
    assert plan["misses"] == [4], plan
    for unit, slot in zip([3, 0, 2, 1], plan["slots"][0], strict=True):
        held = store.buffer[0, last, slot].cpu()
        assert torch.equal(raw(held), raw(true[unit])), f"unit {unit} of the far row"

    # Another token takes the last place of unit 5; then the unit goes to the host.
    ring = group.buffer_slots + 5 % group.ring_slots
    store.buffer[0, last, ring].copy_(true[5])
    bench.put([Row(last, 384, 384, appended=True)])
    engine.append(view, *(plane.contiguous() for plane in tokens[None, 400:401].unbind(3)))
    engine.offload()
    torch.cuda.synchronize()
    expected = true[5].clone()
    expected[:, :, 63] = tokens[400].cpu()
    assert torch.equal(raw(store.buffer[0, last, ring]), raw(expected)), "append to the far ring"
    stored = host.decode(host.parts(store.entries[int(bench.pages[last, 5]), 0, 0, 0].cpu()))
    assert torch.equal(raw(stored), raw(expected)), "offload to a far page"


RESIDENT = 2
"""Slot of the request that takes the fast path, of 8 tokens before the first step."""


def _random_rows(step: int, generator: torch.Generator, slots: list[int]) -> list[Row]:
    """Three requests that grow by a token a step, in an order that changes, and one padded row."""
    order = torch.randperm(4, generator=generator).tolist()
    lengths = [17, 30, 9]
    rows = [
        Row(slots[i], lengths[i] + step, lengths[i] + step, True, i == 2) if i < 3 else Row()
        for i in order
    ]
    return [*rows, Row()]


def check_captured(subject: Subject, host_format: str = "model") -> None:
    """Compare a twin that replays a graph with a twin that is called, bit for bit."""
    shape: dict[str, Any] = {"unit": 2, "select": 5, "slots": 8, "requests": 5, "units": 32}
    shape |= {"heads_per_lane": 2, "host_format": host_format}
    group = group_shape(dtype=torch.bfloat16, dim=8, **shape)
    args = (subject.make, group, subject.tier.device, subject.tier.impl)
    eager, captured = TransferBench(*args, seed=3), TransferBench(*args, seed=3)
    ids = torch.zeros((2, 5 * group.lane_heads, 5), dtype=torch.int32, device=eager.device)
    k = torch.zeros((5, 1, group.num_kv_heads, 8), dtype=torch.bfloat16, device=eager.device)

    def step_of(bench: TransferBench) -> None:
        for index, view in enumerate(bench.views):
            bench.engine.append(view, k, k)
            bench.engine.plan(view, ids[index], bench.limit, bench.plan)
            bench.engine.load(view, bench.plan)
        bench.engine.offload()

    generator = torch.Generator().manual_seed(5)
    graph = None
    for step in range(20):
        rows = _random_rows(step, generator, [4, 0, RESIDENT])
        ids.copy_(torch.randint(-2, 16, ids.shape, generator=generator))
        k.copy_(torch.randn(k.shape, generator=generator))
        for bench in (eager, captured):
            bench.put(rows)
            if step == 0:  # units that a resident row has closed are in its buffer
                bench.engine.restore(RESIDENT, 8, True)
        torch.cuda.synchronize()
        if step == 0:  # compiles; a captured call must not
            step_of(eager)
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step_of(captured)
        assert graph is not None
        torch.cuda.set_sync_debug_mode("error")
        try:
            if step:
                step_of(eager)
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        torch.cuda.synchronize()
        _assert_equal(eager, captured, step)
    counters = eager.store.counters.sum((0, 1)).tolist()
    assert min(counters) > 0, "the steps must both hit and miss"


def _assert_equal(eager: TransferBench, captured: TransferBench, step: int) -> None:
    for name in ("order", "slot_unit", "unit_slot", "counters", "buffer", "pool"):
        one, other = (raw(getattr(bench.store, name)) for bench in (eager, captured))
        assert torch.equal(one, other), f"{name} after step {step} of a replayed graph"
    for name in ("slots", "count", "miss_hosts", "miss_slots", "misses"):
        one, other = (getattr(bench.plan, name) for bench in (eager, captured))
        assert torch.equal(one, other), f"plan.{name} after step {step} of a replayed graph"
