"""A state machine of the whole life of requests, on a transfer engine of your choice.

A coordinator with two sparse layers, a resident and a streamed one decodes what hypothesis draws,
on the doubles ``scripted`` and ``gather``. Beside it runs a model in plain Python: tokens of
each request, ordered LRU lists, numbered pages, attention in float64. After every call the two are
compared: outputs, buffer order, maps, entries on both tiers, ring, representations, page tables,
poison of freed memory. At the end everything is free.

To run it for an engine of your own, which has to follow ``topkv.hooks.transfer`` and the policy
``lru``::

    from topkv.plugins import PluginRegistry
    from topkv_testing.doubles import Entries
    from tests.machines.lifecycle import run_lifecycle
    from topkv_testing.tiers import tier

    registry = PluginRegistry([("my-tests", "0", Entries(MY_ENTRY))])

    def test_lifecycle():
        run_lifecycle(tier("cpu"), MY_ENTRY.name, registry)

``lifecycle_machine`` gives the class alone, to be driven by hand or with other settings.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from tests.machines.lifecycle_calls import Calls, any_live
from tests.machines.lifecycle_checks import Checks
from tests.machines.lifecycle_forward import Forwards
from topkv.plugins import PluginRegistry
from topkv.types import newest_units
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import examples
from topkv_testing.machines.lifecycle_model import (
    LAYERS,
    REQUESTS,
    SPARSE,
    Forward,
)
from topkv_testing.tiers import Tier


class Lives(Calls, Forwards, Checks, RuleBasedStateMachine):
    """Requests begin, prefill, decode, roll back, fork and end, in any order.

    Attributes:
        few: examples on a CPU, in the interpreter and on a GPU, see ``kit.examples``.
        steps: rules of one example, by tier.
    """

    few: tuple[int, int, int] = (65, 8, 12)
    steps: Mapping[str, int] = {"cpu": 25, "interpret": 12, "gpu": 25}

    def teardown(self) -> None:
        if not hasattr(self, "coordinator"):
            return
        try:
            self.coordinator.forward_abort()
            for slot in list(self.coordinator.requests.active.nonzero()[0]):
                self.coordinator.request_end(int(slot))
            check_integrity(self.coordinator)
            assert self.coordinator.manager.host.used == 0
            assert self.coordinator.requests.free == REQUESTS
        finally:
            self.coordinator.close()

    # Helpers.

    def decode_alone(self, slot: int, **what: Any) -> None:
        """Decode one row, whose ids are close together: every unit of the request is met often."""
        unit = min(group.unit for group in self.groups.values())
        widest = self.live[slot].length // unit + 2
        self.forward(Forward(rows=[slot, -1], widest=widest, **what))

    def prefill_alone(self, slot: int, tokens: int, **what: Any) -> None:
        self.forward(Forward(chunks=[(slot, tokens)], **what))

    # Rules: forwards.

    @precondition(any_live)
    @rule(data=st.data(), tokens=st.one_of(st.integers(0, 17), st.sampled_from([0, 1])))
    def prefill(self, data: st.DataObject, tokens: int) -> None:
        """Append one chunk, or one for each of two requests; abort and end at any layer."""
        first, second = self.slot(data), self.slot(data)
        chunks = [(first, tokens)]
        if first != second:
            chunks.append((second, data.draw(st.integers(0, 9))))
        stop = data.draw(st.sampled_from([None, None, None, *range(LAYERS + 1)]))
        self.forward(Forward(chunks=chunks, stop=stop, ends=self.some_end(data, chunks, stop)))

    def some_end(
        self, data: st.DataObject, chunks: list[tuple[int, int]], stop: int | None
    ) -> dict[int, int]:
        """Draw, now and then, a request that ends after some layer of the forward."""
        layers = LAYERS if stop is None else stop
        if not layers or data.draw(st.integers(0, 3)):
            return {}
        slot = data.draw(st.sampled_from([slot for slot, _ in chunks]))
        return {data.draw(st.integers(0, layers - 1)): slot}

    @precondition(any_live)
    @rule(data=st.data(), steps=st.integers(1, 9), widest=st.sampled_from([4, 12, 50]))
    def decode(self, data: st.DataObject, steps: int, widest: int) -> None:
        """Decode a ragged padded batch; the last step may hold a chunk, stop, or end rows."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, unique=True))
        padding = data.draw(st.integers(0, REQUESTS - len(slots)))
        rows = data.draw(st.permutations([*slots, *[-1] * padding]))
        queries = data.draw(st.integers(1, self.coordinator.config.max_queries))
        for _ in range(steps - 1):
            if self.forward(Forward(rows=rows, widest=widest, queries=queries)) is None:
                return
        others = [slot for slot in self.live if slot not in slots]
        chunked = data.draw(st.lists(st.sampled_from(others), max_size=1)) if others else []
        chunks = [(slot, data.draw(st.integers(0, 9))) for slot in chunked]
        stop = data.draw(st.sampled_from([None, None, None, *range(LAYERS + 1)]))
        filling = [s for s in slots if (self.live[s].length + 1) % self.groups[0].unit == 0]
        candidates = [(slot, 1) for slot in filling or slots] + chunks
        ends = self.some_end(data, candidates, stop)
        self.forward(Forward(rows, None, chunks, widest, stop, ends, queries=queries))

    @precondition(any_live)
    @rule(data=st.data())
    def idle(self, data: st.DataObject) -> None:
        """Run a step in which some rows append nothing."""
        rows = data.draw(st.permutations([*self.live, *[-1] * (REQUESTS - len(self.live))]))
        append = data.draw(st.lists(st.booleans(), min_size=len(rows), max_size=len(rows)))
        self.forward(Forward(rows, append))

    @precondition(any_live)
    @rule(data=st.data(), steps=st.integers(1, 8), back=st.integers(1, 5), abort=st.booleans())
    def speculate(self, data: st.DataObject, steps: int, back: int, abort: bool) -> None:
        """Decode, take some of it back, decode again."""
        slot = self.slot(data, least=1)
        for _ in range(steps):
            self.decode_alone(slot)
        self.decode_alone(slot, stop=LAYERS if abort else None)
        self.roll_back(slot, back)
        for _ in range(back + 2 * self.groups[0].unit):
            self.decode_alone(slot)

    @precondition(lambda self: any_live(self) and self.coordinator.config.max_queries > 1)
    @rule(data=st.data(), steps=st.integers(1, 8), widest=st.sampled_from([4, 12, 50]))
    def verify(self, data: st.DataObject, steps: int, widest: int) -> None:
        """Append drafted tokens, other numbers to each row, and reject some of them."""
        slots = data.draw(st.lists(st.sampled_from(sorted(self.live)), min_size=1, unique=True))
        rows = data.draw(st.permutations([*slots, *[-1] * (REQUESTS - len(slots))]))
        for _ in range(steps):
            queries = data.draw(st.integers(1, self.coordinator.config.max_queries))
            counts = st.lists(st.integers(0, queries), min_size=REQUESTS, max_size=REQUESTS)
            append = data.draw(st.one_of(st.none(), counts))
            stop = data.draw(st.sampled_from([None, None, None, None, *range(LAYERS + 1)]))
            todo = Forward(rows, append, widest=widest, stop=stop, queries=queries)
            if self.forward(todo) is None:
                return
            if stop is None:
                drafted = zip(todo.rows, todo.counts, strict=True)
                left = {
                    slot: self.live[slot].length - data.draw(st.integers(0, count))
                    for slot, count in drafted
                    if slot >= 0
                }
                self.reject(left)

    @precondition(any_live)
    @rule(data=st.data(), steps=st.integers(1, 5), tokens=st.integers(1, 9))
    def turn(self, data: st.DataObject, steps: int, tokens: int) -> None:
        """Decode, append a prompt, decode on until the ring has moved past it."""
        slot = self.slot(data, least=1)
        for _ in range(steps):
            self.decode_alone(slot)
        self.prefill_alone(slot, tokens)
        for _ in range(2 * self.groups[0].unit):
            self.decode_alone(slot)

    @precondition(any_live)
    @rule(data=st.data(), steps=st.integers(0, 6))
    def fork(self, data: st.DataObject, steps: int) -> None:
        """Fork: twins that are given the same inputs go on alike."""
        slot = self.slot(data, least=1)
        twin = self.fork_request(slot)
        if twin is None:
            return
        for _ in range(steps):
            outs = self.forward(Forward(rows=[slot, twin], widest=12, alike=True))
            for out in outs or ():
                assert out[0].equal(out[1]), "twins have come apart"

    @invariant()
    def everything_is_in_place(self) -> None:
        if hasattr(self, "coordinator"):
            self.check_counts()
            self.check_lanes()
            self.check_tokens()
            self.check_poison()


