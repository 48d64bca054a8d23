"""One layer with its page table, ring and pools, and an oracle in float64.

Without a CUDA device the kernels run in Triton's interpreter; with one, on the device.
"""

from __future__ import annotations

import math
import os

import pytest
import torch

from topkv_quest.entry import topkv_register_algorithms
from topkv_testing.kit import params_of

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.hooks.algorithm import AlgorithmSetup  # noqa: E402
from topkv.hooks.topk import TopKSetup  # noqa: E402
from topkv.ops.topk import RadixTopK  # noqa: E402
from topkv.types import GroupShape, LayerView, ModelShape, Selection, StepTensors  # noqa: E402
from topkv_quest.quest import Quest, QuestKernels  # noqa: E402

NAN = math.nan
POISON = 93
PAGE_UNITS = 2


class World:
    """A model of one layer; ``keys[slot]`` is what each request was given, on the CPU."""

    def __init__(
        self,
        impl,
        device,
        *,
        metadata="bf16",
        scope="kv_head",
        dtype=torch.bfloat16,
        heads=4,
        kv_heads=2,
        dim=12,
        unit=4,
        select=3,
        sinks=1,
        requests=3,
        units=20,
        ring=2,
        seed=0,
    ):
        self.device, self.unit, self.ring = torch.device(device), unit, ring
        self.model = ModelShape(1, heads, kv_heads, dim, dtype, 0.5)
        lanes = kv_heads if scope == "kv_head" else 1
        self.group = GroupShape(
            layers=(0,),
            unit=unit,
            lane_heads=lanes,
            heads_per_lane=kv_heads // lanes,
            head_dim=dim,
            dtype=dtype,
            page_tokens=PAGE_UNITS * unit,
            max_requests=requests,
            max_units=units,
            select=select,
            buffer_slots=2 * select,
            ring_slots=ring,
        )
        params = params_of(
            topkv_register_algorithms()[0], {"metadata": metadata, "sink_units": sinks}
        )
        made = {"reference": Quest, "triton": QuestKernels}[impl]
        self.quest = made(AlgorithmSetup(self.model, self.group, params, self.device, self._topk))
        self.generator = torch.Generator().manual_seed(seed)
        pages = units // PAGE_UNITS
        count = 1 + requests * pages
        self.pools = {
            spec.name: torch.full(
                (count * PAGE_UNITS, *spec.shape),
                NAN if spec.dtype.is_floating_point else POISON,
                dtype=spec.dtype,
                device=device,
            )
            for spec in self.quest.spec().representations
        }
        table = 1 + torch.randperm(count - 1, generator=self.generator).view(requests, pages)
        ints = {"dtype": torch.int32, "device": device}
        self.step = StepTensors(
            *(torch.zeros(requests, **ints) for _ in range(5)), table.to(**ints)
        )
        shape = (requests, lanes, ring + 1, kv_heads // lanes, 2, unit, dim)
        storage = torch.full(shape, NAN, dtype=dtype, device=device)[:, :, 1:]
        self.layer = LayerView(
            0, 0, self.group, self.step, storage[:, :, :, :, 0], storage[:, :, :, :, 1], self.pools
        )
        self.keys = {slot: self.random(0) for slot in range(requests)}

    def _topk(self, rows, columns, select):
        return RadixTopK(TopKSetup(rows, columns, select, self.device))

    @classmethod
    def filled(cls, *args, lengths=(80, 33, 5), **kwargs):
        """A world with prefilled requests of these lengths."""
        made = cls(*args, **kwargs)
        for slot, length in enumerate(lengths):
            made.prefill(slot, made.random(length))
        return made

    def random(self, count):
        shape = (count, self.model.num_kv_heads, self.model.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.model.dtype)

    def queries(self, rows):
        shape = (rows, 1, self.model.num_heads, self.model.head_dim)
        return torch.randn(shape, generator=self.generator).to(self.model.dtype)

    def prefill(self, slot, keys, chunks=()):
        """Construct in chunks that end at the given positions; the open unit goes to the ring."""
        self.keys[slot] = keys
        start = 0
        for end in (*chunks, len(keys)):
            self.construct(slot, start, keys[start:end].to(self.device))
            start = end // self.unit * self.unit
        for position in range(start, len(keys)):
            self.write_ring(slot, position, keys[position])

    def construct(self, slot, start, keys):
        """Construct from keys on the device; values, queries and log-sum-exp are not read."""
        nothing = torch.empty(0, device=self.device)
        self.quest.construct(self.layer, slot, start, keys, keys, nothing, nothing)

    def write_ring(self, slot, position, key):
        group = self.group
        if position % self.unit == 0:
            self.layer.ring_k[slot, :, position // self.unit % self.ring] = NAN
        target = self.layer.ring_k[
            slot, :, position // self.unit % self.ring, :, position % self.unit
        ]
        target.copy_(key.view(group.lane_heads, group.heads_per_lane, group.head_dim))

    def rows(self, slots, appended=0):
        """Step tensors of a batch of these slots; -1 pads."""
        ints = {"dtype": torch.int32, "device": self.device}
        lengths = [len(self.keys[slot]) if slot >= 0 else 0 for slot in slots]
        values = (slots, lengths, lengths, [appended * (slot >= 0) for slot in slots])
        fixed = [torch.tensor(value, **ints) for value in values]
        resident = torch.zeros(len(slots), **ints)
        self.layer.step = StepTensors(*fixed, resident, self.step.page_table)

    def append(self, slots, keys):
        """Decode one token for each row."""
        for slot, key in zip(slots, keys, strict=True):
            if slot >= 0:
                self.write_ring(slot, len(self.keys[slot]), key)
                self.keys[slot] = torch.cat([self.keys[slot], key[None]])
        self.rows(slots, appended=1)
        self.update(keys)

    def update(self, keys):
        keys = keys.to(self.device)
        self.quest.update(self.layer, keys[:, None], keys[:, None])

    def retrieve(self, q, slots):
        """ids ``[B, lane_heads, K]`` from a poisoned result, checked for form."""
        self.rows(slots)
        lanes, select = self.group.lane_heads, self.group.select
        ids = torch.full((len(slots) * lanes, select), -POISON, dtype=torch.int32)
        ids = ids.to(self.device)
        self.quest.retrieve_topk(self.layer, q.to(self.device), None, Selection(ids))
        ids = ids.cpu().view(len(slots), lanes, select)
        for row, slot in enumerate(slots):
            closed = self.closed(slot) if slot >= 0 else 0
            for lane in ids[row].tolist():
                valid = lane[: min(closed, select)]
                assert lane == sorted(set(valid)) + [-1] * (select - len(valid))
                assert all(0 <= unit < closed for unit in valid)
        return ids

    def closed(self, slot):
        return max(len(self.keys[slot]) - 1, 0) // self.unit

    def host(self, slot, units):
        page = self.step.page_table[slot].cpu()[torch.arange(units) // PAGE_UNITS].long()
        return page * PAGE_UNITS + torch.arange(units) % PAGE_UNITS

    def stored(self, slot, units):
        """The pools' rows of the first units of a request, by name, on the CPU."""
        return {name: pool.cpu()[self.host(slot, units)] for name, pool in self.pools.items()}

    def decoded(self, slot, units):
        """float64 bounds ``[units, Hkv, 2, D]`` as a reader of the pools understands them."""
        stored = self.stored(slot, units)
        bounds = stored["bounds"].double()
        return bounds * stored["scale"].double()[..., None, None] if "scale" in stored else bounds

    def magnitude(self, q, slot):
        """The largest sum of absolute terms of any score: fp32 sums round relative to it."""
        largest = self.decoded(slot, self.closed(slot)).abs().amax((0, 2))
        largest = largest.repeat_interleave(self.model.group_size, 0)
        return (q[0].double().abs() * largest).sum(1).max() * self.model.scale

    def oracle(self, q, slot):
        """float64 scaled scores ``[H, closed]`` and worth of units ``[lane_heads, closed]``.

        Worth is the log of the sum of the softmaxes of a lane's heads; of one head, its scores.
        """
        model = self.model
        bounds = self.decoded(slot, self.closed(slot))
        raw = torch.empty(model.num_heads, len(bounds), dtype=torch.float64)
        for head in range(model.num_heads):
            products = bounds[:, head // model.group_size] * q[0, head].double()
            raw[head] = products.amax(1).sum(1) * model.scale
        if model.num_heads == self.group.lane_heads:
            return raw, raw
        shares = raw - raw.logsumexp(1, keepdim=True)
        return raw, shares.unflatten(0, (self.group.lane_heads, -1)).logsumexp(1)


@pytest.fixture(scope="session")
def world():
    return World


@pytest.fixture(scope="session")
def bits():
    """Two sets of pools, compared bit for bit."""

    def same(first, second):
        return all(
            torch.equal(first[name].view(torch.uint8), second[name].view(torch.uint8))
            for name in first
        )

    return same


def pytest_generate_tests(metafunc):
    if {"impl", "device"} <= set(metafunc.fixturenames):
        gpu = [pytest.mark.gpu, pytest.mark.skipif(not CUDA, reason="needs a CUDA device")]
        cases = [
            pytest.param("reference", "cpu"),
            pytest.param("reference", "cuda", marks=gpu),
            pytest.param("triton", "cuda", marks=gpu),
        ]
        if not CUDA:
            cases.append(pytest.param("triton", "cpu"))
        metafunc.parametrize(("impl", "device"), cases)
    if "metadata" in metafunc.fixturenames:
        metafunc.parametrize("metadata", ["bf16", "int8"])
    if "scope" in metafunc.fixturenames:
        metafunc.parametrize("scope", ["kv_head", "shared"])
