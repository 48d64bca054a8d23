"""Contracts of the coordinator with engines and algorithms beyond a plain step."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.coordinator import SparseCoordinator
from topkv.errors import ConfigError, RequestError
from topkv.hooks.algorithm import AlgorithmSpec
from topkv.ops.chunk_attention import add_sinks
from topkv.plugins.discovery import hookimpl
from topkv_testing.doubles import SCRIPTED, Scripted
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    MODEL,
    doubles,
    make_coordinator,
)
from topkv_testing.oracle import attention
from topkv_testing.tiers import tier

CPU = tier("cpu")


class Reported(Scripted):
    """Records its calls, and reads its history twice."""

    def __init__(self, setup):
        super().__init__(setup)
        self.truncations, self.histories, self.values = [], [], []

    @hookimpl
    def truncated(self, layer, slot, length):
        self.truncations.append((layer.layer, slot, length))

    @hookimpl
    def settle(self, layer, slot, since, length, history):
        self.histories.append([[(start, len(k)) for start, k, _ in history] for _ in range(2)])

    @hookimpl
    def construct(self, layer, slot, start, k, v, q, lse):
        super().construct(layer, slot, start, k, v, q, lse)
        self.values.append((start, v.clone()))

    @hookimpl
    def update(self, layer, k, v):
        super().update(layer, k, v)
        self.values.append((int(layer.step.lengths[0]) - 1, v[0].clone()))


class FarSighted(Scripted):
    """Reads more of the ring than two units."""

    @hookimpl
    def spec(self):
        return evolve(super().spec(), ring_tokens=12)


REPORTED = evolve(SCRIPTED, name="reported", factories=f"{__name__}:Reported")
FAR = evolve(SCRIPTED, name="far", factories=f"{__name__}:FarSighted")


class Run:
    """A coordinator and random rows for it."""

    def __init__(self, **options):
        registry = doubles(REPORTED, FAR)
        self.coordinator = make_coordinator(CPU, registry=registry, **options)
        self.generator = torch.Generator().manual_seed(0)

    def rows(self, count):
        return [
            torch.randn(LAYERS, count, heads, DIM, generator=self.generator)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        ]

    def forward(self, given, decode=(), prefill=(), sinks=None):
        """Run a forward; return outputs ``[L, rows, H, D]``."""
        self.coordinator.forward_begin(decode=decode, prefill=prefill)
        outs = [
            self.coordinator.attention(layer, *(x[layer] for x in given), sinks=sinks)
            for layer in range(LAYERS)
        ]
        self.coordinator.forward_end()
        return torch.stack(outs)


@pytest.fixture
def run():
    made = []

    def run(**options):
        made.append(Run(**options))
        return made[-1]

    yield run
    for each in made:
        each.coordinator.close()


def test_rows_may_lie_at_any_stride(run):
    one, two = run(), run()
    for each in (one, two):
        each.coordinator.request_begin()
        each.forward(each.rows(7), prefill=[(0, 7)])
    given = one.rows(2)
    wide = [torch.nn.functional.pad(x, (0, 0, 0, 5), value=float("nan")) for x in given]
    apart = [x[:, :, : y.shape[2]] for x, y in zip(wide, given, strict=True)]
    for what in ({"decode": [0, -1]}, {"prefill": [(0, 2)]}):
        torch.testing.assert_close(
            one.forward(given, **what), two.forward(apart, **what), rtol=0, atol=0
        )


def test_sinks_are_logits_without_a_value(run):
    """A sink acts in prompts and steps as one more key with that logit and a value of zero."""
    each = run(layers={"0-": "resident"}, algorithm="scripted")
    each.coordinator.request_begin()
    sinks = torch.randn(HEADS, generator=each.generator)
    keys = [torch.zeros(LAYERS, 0, KV_HEADS, DIM) for _ in range(2)]
    for what, count in (
        ({"prefill": [(0, 6)]}, 6),
        ({"prefill": [(0, 3)]}, 3),
        ({"decode": [0]}, 1),
    ):
        given = each.rows(count)
        start = keys[0].shape[1]
        keys = [torch.cat([old, new], 1) for old, new in zip(keys, given[1:], strict=True)]
        outs = each.forward(given, sinks=sinks, **what)
        for layer in range(LAYERS):
            for row in range(count):
                k, v = (x[layer, : start + row + 1].double() for x in keys)
                out, lse = attention(given[0][layer, row : row + 1], k, v, MODEL.scale)
                share = lse.exp() / (lse.exp() + sinks.double().exp())
                torch.testing.assert_close(
                    outs[layer, row].double(), (out * share[..., None])[0], rtol=1e-5, atol=1e-6
                )


def test_a_sink_far_above_all_logits_leaves_nothing():
    out, lse = torch.ones(2, 3, 4), torch.tensor([[0.0, -torch.inf, 5.0]]).expand(2, 3).clone()
    add_sinks(out, lse, torch.tensor([500.0, 0.0, -500.0]))
    assert out.tolist() == [[[0.0] * 4, [0.0] * 4, [1.0] * 4]] * 2


def test_bytes_are_reported_before_they_are_taken(run):
    coordinator = run().coordinator
    taken = coordinator.memory()
    reported = SparseCoordinator.required_bytes(coordinator.config, doubles())
    assert reported == taken
    assert reported.host > 0
    assert reported.host_used == 0


def test_how_many_tokens_may_follow_a_prompt_is_reported(run):
    assert run().coordinator.requests.generated == 2**31 - 1
    assert run(params={"generated": 7}).coordinator.requests.generated == 7


def test_a_ring_that_is_too_short_for_the_algorithm_is_refused(run):
    with pytest.raises(
        ConfigError, match="far reads a ring of at least 12 tokens, got 4; raise ring"
    ):
        run(algorithm="far")
    run(algorithm="far", ring_tokens=12)


def test_an_algorithm_hears_of_tokens_that_are_gone(run):
    each = run(algorithm="reported")
    slot = each.coordinator.request_begin()
    each.forward(each.rows(9), prefill=[(slot, 9)])
    each.forward(each.rows(1), decode=[slot])
    each.coordinator.rollback(slot, 9)
    each.coordinator.truncate(slot, 4)
    reported = each.coordinator.layers[0].algorithm.truncations
    assert reported == [(0, slot, 9), (3, slot, 9), (0, slot, 4), (3, slot, 4)]


def test_a_history_can_be_read_again_and_values_come_along(run):
    each = run(algorithm="reported", layers={"1-": "resident"})
    slot = each.coordinator.request_begin()
    given = [each.rows(7), each.rows(6), each.rows(1)]
    each.forward(given[0], prefill=[(slot, 7)])
    each.forward(given[1], prefill=[(slot, 6)])
    each.forward(given[2], decode=[slot])
    algorithm = each.coordinator.layers[0].algorithm
    assert algorithm.histories == [[[(0, 8), (8, 5)]] * 2]
    values = torch.cat([v[0] for _, _, v in given])
    for start, seen in algorithm.values:
        torch.testing.assert_close(seen, values[start : start + len(seen)], rtol=0, atol=0)
    assert [start for start, _ in algorithm.values] == [0, 6, 13]


def test_a_prompt_is_settled_and_warmed_when_an_engine_asks(run):
    """The forward that decodes it has neither left to do, and gives equal outputs."""
    early, late = run(algorithm="reported"), run(algorithm="reported")
    outputs = []
    for each in (early, late):
        slot = each.coordinator.request_begin()
        each.forward(each.rows(9), prefill=[(slot, 9)])
        if each is early:
            each.coordinator.settle([slot])
            assert len(each.coordinator.layers[0].algorithm.histories) == 2
        outputs.append(each.forward(each.rows(1), decode=[slot]))
        assert len(each.coordinator.layers[0].algorithm.histories) == 2
    assert torch.equal(*outputs)
    with pytest.raises(RequestError, match="slot 3 holds no request"):
        early.coordinator.settle([3])
    early.coordinator.forward_begin()
    with pytest.raises(RequestError, match="settle during a forward"):
        early.coordinator.settle([slot])


def test_a_spec_says_what_another_request_may_take_over():
    assert AlgorithmSpec().prefix == "pages"
    with pytest.raises(ValueError, match="prefix"):
        AlgorithmSpec(prefix="all")


def test_a_spec_says_which_heads_a_selection_goes_by():
    assert AlgorithmSpec().heads == "own"
    with pytest.raises(ValueError, match="heads"):
        AlgorithmSpec(heads="some")


def test_a_flush_is_one_launch_a_group(monkeypatch):
    """One launch however many layers and lanes there are, and nothing is read from the device."""
    on = tier("interpret")
    if on.missing:
        pytest.skip(on.missing)
    from topkv.transfer import kernels

    kernel, grids = kernels.offload_kernel, []

    class Counted:
        def __getitem__(self, grid):
            grids.append(grid)
            return kernel[grid]

    monkeypatch.setattr(kernels, "offload_kernel", Counted())
    coordinator = make_coordinator(on)  # takes its kernels when it is made
    slot = coordinator.request_begin()
    coordinator.forward_begin(prefill=[(slot, 5)])
    coordinator.forward_abort()
    coordinator.requests.dirty[slot], coordinator.requests.length[slot] = True, 5
    coordinator.flush(slot)
    sparse = [group for group in coordinator.manager.groups if group.residency == "sparse"]
    assert grids == [(group.lane_heads, len(group.layers), 1) for group in sparse]
    coordinator.close()
