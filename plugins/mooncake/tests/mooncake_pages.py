"""Content that these tests store: pages that follow from their numbers, lives of coordinators.

Run as a program it is another process: it does what its first argument names to a store.
"""

from __future__ import annotations

import json
import sys

import numpy as np
import torch

from tests.machines.engine_pages import SHAPE, run_forward
from tests.machines.handed_over import take
from tests.machines.kept import make_kept
from topkv_mooncake.entry import topkv_register_storages
from topkv_mooncake.storage import MooncakeStorage
from topkv_prefixes.objects import HEADER, problem_of, write_header
from topkv_prefixes.storage import StorageSetup
from topkv_prefixes.stored import StoredSessions
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import params_of
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    LAYERS,
    doubles,
    make_coordinator,
)
from topkv_testing.tiers import tier

SIZE = 200_000
"""Bytes of a page."""

(ENTRY,) = topkv_register_storages()

PROGRAM = __file__

PROMPT = [*range(100, 130)]
ROWS = torch.randn((60, *SHAPE), generator=torch.Generator().manual_seed(1))
QUERIES = torch.randn(LAYERS, 60, HEADS, DIM, generator=torch.Generator().manual_seed(2))


def made(params, memory=None, size=SIZE, **further):
    """Make a storage."""
    memory = np.zeros(0, dtype=np.uint8) if memory is None else memory
    setup = StorageSetup(params_of(ENTRY, {**params, **further}), size + HEADER, memory)
    return MooncakeStorage(setup)


def key_of(number):
    return number.to_bytes(4, "big") * 8


def page(number, size=SIZE):
    """A page that follows from its number: a header, and two parts."""
    body = np.random.default_rng(number).integers(0, 256, size, dtype=np.uint8)
    header = np.zeros(HEADER, dtype=np.uint8)
    write_header(header, key_of(number), bytes(32), [body])
    return [header, body[:1000], body[1000:]]


def put(storage, *numbers):
    """Put pages of these numbers into a storage, and return its answers."""
    return [*storage.put([*map(key_of, numbers)], [page(number) for number in numbers])]


def read(storage, number, size=SIZE):
    """The problem of a stored page, or "absent"."""
    place = [np.zeros(HEADER, dtype=np.uint8), np.zeros(size, dtype=np.uint8)]
    (there,) = storage.get([key_of(number)], [place])
    if not there:
        return "absent"
    return problem_of(place[0], place[1:], key_of(number), bytes(32))


def coordinator(params, **storage):
    """Make a coordinator whose pages go to a store."""
    asked = {"name": "mooncake", "params": params, "least_tokens": 1, **storage}
    return make_kept(tier("cpu"), {"storage": asked}, registry=doubles(ENTRY))


def live(coordinator, steps=3):
    """A prompt and some steps behind it: the tokens that were found, and the outputs."""
    slot = coordinator.keeper.begin(PROMPT)
    found = coordinator.length(slot)
    outputs, pages = [], (len(PROMPT) - 1) // 4 * 4
    for end in [pages, *range(len(PROMPT), len(PROMPT) + 1 + steps)]:
        first = coordinator.length(slot)
        if first >= end:
            continue
        new = {slot: ROWS[first:end]}
        chunks, decode = ([slot], []) if end <= len(PROMPT) else ([], [slot])
        out = run_forward(coordinator, chunks, decode, new, QUERIES[:, first:end])
        outputs.append(out[:, -1])
    coordinator.keeper.publish(slot, PROMPT)
    coordinator.request_end(slot)
    check_integrity(coordinator)
    return found, torch.stack(outputs[-1 - steps :])


def plain():
    """The outputs of a coordinator without a storage."""
    without = make_kept(tier("cpu"))
    try:
        return live(without)[1]
    finally:
        without.close()


def _write_pages(params):
    storage = made(params)
    pages = [page(number) for number in range(8)]
    keys = [key_of(number) for number in range(8)]
    storage.put(keys, pages)
    print("begun", flush=True)
    while True:
        storage.delete(keys[::2])
        storage.put(keys, pages)


def _live(params):
    one = coordinator(params, fetch="wait_complete")
    found, outputs = live(one)
    one.close()
    counts = one.keeper.counts.storage
    print(json.dumps([found, counts.found, counts.stored, outputs.tolist()]), flush=True)


def _take_over(params):
    """Go on with a request that another process has handed over."""
    here = make_coordinator(tier("cpu"))
    with sessions_of(params) as stored:
        slot = take(here, stored["request"])
        length = here.length(slot)
        outputs = go_on(here, slot)
        stored["request"].discard()
    here.close()
    print(json.dumps([length, outputs.tolist()]), flush=True)


def go_on(coordinator, slot, steps=3):
    """The outputs of some steps of a request."""
    outputs = []
    for _ in range(steps):
        at = coordinator.length(slot)
        new = {slot: ROWS[at : at + 1]}
        outputs.append(run_forward(coordinator, [], [slot], new, QUERIES[:, at : at + 1]))
    return torch.cat(outputs, 1)


def sessions_of(params, **options):
    """Sessions in a store."""
    return StoredSessions("mooncake", params, registry=doubles(ENTRY), **options)


if __name__ == "__main__":
    what, given = sys.argv[1:]
    {"write": _write_pages, "live": _live, "take": _take_over}[what](json.loads(given))
