"""One captured decode step of all layers, replayed, against the same steps run eagerly."""

from __future__ import annotations

import pytest
import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import registry
from topkv.types import ModelShape
from topkv_testing.integrity import check_integrity

pytestmark = pytest.mark.gpu

LAYERS, HEADS, KV_HEADS, DIM, STEPS, PROMPT = 4, 8, 2, 64, 64, 700
MODEL = ModelShape(LAYERS, HEADS, KV_HEADS, DIM, torch.bfloat16, DIM**-0.5)


def make(**options):
    config = SparseConfig(
        **{
            "algorithm": "quest",
            "backend": "triton_attention",
            "unit": 16,
            "budget": 128,
            "buffer": 192,
            "max_requests": 4,
            "max_tokens": 8192,
            "max_request_tokens": 2048,
            "layers": {"0": "resident", "3": "streamed"},
            **options,
        }
    )
    device = torch.device("cuda", 0)
    return SparseCoordinator(lower(config, MODEL, device=device, registry=registry()))


def tokens(generator, *shape):
    return torch.randn(shape, generator=generator, device="cuda", dtype=torch.bfloat16)


def prefill(coordinator, lengths):
    generator = torch.Generator("cuda").manual_seed(5)
    slots = []
    for length in lengths:
        slot = coordinator.request_begin()
        slots.append(slot)
        coordinator.forward_begin(prefill=[(slot, length)])
        for layer in range(LAYERS):
            q = tokens(generator, length, HEADS, DIM)
            k, v = (tokens(generator, length, KV_HEADS, DIM) for _ in range(2))
            coordinator.attention(layer, q, k, v)
        coordinator.forward_end()
    return slots


class Inputs:
    """Queries, keys and values of every layer at fixed addresses, refilled for each step."""

    def __init__(self, rows=4):
        self.q = torch.zeros(LAYERS, rows, HEADS, DIM, device="cuda", dtype=torch.bfloat16)
        self.k, self.v = (
            torch.zeros(LAYERS, rows, KV_HEADS, DIM, device="cuda", dtype=torch.bfloat16)
            for _ in range(2)
        )
        self.out = torch.zeros_like(self.q)

    def refill(self, step):
        generator = torch.Generator("cuda").manual_seed(100 + step)
        for tensor in (self.q, self.k, self.v):
            tensor.copy_(tokens(generator, *tensor.shape))
        self.out.fill_(float("nan"))

    def run(self, coordinator):
        for layer in range(LAYERS):
            coordinator.attention(
                layer, self.q[layer], self.k[layer], self.v[layer], out=self.out[layer]
            )
        coordinator.offload()


def rows_of(slots, step):
    """The third request ends after 20 steps; its row is padded from then on."""
    return [slot if index != 2 or step < 20 else -1 for index, slot in enumerate(slots)]


TOKENS = {
    "algorithm": "double_sparsity",
    "stages": ["regranulate"],
    "observers": ["regranulate"],
    "budget": 16 + 12,
    "buffer": 12 * 16,
    "dense_layers": [],
}


STICKY = {"params": {"sticky": 0.5}}
"""Selections that depend on all that was loaded before."""

SHARING = {"share": "FSS", "layers": {"3": "streamed"}}
"""Loads that are ahead, on a stream beside the one that is captured."""

TIMED = {"observers": ["stalls"]}
"""Looks at a clock around each load, which are captured with it."""

CASES = {
    "units": {},
    "regranulated": TOKENS,
    "sticky": STICKY,
    "sticky-regranulated": {**TOKENS, **STICKY},
    "coded": {"host_format": "fp8"},
    "timed": TIMED,
    "sharing": SHARING,
    "sharing-timed": {**SHARING, **TIMED},
    "sharing-regranulated": {**TOKENS, "share": "FSS"},
}


