"""Requests that give pages back: all tokens that are left are attended, and no others.

``run_dropping(on)`` draws lives of requests on a coordinator whose stage lets pages go, beside a
plain list of the tokens that are left. Attention is that of float64 over the list, in sparse,
resident and streamed layers, in steps and in further prompts.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.integrity import check_integrity
from topkv_testing.kit import examples
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    REQUESTS,
    SPARSE,
    doubles,
    make_coordinator,
)
from topkv_testing.models.oracle import attention
from topkv_testing.models.stage_doubles import EVERYTHING, HEAVY
from topkv_testing.tiers import Tier

PAGE, TOKENS, EVERY, RECENT = 4, 16, 5, 4
STAGE: dict[str, Any] = {
    "name": "heavy",
    "params": {"tokens": TOKENS, "every": EVERY, "recent": RECENT},
}
OPTIONS: dict[str, Any] = {
    "registry": doubles(HEAVY, EVERYTHING),
    "algorithm": "everything",
    "stages": [STAGE],
    "scope": "kv_head",
    "budget": 48,
    "buffer": 48,
}


def worth(keys: Tensor, channel: int) -> np.ndarray:
    """Score each full page of the remaining ``keys [L, n, Hkv, D]``, by loops."""
    keys = keys[..., channel]
    pages = keys.shape[1] // PAGE
    total = np.zeros(pages)
    for layer in SPARSE:
        lanes = []
        for head in range(KV_HEADS):
            scores = np.array(
                [
                    float(keys[layer, p * PAGE : (p + 1) * PAGE, head].double().square().sum())
                    for p in range(pages)
                ]
            )
            lanes.append((scores - scores.mean()) / (scores.std() or 1.0))
        total += np.mean(lanes, 0)
    return total


class Lives:
    """A coordinator beside the remaining keys and values ``[2, L, n, Hkv, D]`` of each request.

    Attributes:
        dropped: tokens of each request that were given back.
    """

    def __init__(self, on: Tier, first: int = 0, **options: Any) -> None:
        params = STAGE["params"] | {"first": first}
        options = OPTIONS | {"stages": [STAGE | {"params": params}]} | options
        self.coordinator = make_coordinator(on, **options)
        self.first = first
        self.left: dict[int, Tensor] = {}
        self.dropped: dict[int, int] = {}
        self.random = torch.Generator().manual_seed(7)

    def drop(self, slot: int) -> None:
        """Drop the pages that have to go before a request decodes."""
        length = self.left[slot].shape[2]
        if length < TOKENS + EVERY:
            return
        first, end = -(-self.first // PAGE), (length - RECENT) // PAGE
        count = min(-(-(length - TOKENS) // PAGE), end - first)
        if count <= 0:
            return
        position = length + self.dropped[slot]
        values = worth(self.left[slot][0], position // PAGE % DIM)[first:end]
        gone = sorted(range(end - first), key=lambda page: (values[page], page))[:count]
        stay = [token for token in range(length) if token // PAGE - first not in gone]
        self.left[slot] = self.left[slot][:, :, stay]
        self.dropped[slot] += count * PAGE

    def begin(self) -> int:
        """Begin a request."""
        slot = self.coordinator.request_begin()
        self.left[slot], self.dropped[slot] = torch.empty(2, LAYERS, 0, KV_HEADS, DIM), 0
        return slot

    def forward(self, tokens: dict[int, int], decode: bool) -> None:
        """Run chunks of ``tokens[slot]``, or a decode step of a token each; compare outputs."""
        for slot in tokens:
            if decode:
                self.drop(slot)
        new = {
            slot: torch.randn(2, LAYERS, count, KV_HEADS, DIM, generator=self.random)
            for slot, count in tokens.items()
        }
        before = {slot: self.left[slot].shape[2] for slot in tokens}
        for slot, rows in new.items():
            self.left[slot] = torch.cat([self.left[slot], rows], 2)
        count = sum(tokens.values())
        q = torch.randn(LAYERS, count, HEADS, DIM, generator=self.random)
        rows = torch.cat([*new.values()], 2)
        c = self.coordinator
        device = c.config.device
        c.forward_begin(**({"decode": [*tokens]} if decode else {"prefill": [*tokens.items()]}))
        for layer in range(LAYERS):
            k, v = rows[:, layer].to(device)
            out = c.attention(layer, q[layer].to(device), k, v).cpu()
            row = 0
            for slot, each in tokens.items():
                for at in range(each):
                    self.compare(slot, layer, q[layer, row], out[row], before[slot] + at + 1)
                    row += 1
        c.forward_end()
        for slot in tokens:
            assert c.length(slot) == self.left[slot].shape[2]
            assert c.requests.dropped[slot] == self.dropped[slot]

    def compare(self, slot: int, layer: int, q: Tensor, out: Tensor, seen: int) -> None:
        """Compare a row with attention over the first ``seen`` tokens that are left."""
        keys, values = self.left[slot][:, layer, :seen].double()
        for head in range(KV_HEADS):
            heads = slice(head * HEADS // KV_HEADS, (head + 1) * HEADS // KV_HEADS)
            k, v = (each[:, head : head + 1] for each in (keys, values))
            expected, _ = attention(q[None, heads].double(), k, v, DIM**-0.5)
            torch.testing.assert_close(out[heads].double(), expected[0], rtol=0, atol=2e-5)

    def check(self) -> None:
        """Assert that the pages are those of the remaining tokens, shared ones counted once."""
        check_integrity(self.coordinator)
        held = {page for slot in self.left for page in self.coordinator.requests.pages.of(slot)}
        assert self.coordinator.manager.host.used == len(held)
        assert 0 not in held

    def close(self) -> None:
        """End all requests, and assert that no page is held then."""
        for slot in [*self.left]:
            self.coordinator.request_end(slot)
            del self.left[slot]
        self.check()
        self.coordinator.close()


def act(lives: Lives, data: st.DataObject) -> None:
    """Draw one thing that may happen to a request, and do it."""
    if len(lives.left) < REQUESTS and data.draw(st.booleans(), "begin"):
        lives.forward({lives.begin(): data.draw(st.integers(1, 30), "prompt")}, decode=False)
        return
    if not lives.left:
        return
    slots = data.draw(st.lists(st.sampled_from([*lives.left]), min_size=1, unique=True), "slots")
    slot, length = slots[0], lives.left[slots[0]].shape[2]
    often = (*["decode"] * 8, "chunk", "fork", "rollback", "truncate", "abort", "end")
    does = data.draw(st.sampled_from(often), "does")
    c = lives.coordinator
    if does == "decode":
        for _ in range(data.draw(st.integers(1, 6), "steps")):
            lives.forward(dict.fromkeys(slots, 1), decode=True)
    elif does == "chunk" and length < 34:
        lives.forward({slot: data.draw(st.integers(2, 12), "chunk")}, decode=False)
    elif does == "fork" and len(lives.left) < REQUESTS:
        twin = c.fork(slot)
        lives.left[twin], lives.dropped[twin] = lives.left[slot], lives.dropped[slot]
        assert c.requests.dropped[twin] == lives.dropped[slot]
    elif does in ("rollback", "truncate"):
        keep = max(1, length - (1 if does == "rollback" else data.draw(st.integers(1, 9), "cut")))
        getattr(c, does)(slot, keep)
        lives.left[slot] = lives.left[slot][:, :, :keep]
    elif does == "abort":
        lives.drop(slot)
        c.forward_begin(decode=[slot])
        c.forward_abort()
    elif does == "end":
        c.request_end(slot)
        del lives.left[slot]


def run_dropping(on: Tier) -> None:
    """Draw lives of requests that give pages back."""

    @examples(on, cpu=30, interpret=2)
    @given(data=st.data())
    def check(data: st.DataObject) -> None:
        lives = Lives(on, first=data.draw(st.sampled_from([0, 3]), "first"))
        try:
            for _ in range(data.draw(st.integers(1, 14), "actions")):
                act(lives, data)
                lives.check()
            lives.close()
        finally:
            lives.coordinator.close()

    check()
