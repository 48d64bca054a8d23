"""Histories of requests whose prompts begin alike, and coordinators that live them."""

from __future__ import annotations

import random
from contextlib import contextmanager

import pytest
import torch
from hypothesis import strategies as st

from tests.machines.engine_pages import SHAPE, run_forward
from tests.machines.kept import keeping
from topkv.prompts import prefill
from topkv_files.entry import topkv_register_storages
from topkv_prefixes import fetching
from topkv_prefixes.calls import Workers
from topkv_simulate import tiers as simulated
from topkv_simulate.tiers import Sizes
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import DIM, HEADS, LAYERS, doubles, make_coordinator
from topkv_testing.tiers import tier

RUNNING = 2
"""Requests of a history that run at a time."""

PAGES = 24, 28, 60
"""Pages of host pools in which ``RUNNING`` requests always fit: a prompt, its answer and a copy
take ten."""

HISTORIES = st.integers(0, 2**32).map(lambda seed: history_of(random.Random(seed)))
"""Histories, drawn evenly: most that hypothesis likes to draw fit into any host pool."""


def history_of(draw):
    """Draw mostly long prompts, of which a few begin alike: where each turns, how it goes on, and
    its tokens."""
    steps = []
    for _ in range(draw.randint(10, 20)):
        prompt = draw.randint(0, 3), draw.randint(1, 5), draw.choice([3, 13, 24, 29, 30, 30])
        steps.append(
            draw.choice(
                [
                    *6 * [("run", prompt, draw.randint(0, 6), draw.choice([b"", b"", b"x"]))],
                    ("fetch", prompt),
                    ("fork",),
                    ("again", draw.randint(0, 12)),
                    ("forget", draw.random() < 0.3),
                ]
            )
        )
    return steps


def prompt_of(drawn):
    turn, other, count = drawn
    return ([0, 1, 1, 2] * (2 * turn) + [other] * 32)[:count]


def unattended(backend, q, start, blocks, out, chosen=None):
    """Write zeros as attention: nobody looks at them."""
    out.zero_()
    return q.new_zeros(q.shape[:2])


@contextmanager
def in_order(pages_a_call):
    """Do everything that threads do for a storage at once, in calls of few pages."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prefill, "chunk_attention", unattended)
        patch.setattr(Workers, "add", lambda self, job: job())
        patch.setattr(fetching, "MOST_PAGES", pages_a_call)
        patch.setattr(simulated, "MOST_PAGES", pages_a_call)
        yield


def coordinator_of(path, pages, objects=None, write="write_through", least=1):
    """Make a coordinator of some host pages, over files of which some fit."""
    storage = None
    if objects is not None:
        size = OBJECT * objects
        storage = {
            "name": "files",
            "params": {"path": str(path), "limit": size, "sync": False},
            "write": write,
            "fetch": "wait_complete",
            "least_tokens": least,
        }
    return make_coordinator(
        tier("cpu"),
        registry=doubles(*topkv_register_storages()),
        max_tokens=(pages - 5) * 4,
        pages=keeping(storage=storage),
    )


def sizes_of(asked, pages, objects=None, write="write_through", least=1):
    """Return the sizes of ``coordinator_of`` for the simulator."""
    return Sizes(asked.page_bytes * pages, (objects or 0) * OBJECT, write, least)


OBJECT = 4096 + 1152
"""Bytes of a stored page of these coordinators: a header and the page; ``test_tiers`` compares
them with the coordinators' own."""


class Life:
    """A coordinator that lives a history.

    Attributes:
        reported: for each prompt its tokens, the found ones among them, and pages that came from
            the storage until then.
    """

    def __init__(self, coordinator, settle=lambda: None):
        self.coordinator, self.settle, self.reported = coordinator, settle, []
        self.running = []  # slot, tokens, salt

    def live(self, history):
        for kind, *drawn in history:
            getattr(self, kind)(*drawn)
            self.settle()
        while self.running:
            self.end()
        check_integrity(self.coordinator)
        return self.reported

    def run(self, drawn, answer, salt):
        """Run a prompt, and an answer behind it."""
        if len(self.running) == RUNNING:
            self.end()
        tokens, prefixes = prompt_of(drawn), self.coordinator.keeper
        slot = prefixes.begin(tokens, salt)
        counts = prefixes.counts.storage
        found = self.coordinator.length(slot)
        self.reported.append((len(tokens), found, counts.found // 4 if counts else 0))
        self.settle()
        self.append(slot, len(tokens) - found)
        prefixes.publish(slot, tokens, salt)
        self.settle()
        tokens = [*tokens, *[5] * answer]
        self.append(slot, answer)
        self.running.append((slot, tokens, salt))

    def append(self, slot, count):
        if count:
            new = {slot: torch.zeros(count, *SHAPE)}
            q = torch.zeros(LAYERS, count, HEADS, DIM)
            run_forward(self.coordinator, [slot], [], new, q)

    def end(self):
        slot, tokens, salt = self.running.pop(0)
        self.coordinator.keeper.publish(slot, tokens, salt)
        self.settle()
        self.coordinator.request_end(slot)

    def fetch(self, drawn):
        self.coordinator.keeper.fetch(prompt_of(drawn), b"")

    def fork(self):
        """Fork a request, and go on with both."""
        if not self.running:
            return
        if len(self.running) == RUNNING:
            self.end()
        slot, tokens, salt = self.running[-1]
        twin = self.coordinator.fork(slot)
        self.append(twin, 1)
        self.running.append((twin, [*tokens, 6], salt))

    def again(self, less):
        """Cut a request, and go on with other tokens."""
        if not self.running:
            return
        slot, tokens, salt = self.running.pop()
        length = max(0, len(tokens) - less)
        self.coordinator.truncate(slot, length)
        self.append(slot, 2)
        self.running.append((slot, [*tokens[:length], 7, 7], salt))

    def forget(self, stored):
        self.coordinator.keeper.forget(stored)
