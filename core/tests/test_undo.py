"""Algorithms that accumulate over steps, as H2O does, and take back what was rejected."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv.errors import RequestError
from topkv.hooks.algorithm import RepresentationSpec
from topkv.plugins.discovery import hookimpl
from topkv_authoring.selectors import host_ids
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    doubles,
    make_coordinator,
)
from topkv_testing.models.doubles import SCRIPTED, Scripted
from topkv_testing.tiers import tier

UNDO, PROMPT = 3, 11


class Accumulates(Scripted):
    """Selects the units that queries have weighed most so far.

    ``mass`` is what each unit was worth in all steps. ``before`` has it as it was before each of
    the last tokens, by position.
    """

    undo = UNDO

    @hookimpl
    def spec(self):
        heads, units = self.group.lane_heads, self.group.max_units
        shapes = {"mass": (heads, units), "before": (UNDO + 1, heads, units)}
        kept = [
            RepresentationSpec(name, "request", shape, torch.float32)
            for name, shape in shapes.items()
        ]
        spec = super().spec()
        return evolve(spec, representations=(*spec.representations, *kept), undo=self.undo)

    @hookimpl
    def retrieve_topk(self, layer, q, weights, out):
        step, group = layer.step, self.group
        out.ids.fill_(-1)
        for row, slot in enumerate(step.slots.tolist()):
            if slot < 0 or not int(step.lengths[row]):
                continue
            newest = int(step.lengths[row]) - 1
            mass, closed = layer.pools["mass"][slot], newest // group.unit
            if int(step.appended[row]):
                layer.pools["before"][slot, newest % (UNDO + 1)] = mass
                for unit in range(closed):
                    kept = layer.pools["sums"][host_ids(layer, slot, unit)].flatten()
                    asked = q[row, 0].flatten(1).float().sum(1).unflatten(0, (len(mass), -1))
                    mass[:, unit] += (asked.sum(1) * kept.sum()).abs()
            best = mass[:, :closed].topk(min(out.ids.shape[1], closed)).indices
            out.ids[row * len(mass) : (row + 1) * len(mass), : best.shape[1]] = best.int()
        return out

    @hookimpl
    def truncated(self, layer, slot, length):
        """The oldest of the positions that were taken back says how it was before all of them."""
        layer.pools["mass"][slot] = layer.pools["before"][slot, length % (UNDO + 1)]


class KeepsRejected(Accumulates):
    """Never takes anything back."""

    @hookimpl
    def truncated(self, layer, slot, length):
        pass


def entry(cls):
    return evolve(SCRIPTED, name="accumulates", factories=f"{__name__}:{cls.__name__}")


class Life:
    """A request whose tokens follow from their position and a salt."""

    def __init__(self, cls):
        self.coordinator = make_coordinator(
            tier("cpu"), registry=doubles(entry(cls)), algorithm="accumulates", ring_tokens=8
        )
        self.slot = self.coordinator.request_begin()
        self.step(PROMPT, 0)

    def step(self, count, salt, dropped=False):
        coordinator = self.coordinator
        length = coordinator.length(self.slot)
        rows, chunks = ([self.slot], []) if length else ([], [(self.slot, count)])
        coordinator.forward_begin(rows, chunks)
        outs = []
        for layer in range(LAYERS):
            generator = torch.Generator().manual_seed(1000 * salt + 10 * length + layer)
            q = torch.randn(count, HEADS, DIM, generator=generator)
            k, v = torch.randn(2, count, KV_HEADS, DIM, generator=generator)
            outs.append(coordinator.attention(layer, q, k, v))
        (coordinator.forward_abort if dropped else coordinator.forward_end)()
        return torch.cat(outs)

    def state(self):
        pools = self.coordinator.manager.representations
        layers = [each.of_layer(0) for each in pools if "mass" in each.of_layer(0)]
        return torch.stack([pools["mass"][self.slot] for pools in layers])


ACTIONS = st.lists(
    st.tuples(st.sampled_from(("keep", "reject", "drop")), st.integers(1, UNDO)), max_size=8
)


def lives(cls, actions):
    """A life in which tokens are rejected and dropped, and one that never had them."""
    tried, plain = Life(cls), Life(cls)
    for turn, (action, count) in enumerate(actions, start=1):
        for nth in range(count):
            salt = turn if action == "keep" else 100 * turn + nth
            out = tried.step(1, salt, action == "drop")
            if action == "keep":
                assert torch.equal(out, plain.step(1, salt))
        if action == "reject":
            length = tried.coordinator.length(tried.slot)
            tried.coordinator.rollback(tried.slot, length - count)
    last = [life.step(1, 7) for life in (tried, plain)]
    for life in (tried, plain):
        life.coordinator.close()
    return last


@settings(max_examples=25, deadline=None)
@given(ACTIONS)
def test_what_was_rejected_or_dropped_leaves_nothing(actions):
    one, other = lives(Accumulates, actions)
    assert torch.equal(one, other)


def test_a_mutant_that_keeps_what_was_rejected_is_seen():
    broken = False
    for salt in range(1, 6):
        actions = [("keep", 2), ("reject", 3), ("keep", salt % UNDO + 1), ("reject", 2)]
        try:
            one, other = lives(KeepsRejected, actions)
        except AssertionError:
            broken = True
        else:
            broken |= not torch.equal(one, other)
    assert broken


def test_more_than_can_be_taken_back_is_refused():
    life = Life(Accumulates)
    for salt in range(UNDO + 1):
        life.step(1, salt)
    length = life.coordinator.length(life.slot)
    for call in (life.coordinator.rollback, life.coordinator.truncate):
        with pytest.raises(RequestError, match=r"last 3 tokens .* and 4 were asked for"):
            call(life.slot, length - UNDO - 1)
    assert life.coordinator.length(life.slot) == length
    life.coordinator.rollback(life.slot, length - UNDO)
    life.coordinator.close()
