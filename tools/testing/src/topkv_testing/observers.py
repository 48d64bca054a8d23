"""The conformance suite of observers.

An author sets ``ObserverOptions``: what an observer has gathered, and what it should have::

    from topkv_testing.observers import ObserverOptions, ObserverTests


    class TestForwards(ObserverTests):
        @pytest.fixture
        def plugin(self):
            return "forwards"

        @pytest.fixture
        def options(self):
            return ObserverOptions(
                says=lambda observer: observer.count,
                oracle=lambda reported: sum(forward.ended for forward in reported),
            )

The suite runs forwards of its own over a small coordinator, with padded rows, prompts beside
decode rows, and forwards that are dropped halfway.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from attrs import field, frozen
from hypothesis import strategies as st
from torch import Tensor

from topkv.report import Occupancy, TransferReport, count_occupancy
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import KitTests, Subject, drawn
from topkv_testing.machines.lifecycle_model import (
    DIM,
    HEADS,
    KV_HEADS,
    LAYERS,
    SPARSE,
    make_coordinator,
)

PROMPTS = (22, 25)
"""Tokens of the two requests that decode, more than their buffers hold; a third one only grows."""

STEPS, MOST_PROMPT = 8, 6
"""Most forwards behind them, and most prompt tokens of each."""


@frozen
class Reported:
    """One forward of the suite.

    Attributes:
        slots: request of each decode row, -1 for padded ones.
        prompt_tokens: tokens of its prompt chunks.
        ended: False if it was dropped.
        transfers: transfers of its decode rows, from the first token of their requests to the end
            of the forward; None if dropped.
        totals: transfers of all requests since the coordinator was made, when the forward ended or
            was dropped.
        occupancy: pages and slots that were held then.
    """

    slots: tuple[int, ...]
    prompt_tokens: int
    ended: bool
    transfers: TransferReport | None
    totals: TransferReport
    occupancy: Occupancy


@frozen
class ObserverOptions:
    """Options that an author gives the suite; the fixture ``options`` returns it.

    Attributes:
        says: ``says(observer)`` returns what the observer has gathered, in values that compare.
        oracle: ``oracle(forwards)`` returns what it should have gathered from the forwards of its
            coordinator so far, the oldest first.
        params: parameters that differ from the entry's.
    """

    says: Callable[[Any], Any]
    oracle: Callable[[Sequence[Reported]], Any]
    params: Mapping[str, Any] = field(factory=dict)


@frozen
class Step:
    """Rows of one forward.

    Attributes:
        decode: numbers of requests, -1 for padded rows.
        prompt: tokens that the third request grows by.
        units: what every sparse lane selects, in closed units.
        dropped: True to drop the forward before its last layer.
    """

    decode: Sequence[int]
    prompt: int
    units: Sequence[int]
    dropped: bool


def steps() -> st.SearchStrategy[list[Step]]:
    """Draw forwards of every shape, some of them dropped."""
    rows = st.permutations([-1, 0, 1]).flatmap(
        lambda order: st.integers(0, len(order)).map(lambda count: order[:count])
    )
    units = st.lists(st.integers(0, 9), unique=True, max_size=3)
    step = st.builds(Step, rows, st.integers(0, MOST_PROMPT), units, st.booleans())
    return st.lists(step.filter(lambda each: each.decode or each.prompt), max_size=STEPS)


class Watched:
    """A coordinator of doubles, and a record of its forwards.

    Args:
        subject: the observer.
        named: True if the configuration names it.

    Raises:
        AssertionError: the observer raised in ``bind_layers``.

    Attributes:
        reported: every forward so far.
        outputs: output of every layer that was attended so far.
    """

    def __init__(self, subject: Subject, named: bool = True) -> None:
        options: ObserverOptions | None = subject.options
        params = options.params if options else {}
        asked = [{"name": subject.entry.name, "params": params}] if named else []
        self.coordinator = make_coordinator(
            subject.tier, registry=subject.registry, observers=asked, max_tokens=128
        )
        self.device = subject.tier.device
        self.reported: list[Reported] = []
        self.outputs: list[Tensor] = []
        self.observer: Any = next(iter(self.coordinator.observers.named.values()), None)
        if named and self.observer is None:
            self.coordinator.close()
            raise AssertionError("bind_layers raised, see the warning")
        self.slots = [self.coordinator.request_begin() for _ in range(3)]
        for slot, tokens in zip(self.slots, PROMPTS, strict=False):
            self._watch([], [(slot, tokens)], [], dropped=False)

    def run(self, step: Step) -> None:
        """Run one forward.

        Raises:
            AssertionError: the observer raised, and is left out from now on.
        """
        rows = [self.slots[number] if number >= 0 else -1 for number in step.decode]
        chunks = [(self.slots[2], step.prompt)] if step.prompt else []
        self._watch(rows, chunks, step.units, step.dropped)

    def _watch(
        self,
        rows: list[int],
        chunks: list[tuple[int, int]],
        units: Sequence[int],
        dropped: bool,
    ) -> None:
        coordinator, prompt = self.coordinator, sum(tokens for _, tokens in chunks)
        transfers = None
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            coordinator.forward_begin(decode=rows, prefill=chunks)
            for layer in range(LAYERS - dropped):
                self.outputs.append(self._attend(layer, len(rows) + prompt, units))
            if dropped:
                coordinator.forward_abort()
            else:
                coordinator.forward_end()
                transfers = coordinator.transfers_of([slot for slot in rows if slot >= 0])
        totals, occupancy = coordinator.transfers_of(), count_occupancy(coordinator.requests)
        self.reported.append(
            Reported(tuple(rows), prompt, not dropped, transfers, totals, occupancy)
        )
        if self.observer is not None and not coordinator.observers.named:
            said = [str(each.message) for each in caught if "is left out" in str(each.message)]
            raise AssertionError(f"{'; '.join(said)}; the forward was {self.reported[-1]}")

    def _attend(self, layer: int, count: int, units: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(100 * len(self.reported) + layer)
        q, k, v = (
            torch.randn(count, heads, DIM, generator=generator).to(self.device)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        path = self.coordinator.layers[layer]
        if layer in SPARSE:
            ids = torch.full_like(path.lanes.selection.ids, -1)
            ids[:, : len(units)] = torch.tensor(units, dtype=torch.int32)
            path.algorithm.next_ids[layer] = ids
        out = self.coordinator.attention(layer, q, k, v)
        if layer in SPARSE:
            path.algorithm.next_ids.clear()  # The next forward_begin may select too.
        return out.clone()

    def check(self, options: ObserverOptions) -> None:
        """Compare what the observer says with the oracle.

        Raises:
            AssertionError: they differ.
        """
        says, expected = options.says(self.observer), options.oracle(self.reported)
        assert says == expected, (
            f"after the forwards {self.reported} the observer says {says!r}, "
            f"the oracle {expected!r}"
        )


class ObserverTests(KitTests):
    """Every test of an observer; the contract is ``topkv.hooks.observer``. The fixture ``options``
    gives ``ObserverOptions``."""

    kind = "observer"

    @pytest.fixture
    def options(self) -> ObserverOptions:
        """Options of the observer. To be overridden."""
        raise NotImplementedError(f"{type(self).__name__} must define the fixture 'options'")

    @drawn(cpu=40, interpret=3, program=steps())
    def test_it_gathers_what_forwards_were(self, subject: Subject, program: list[Step]) -> None:
        """It agrees with the oracle after each forward, also after a dropped one."""
        watched = Watched(subject)
        watched.check(subject.options)
        for step in program:
            watched.run(step)
            watched.check(subject.options)
        watched.coordinator.close()

    @drawn(cpu=20, interpret=2, program=steps())
    def test_forwards_are_the_same_without_it(self, subject: Subject, program: list[Step]) -> None:
        """Outputs are equal bit for bit, and the state of requests is whole."""
        watched, plain = Watched(subject), Watched(subject, named=False)
        for step in program:
            watched.run(step)
            plain.run(step)
        assert watched.reported == plain.reported, "transfers are others with the observer"
        for one, other in zip(watched.outputs, plain.outputs, strict=True):
            # Padded rows hold anything, yet the same with the observer and without.
            assert torch.equal(one.nan_to_num(7), other.nan_to_num(7)), "outputs are others"
        check_integrity(watched.coordinator)
        watched.coordinator.close()
        plain.coordinator.close()

    @drawn(cpu=20, interpret=2, first=steps(), second=steps())
    def test_each_coordinator_has_its_own(
        self, subject: Subject, first: list[Step], second: list[Step]
    ) -> None:
        """Two that take turns gather nothing of each other."""
        one, two = Watched(subject), Watched(subject)
        for turn in range(max(len(first), len(second))):
            for watched, program in ((one, first), (two, second)):
                if turn < len(program):
                    watched.run(program[turn])
        for watched in (one, two):
            watched.check(subject.options)
            watched.coordinator.close()
