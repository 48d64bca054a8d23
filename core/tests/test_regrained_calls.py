"""Calls of an algorithm of tokens where units are larger, and the views that it is given."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.machines.regrained import COMPETING_TOKENS, SCRIPTED_TOKENS
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    doubles,
    make_coordinator,
)
from topkv_testing.tiers import tier

UNIT, SELECT = 4, 5


def make(**options):
    """Make a coordinator with units of 4 tokens, of which 5 are selected."""
    sizes = {"unit": UNIT, "budget": UNIT + SELECT, "buffer": UNIT * SELECT, "ring_tokens": 8}
    return make_coordinator(
        tier("cpu"),
        registry=doubles(SCRIPTED_TOKENS, COMPETING_TOKENS),
        stages=["to_units"],
        **{"algorithm": "scripted_tokens", **sizes, **options},
    )


class Calls:
    """One request of a coordinator whose algorithm records its calls.

    Attributes:
        seen: arguments of each call of ``construct`` and ``settle`` in the first sparse layer.
        keys: keys ``[n, Hkv, D]`` that this layer was given.
    """

    def __init__(self, monkeypatch, **options):
        self.coordinator = make(**options)
        self.slot = self.coordinator.request_begin()
        self.generator = torch.Generator().manual_seed(0)
        self.keys, self.seen = torch.empty(0, KV_HEADS, DIM), []
        self.algorithm = self.coordinator.layers[0].algorithm.algorithm
        construct, settle = self.algorithm.construct, self.algorithm.settle

        def note_construct(layer, slot, start, k, v, q, lse):
            construct(layer, slot, start, k, v, q, lse)
            if layer.layer == 0:
                self.seen.append(("construct", start, k.clone()))

        def note_settle(layer, slot, since, length, history):
            blocks = [(first, k.clone(), v.clone()) for first, k, v in history]
            settle(layer, slot, since, length, blocks)
            if layer.layer == 0:
                self.seen.append(("settle", since, length, blocks))

        monkeypatch.setattr(self.algorithm, "construct", note_construct)
        monkeypatch.setattr(self.algorithm, "settle", note_settle)

    def run(self, count, decode=False):
        """Run a forward of one chunk, or ``count`` decode steps."""
        for tokens in [1] * count if decode else [count]:
            rows = [self.slot] if decode else []
            self.coordinator.forward_begin(rows, [] if decode else [(self.slot, tokens)])
            for layer in range(LAYERS):
                q = torch.randn(tokens, HEADS, DIM, generator=self.generator)
                k, v = torch.randn(2, tokens, KV_HEADS, DIM, generator=self.generator)
                self.coordinator.attention(layer, q, k, v)
                if layer == 0:
                    self.keys = torch.cat([self.keys, k])
            self.coordinator.forward_end()


def test_construct_starts_at_the_token(monkeypatch):
    """A unit of one token is never open, so nothing stands before a chunk."""
    calls = Calls(monkeypatch)
    starts = []
    for count in (6, 1, 7):
        starts.append((len(calls.keys), count))
        calls.run(count)
    for (_, start, k), (first, count) in zip(calls.seen, starts, strict=True):
        assert (start, len(k)) == (first, count)
        assert torch.equal(k, calls.keys[first : first + count])
    calls.coordinator.close()


@pytest.mark.parametrize("prompt", [7, 8, 9])
def test_settle_reads_from_the_token_on(monkeypatch, prompt):
    """Pages are read from the edge of a unit on; tokens before ``since`` are left out."""
    calls = Calls(monkeypatch)
    for count, decode in ((prompt, False), (2, True), (11, False), (1, True)):
        calls.run(count, decode)
    settles = [call[1:] for call in calls.seen if call[0] == "settle"]
    assert [(since, length) for since, length, _ in settles] == [
        (0, prompt),
        (prompt, prompt + 13),
    ]
    for since, length, blocks in settles:
        assert blocks[0][0] == since
        keys = torch.cat([k for _, k, _ in blocks])
        assert torch.equal(keys, calls.keys[since:length])
        for (first, k, _), (second, *_) in pairwise(blocks):
            assert first + len(k) == second
    calls.coordinator.close()


def test_settle_may_ask_for_everything(monkeypatch):
    calls = Calls(monkeypatch, params={"settle_whole": True})
    for count, decode in ((7, False), (2, True), (11, False), (1, True)):
        calls.run(count, decode)
    last = calls.seen[-1]
    assert last[:3] == ("settle", 7, 20)
    assert last[3][0][0] == 0
    assert torch.equal(torch.cat([k for _, k, _ in last[3]]), calls.keys[:20])
    calls.coordinator.close()


def test_the_algorithm_is_shown_tokens_and_the_backend_units():
    coordinator = make(
        layers={"1": "resident", "2": "streamed", "3": {"unit": 1, "buffer": 8, "stages": []}}
    )
    first, other = coordinator.layers[0], coordinator.layers[3]
    assert (first.view.group.unit, first.selector.view.group.unit) == (UNIT, 1)
    assert first.selector.view.group is first.algorithm.group is first.algorithm.algorithm.group
    assert first.selector.view.step is first.view.step
    assert first.selector.view.pools is first.view.pools
    assert first.selector.view.ring_k.shape == (4, KV_HEADS, 0, 1, 1, DIM)
    assert first.selector.view.ring_v.numel() == 0
    # A key for each token of each page, as at unit 1.
    assert first.selector.view.pools["sums"].shape[0] == coordinator.config.num_pages * 4
    assert other.selector.view is other.view
    coordinator.close()


@pytest.mark.parametrize("tail", ["forced", "selectable"])
def test_the_open_unit_is_attended_and_listed_once(tail):
    """Once, with an algorithm that lets the newest token compete and with one that does not."""
    algorithm = "scripted_tokens" if tail == "forced" else "competing_tokens"
    coordinator = make(algorithm=algorithm, layers={"1-": "resident"})
    slot = coordinator.request_begin()
    generator = torch.Generator().manual_seed(0)

    def rows(count, heads):
        return torch.randn(count, heads, DIM, generator=generator)

    def forward(count, **what):
        coordinator.forward_begin(**what)
        for layer in range(LAYERS):
            coordinator.attention(layer, rows(count, HEADS), *(rows(count, KV_HEADS),) * 2)
        coordinator.forward_end()

    forward(13, prefill=[(slot, 13)])
    lanes, algorithm = coordinator.layers[0].lanes, coordinator.layers[0].algorithm.algorithm
    algorithm.next_ids[0] = torch.tensor([[13, 12, 7, -1, 5], [3, 0, 1, 2, 11]]).int()
    forward(1, decode=[slot])
    assert lanes.selection.ids.tolist() == [[1, -1, -1, -1, -1], [0, 2, -1, -1, -1]]
    assert lanes.tables.table.shape[1] == SELECT + 1
    assert lanes.tables.lengths.tolist() == [UNIT + 2, 2 * UNIT + 2]
    coordinator.close()