@pytest.mark.parametrize("scope", ["kv_head", "shared"])
@pytest.mark.parametrize("options", CASES.values(), ids=CASES)
def test_captured_replays_equal_eager_bitwise(options, scope):
    eager, captured = (make(scope=scope, **options) for _ in range(2))
    lengths = [PROMPT, 40, PROMPT + 9, 130]
    slots = prefill(eager, lengths)
    assert prefill(captured, lengths) == slots
    inputs, replayed = Inputs(), Inputs()

    graph = None
    for step in range(STEPS):
        rows = rows_of(slots, step)
        if step == 20:
            eager.request_end(slots[2])
            captured.request_end(slots[2])
        inputs.refill(step)
        replayed.refill(step)
        torch.cuda.synchronize()

        torch.cuda.set_sync_debug_mode("error")
        try:
            eager.forward_begin(decode=rows)
            inputs.run(eager)
            eager.forward_end(offloaded=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")

        captured.forward_begin(decode=rows)
        if graph is None:
            # The kernels were compiled by the eager run; capture runs none of them.
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed.run(captured)
        graph.replay()
        captured.forward_end(offloaded=True)
        torch.cuda.synchronize()
        assert torch.equal(inputs.out, replayed.out), f"step {step}"
        assert inputs.out.isfinite().all()

    for one, other in zip(eager.manager.stores, captured.manager.stores, strict=True):
        for name in ("buffer", "unit_slot", "slot_unit", "order", "counters", "entries"):
            left, right = getattr(one, name), getattr(other, name)
            assert torch.equal(left.cpu().nan_to_num(), right.cpu().nan_to_num()), name
    report = captured.transfers_of([slots[0]])
    sticky = "sticky" in options.get("params", {})  # a bonus is there to miss less
    assert report.misses > (STEPS // 8 if sticky else STEPS)
    if "stages" in options:
        extra = captured.observers.counts["regranulate"]()
        assert extra == eager.observers.counts["regranulate"]()
        assert min(extra.values()) > STEPS
    assert eager.length(slots[0]) == PROMPT + STEPS
    check_integrity(eager)
    check_integrity(captured)
    eager.close()
    captured.close()


DRAFTED = {
    "joint": {},
    "joint-sharing": SHARING,
    "exact": {"verification": "exact"},
    "exact-sharing": {"verification": "exact", **SHARING},
    "exact-sticky-regranulated": {"verification": "exact", **TOKENS, **STICKY},
    "exact-coded": {"verification": "exact", "host_format": "fp8"},
}


@pytest.mark.parametrize("options", DRAFTED.values(), ids=DRAFTED)
def test_captured_drafts_equal_eager_ones_bitwise(options):
    """One graph serves rows of any number of tokens up to Q, after rejections too."""
    queries, steps = 4, 24
    eager, captured = (make(max_queries=queries, **options) for _ in range(2))
    lengths = [PROMPT, 40, PROMPT + 9, 130]
    slots = prefill(eager, lengths)
    assert prefill(captured, lengths) == slots
    inputs, replayed = Inputs(4 * queries), Inputs(4 * queries)
    graph = None
    for step in range(steps):
        append = [1 + (step + row) % queries for row in range(4)]
        left = [(step * 7 + row) % count for row, count in enumerate(append)]
        inputs.refill(step)
        replayed.refill(step)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            eager.forward_begin(slots, append=append, queries=queries)
            inputs.run(eager)
            eager.forward_end(offloaded=True)
        finally:
            torch.cuda.set_sync_debug_mode("default")
        captured.forward_begin(slots, append=append, queries=queries)
        if graph is None:
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                replayed.run(captured)
        graph.replay()
        captured.forward_end(offloaded=True)
        torch.cuda.synchronize()
        assert torch.equal(inputs.out, replayed.out), f"step {step}"
        assert inputs.out.isfinite().all()
        for each in (eager, captured):
            kept = [each.length(slot) - less for slot, less in zip(slots, left, strict=True)]
            each.rollback(slots, kept)
    for one, other in zip(eager.manager.stores, captured.manager.stores, strict=True):
        for name in ("buffer", "unit_slot", "slot_unit", "order", "counters", "entries"):
            both = (getattr(each, name).cpu().nan_to_num() for each in (one, other))
            assert torch.equal(*both), name
    assert captured.transfers_of([slots[0]]).misses > steps
    for each in (eager, captured):
        check_integrity(each)
        each.close()


def test_stalls_grow_with_each_replay_that_missed_and_with_no_other():
    """By layer, in one graph: the clock is read by kernels, and nobody waits for the device."""
    coordinator = make(**TIMED)
    stalls = coordinator.observers.counts["stalls"]
    slots, inputs = prefill(coordinator, [PROMPT, 500]), Inputs()
    rows = [*slots, -1, -1]

    def counted():
        coordinator.forward_end(offloaded=True)
        layers, waited = coordinator.transfers_of().layers, stalls()
        assert waited.keys() == layers.keys()
        return {n: (each.misses, waited[n]) for n, each in layers.items()}

    coordinator.forward_begin(decode=rows)
    inputs.run(coordinator)  # kernels are compiled
    before = counted()
    assert before.keys() == {2}, "the other layers are dense, and load nothing"
    graph = torch.cuda.CUDAGraph()
    seen = set()
    for step in range(12):
        if step % 3 == 0:  # new queries, and the same two times more
            inputs.refill(step)
            torch.cuda.synchronize()
        coordinator.forward_begin(decode=rows)
        if step == 0:
            with torch.cuda.graph(graph):
                inputs.run(coordinator)
        torch.cuda.set_sync_debug_mode("error")
        try:
            graph.replay()
        finally:
            torch.cuda.set_sync_debug_mode("default")
        after = counted()
        for layer, (misses, stall) in after.items():
            missed, waited = misses > before[layer][0], stall - before[layer][1]
            assert missed == (waited > 0), (step, layer, before, after)
            assert waited < 50  # milliseconds, for a few dozen rows of 4 KiB
            seen.add(missed)
        before = after
    assert seen == {True, False}
    coordinator.close()