class LifecycleMachine(Lives):
    """Grouped-query attention, and a selection of any ids at all."""

    @initialize(
        scope=st.sampled_from(["kv_head", "shared"]),
        unit=st.sampled_from([1, 2, 4]),
        other=st.sampled_from([None, 1, 4]),
        fast=st.booleans(),
        buffer=st.sampled_from([12, 16, 24]),
        page=st.sampled_from([4, 8]),
        host_format=st.sampled_from(["model", "model", "fp8"]),
        stages=st.sampled_from([(), (), ("keep_keys",), ("keep_keys", "keep")]),
        share=st.sampled_from(["F", "F", "FS"]),
        queries=st.sampled_from([1, 2, 4, 8]),
        verification=st.sampled_from(["joint", "exact"]),
        prompts=st.sampled_from([None, 16, 48]),
        seed=st.integers(0, 9),
    )
    def start(
        self, scope: str = "kv_head", unit: int = 4,
        other: int | None = None, fast: bool = True, buffer: int = 24, page: int = 4,
        host_format: str = "model", stages: tuple[str, ...] = (), share: str = "F",
        queries: int = 1, verification: str = "joint", prompts: int | None = None, seed: int = 0,
    ) -> None:  # fmt: skip
        """``other`` is the unit of the second sparse layer, in a group of its own. Entries are
        coded only where the transfer engine states that it can. ``stages`` leave what they are
        given, and one of them keeps keys; they take one query at a time. With ``share`` the second
        sparse layer attends to what the first has selected, unless it is in a group of its own.
        ``queries`` is the most of a row, ``prompts`` tokens of the prompt buffer."""
        layers: dict[str, Any] = {"1": "resident", "2": "streamed"}
        if other is not None:
            layers["3"] = {"unit": other, "scope": "shared", "buffer": 16}
        widest = max(unit, other or 1)
        drafted = widest * newest_units(queries + 1, widest)
        self.set_up(
            seed,
            fast,
            host_format=self.offered(host_format),
            scope=scope,
            unit=unit,
            budget=12,
            buffer=buffer,
            page_tokens=page,
            ring_tokens=max(2 * widest if widest > 1 else 3, drafted),
            max_queries=queries,
            verification="exact" if stages else verification,
            prefill_buffer_tokens=prompts,
            layers=layers,
            stages=stages,
            share=share,
        )
        first, second = (self.coordinator.layers[layer] for layer in SPARSE)
        self.follows = share == "FS" and first.lanes is second.lanes
        self.begin_request()


def machine_of(
    base: type[Lives],
    on: Tier,
    transfer: str = "zero_copy",
    registry: PluginRegistry | None = None,
) -> type[Any]:
    """A machine for a tier and a transfer engine.

    Args:
        base: class of the lives.
        on: where it runs.
        transfer: name of the engine.
        registry: where the engine is found, beside the doubles; see the module.
    """
    values = {"on": on, "transfer": transfer, "registry": registry}
    return type(f"{base.__name__}_{on.name}", (base,), values)


def run_lives(
    base: type[Lives],
    on: Tier,
    transfer: str = "zero_copy",
    registry: PluginRegistry | None = None,
    further: settings | None = None,
) -> None:
    """Run a machine as a test.

    Args:
        base, on, transfer, registry: as for ``machine_of``.
        further: hypothesis settings instead of those that suit the tier.
    """
    few = settings(examples(on, *base.few), stateful_step_count=base.steps[on.name])
    machine = machine_of(base, on, transfer, registry)
    run_state_machine_as_test(machine, settings=further or few)


lifecycle_machine = partial(machine_of, LifecycleMachine)
run_lifecycle = partial(run_lives, LifecycleMachine)
