"""Prompts and steps of coordinators over a storage, for tests of what it keeps."""

from __future__ import annotations

import torch

from tests.machines.engine_pages import SHAPE, run_forward
from tests.machines.kept import make_kept
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import DIM, HEADS, LAYERS
from topkv_testing.tiers import tier

PROMPT = list(range(100, 130))
ROWS = torch.randn((60, *SHAPE), generator=torch.Generator().manual_seed(1))
QUERIES = torch.randn(LAYERS, 60, HEADS, DIM, generator=torch.Generator().manual_seed(2))


class Maker:
    """Makes coordinators over the shelf ``test``, and closes them at the end."""

    def __init__(self):
        self.made = []

    def __call__(self, options=(), params=(), **storage):
        """Make a coordinator; keywords go into the parameter ``storage``."""
        storage = {"name": "shelf", "params": {"shelf": "test"}, "least_tokens": 1, **storage}
        params = {"storage": storage, **dict(params)}
        self.made.append(make_kept(tier("cpu"), params, **dict(options)))
        return self.made[-1]

    def close(self):
        for coordinator in self.made:
            coordinator.close()


def run(coordinator, tokens=PROMPT, salt=b"", steps=3):
    """Run a prompt and some steps; return the number of found tokens, and the outputs."""
    slot = coordinator.keeper.begin(tokens, salt)
    found = coordinator.length(slot)
    outputs, pages = [], (len(tokens) - 1) // 4 * 4
    for end in [pages, *range(len(tokens), len(tokens) + 1 + steps)]:
        first = coordinator.length(slot)
        if first >= end:
            continue
        new = {slot: ROWS[first:end]}
        chunks, decode = ([slot], []) if end <= len(tokens) else ([], [slot])
        outputs.append(run_forward(coordinator, chunks, decode, new, QUERIES[:, first:end])[:, -1])
    coordinator.keeper.publish(slot, tokens, salt)
    coordinator.request_end(slot)
    check_integrity(coordinator)
    return found, torch.stack(outputs[-1 - steps :])


def stored(coordinator):
    """Wait until everything is stored, and return the storage's counts."""
    coordinator.keeper.storage.wait()
    return coordinator.keeper.counts.storage
