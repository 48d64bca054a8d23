"""Random lives of caches: chunks, single tokens, drafts, forks, crops and ends, in any order.

Where the budget covers a sequence, each forward gives the logits of the stock model over all of
its tokens at once.
"""

from __future__ import annotations

import copy

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import topkv

pytestmark = pytest.mark.slow

LONGEST = 90
"""Tokens of a row."""

DRAFTS = 4
"""Most tokens that a step verifies."""

ACTIONS = ("chunk", "chunk", "token", "token", "drafts", "drafts", "fork", "crop", "close")


class Life:
    """Caches of one model, and the tokens that each has seen.

    Args:
        model: attached.
        twins: the stock model in fp32 and in float64.
        handle: what attached it.
        rows: of each cache.
    """

    def __init__(self, model, twins, handle, rows):
        self.model, self.twins, self.handle, self.rows = model, twins, handle, rows
        self.caches = []

    def begin(self):
        nothing = torch.zeros((self.rows, 0), dtype=torch.long, device=self.model.device)
        self.caches.append((self.handle.new_cache(), nothing))

    def forward(self, at, new, check):
        """Feed a cache further tokens ``[rows, n]``; the logits of the last n are right."""
        cache, seen = self.caches[at]
        seen = torch.cat([seen, new], 1)
        self.caches[at] = (cache, seen)
        ours = self.model(new, past_key_values=cache).logits.double()
        stock, truth = (twin(seen).logits[:, -new.shape[1] :].double() for twin in self.twins)
        check.close(ours, stock, truth)

    def verify(self, at, new, rejected, check):
        """Feed tokens in one step, as ``generate`` does with drafts, and take some back."""
        cache, seen = self.caches[at]
        cache.state.most = DRAFTS
        try:
            self.forward(at, new, check)
            self.crop(at, seen.shape[1] + new.shape[1] - rejected)
        finally:
            cache.state.most = 1

    def fork(self, at):
        cache, seen = self.caches[at]
        self.caches.append((copy.deepcopy(cache), seen))

    def crop(self, at, length):
        cache, seen = self.caches[at]
        cache.crop(length - seen.shape[1])
        self.caches[at] = (cache, seen[:, :length])

    def close(self, at):
        self.caches.pop(at)[0].close()


def live(data, life, check):
    """Draw what happens, and let it happen."""
    most = life.handle.coordinator.config.max_requests // life.rows
    tokens = torch.Generator().manual_seed(data.draw(st.integers(0, 2**16), "seed"))
    for _ in range(data.draw(st.integers(3, 10), "actions")):
        if not life.caches:
            life.begin()
        at = data.draw(st.integers(0, len(life.caches) - 1), "cache")
        length = life.caches[at][1].shape[1]
        action = data.draw(st.sampled_from(ACTIONS), "action")
        if action in ("chunk", "token") and length < LONGEST:
            most_new = min(40, LONGEST - length) if action == "chunk" else 1
            shape = (life.rows, data.draw(st.integers(1, most_new), "tokens"))
            new = torch.randint(2, 96, shape, generator=tokens).to(life.model.device)
            life.forward(at, new, check)
        elif action == "drafts" and 0 < length <= LONGEST - DRAFTS:
            count = data.draw(st.integers(1, DRAFTS), "drafts")
            new = torch.randint(2, 96, (life.rows, count), generator=tokens).to(life.model.device)
            life.verify(at, new, data.draw(st.integers(0, count - 1), "rejected"), check)
        elif action == "fork" and len(life.caches) < most and length:
            life.fork(at)
        elif action == "crop" and length > 1:
            life.crop(at, data.draw(st.integers(1, length - 1), "length"))
        elif action == "close":
            life.close(at)
    while life.caches:
        life.close(0)


def test_lives(tiny, check):
    model = tiny.model("qwen3")
    twins = copy.deepcopy(model), copy.deepcopy(model).double()

    @torch.no_grad()
    @given(st.data())
    def check_lives(data):
        settings = tiny.settings(
            unit=data.draw(st.sampled_from([1, 4, 16]), "unit"),
            ring_tokens=32,
            max_queries=DRAFTS,
            resident_fast_path=data.draw(st.booleans(), "fast"),
            scope=data.draw(st.sampled_from(["kv_head", "shared"]), "scope"),
            dense_layers=data.draw(st.sampled_from([[], [0], [1]]), "dense"),
        )
        with topkv.attach(model, settings) as handle:
            live(data, Life(model, twins, handle, data.draw(st.integers(1, 2), "rows")), check)
            check.all_free(handle)

    check_lives()
