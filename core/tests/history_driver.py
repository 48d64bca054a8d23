"""Coordinators that are driven alike, for tests of the fetching of history."""

from __future__ import annotations

import torch

from topkv.errors import HostMemoryError, RequestError
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import DIM, HEADS, KV_HEADS, LAYERS, SPARSE


class Driver:
    """Drives coordinators with equal tokens, queries and selections, and keeps their outputs."""

    def __init__(self, *coordinators):
        self.coordinators = coordinators
        self.random = torch.Generator().manual_seed(7)
        self.outputs = [[] for _ in coordinators]
        self.slots = []

    def close(self):
        for each in self.coordinators:
            check_integrity(each)
            each.close()

    def call(self, name, *args):
        """Call a method of all coordinators; they must answer alike, refusals included."""
        answers = []
        for each in self.coordinators:
            try:
                answers.append(getattr(each, name)(*args))
            except (RequestError, HostMemoryError) as refusal:
                answers.append(str(refusal))
        assert len({str(answer) for answer in answers}) == 1, answers
        return answers[0]

    def begin(self):
        self.slots.append(self.call("request_begin"))

    def forward(self, decode=(), chunks=(), layers=range(LAYERS), drop=False):
        """Run one forward, whose layers are called in this order."""
        if isinstance(self.call("forward_begin", list(decode), list(chunks)), str):
            return
        self.select(len(decode))
        count = len(decode) + sum(tokens for _, tokens in chunks)
        for layer in layers:
            q = torch.randn(count, HEADS, DIM, generator=self.random)
            k, v = torch.randn(2, count, KV_HEADS, DIM, generator=self.random)
            for each, outputs in zip(self.coordinators, self.outputs, strict=True):
                device = each.config.device
                given = q.to(device, copy=True), k.to(device), v.to(device)
                outputs.append(each.attention(layer, *given))
                given[0].fill_(float("nan"))  # a model may write over it
        self.call("forward_abort" if drop else "forward_end")
        for each in self.coordinators:
            for layer in SPARSE:
                each.layers[layer].algorithm.next_ids.clear()

    def select(self, rows):
        """Draw units for every lane of the decode rows."""
        for layer in SPARSE:
            ids = torch.randint(-1, 20, (rows * KV_HEADS, 3), generator=self.random).int()
            for each in self.coordinators:
                chosen = each.layers[layer].algorithm.next_ids
                chosen[layer] = ids.to(each.config.device)

    def compare(self):
        first, *others = ([out.cpu() for out in outputs] for outputs in self.outputs)
        for other in others:
            for number, (a, b) in enumerate(zip(first, other, strict=True)):
                assert torch.equal(a, b), f"attention {number}"


def prompts(driver):
    """Run two prompts in chunks, in one forward, after a dropped one and beside decode; fork."""
    driver.begin()
    driver.begin()
    one, two = driver.slots
    driver.forward(chunks=[(one, 11), (two, 5)])
    driver.forward(chunks=[(one, 9)])
    driver.forward(chunks=[(one, 8), (two, 13)], layers=range(2), drop=True)
    driver.forward(chunks=[(two, 6), (one, 7)])
    driver.forward([two], [(one, 1)])
    driver.call("rollback", one, 26)
    driver.forward(chunks=[(one, 8), (two, 3)], layers=[1, 0, 3, 2])
    twin = driver.call("fork", one)
    driver.forward(chunks=[(twin, 5), (two, 2), (one, 4)])
    driver.forward([one, twin, two])
