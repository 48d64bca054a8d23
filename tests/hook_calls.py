"""Doubles that record which of their hooks the core calls, to compare with the table of a page.

Calls of a method on its own instance are not the core's, and are not recorded.
"""

from __future__ import annotations

from functools import wraps
from inspect import signature

import torch
from attrs import evolve

from topkv.entries import Capabilities, PluginEntry
from topkv.hooks import algorithm, backend, transfer
from topkv.hooks.algorithm import RepresentationSpec
from topkv.plugins.contract import spec_functions
from topkv.plugins.discovery import hookimpl
from topkv.transfer.reference import ReferenceTransfer
from topkv_testing.models.doubles import GATHER, SCRIPTED, Gather, Scripted

CALLS: list[tuple[str, str]] = []
"""Calls since the last ``clear``: residency of the group, and the call with the arguments of
``SHOWN``. ``spec`` may be called more than once, and is listed once."""

SHOWN = {
    "construct": ("start", "k", "q"),
    "retrieve_prompt": ("start", "q"),
    "settle": ("since", "length"),
    "truncated": ("length",),
    "prefill": ("q_start", "q", "k_start", "k"),
    "prefill_selected": ("q_start", "q", "k_start", "k"),
    "fetch": ("start", "k"),
    "store_chunk": ("start", "k"),
    "flush": ("length",),
    "restore": ("length",),
}
"""Arguments that are recorded with a call; for a tensor its number of rows."""


def recorded(cls, page):
    """Make a subclass of a double whose hooks of ``page`` write to ``CALLS``."""

    def __init__(self, setup):
        group = setup.store.group if hasattr(setup, "store") else setup.group
        self.residency, self.inside = group.residency, False
        cls.__init__(self, setup)

    hooks = {name: noted(getattr(cls, name)) for name in spec_functions(page) if has(cls, name)}
    return type(f"Recorded{cls.__name__}", (cls,), {"__init__": __init__, **hooks})


def has(cls, name):
    return getattr(cls, name, None) is not None


def noted(hook):
    """Wrap a hook, so that it records its call unless the instance calls itself."""
    spec = signature(hook)

    @wraps(hook)
    def call(self, *args, **kwargs):
        if self.inside:
            return hook(self, *args, **kwargs)
        given = spec.bind(self, *args, **kwargs).arguments
        reported = (f"{name}={shown(given[name])}" for name in SHOWN.get(hook.__name__, ()))
        text = f"{hook.__name__}({', '.join(reported)})".removesuffix("()")
        if text != "spec" or (self.residency, text) not in CALLS:
            CALLS.append((self.residency, text))
        self.inside = True
        try:
            return hook(self, *args, **kwargs)
        finally:
            self.inside = False

    return call


def shown(value):
    return len(value) if isinstance(value, torch.Tensor) else int(value)


class Whole(Scripted):
    """The scripted algorithm with ``truncated``, the optional hook for lost tokens."""

    @hookimpl
    def truncated(self, layer, slot, length):
        pass


class Prompting(Whole):
    """An algorithm that selects for the rows of a prompt too: the first units."""

    @hookimpl
    def retrieve_prompt(self, layer, slot, start, q, weights, ids):
        column = torch.arange(ids.shape[2])
        own = (start + torch.arange(len(ids))) // layer.group.unit
        ids.copy_(torch.where(column <= own[:, None, None], column, -1))


class EveryGrain(Scripted):
    """An algorithm with a pool of each grain, none of which it writes."""

    @hookimpl
    def spec(self):
        grains = ("unit", "token", "request")
        pools = (RepresentationSpec(grain, grain, (2,), torch.int64) for grain in grains)
        return evolve(super().spec(), representations=tuple(pools))

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        pass

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        pass

    @hookimpl
    def update(self, layer, k, v):
        pass


RecordedWhole = recorded(Whole, algorithm)
RecordedPrompting = recorded(Prompting, algorithm)
RecordedGather = recorded(Gather, backend)
RecordedTransfer = recorded(ReferenceTransfer, transfer)


def _entry(clean, name, cls):
    return evolve(clean, name=name, factories=f"tests.hook_calls:{cls.__name__}")


ENTRIES = (
    _entry(SCRIPTED, "whole", RecordedWhole),
    _entry(SCRIPTED, "prompting", RecordedPrompting),
    _entry(SCRIPTED, "every_grain", EveryGrain),
    _entry(GATHER, "recorded_gather", RecordedGather),
    PluginEntry(
        "recorded_transfer",
        "transfer",
        "tests.hook_calls:RecordedTransfer",
        capabilities=Capabilities(),
    ),
)
