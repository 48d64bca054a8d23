"""Whole decodes of an algorithm through the coordinator, against attention in float64."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise, product
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.entries import PluginEntry
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape, newest_units
from topkv_testing.kit import examples
from topkv_testing.models.doubles import Entries
from topkv_testing.models.oracle import attention
from topkv_testing.tiers import Tier
from topkv_testing.tolerance import assert_as_good

HEADS, KV_HEADS, DIM, MOST = 4, 2, 8, 48
MODEL = ModelShape(1, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)

Shape = tuple[int, str, Mapping[str, Any]]
"""Unit, scope and parameters of the algorithm."""


class Request:
    """One request of a coordinator, and every token that it was given, on the CPU."""

    def __init__(self, entry: PluginEntry, on: Tier, select: int, shape: Shape, seed: int) -> None:
        self.unit, self.scope, params = shape
        stated = entry.capabilities.queries
        self.most = 4 if stated is None else min(stated, 4)
        registry = PluginRegistry([("test", "1", Entries(entry))])
        config = SparseConfig(
            algorithm=entry.name,
            params=params,
            backend="gather",
            impl=on.impl,
            topk="radix",  # as in the other suites, whatever the entry states
            unit=self.unit,
            scope=self.scope,
            budget=(select + 1) * self.unit,
            ring_tokens=self.unit * newest_units(self.most + 1, self.unit),
            max_queries=self.most,
            page_tokens=16,
            max_requests=2,
            max_tokens=2 * MOST,
            max_request_tokens=MOST,
            dense_layers=[],
            prefill_block_tokens=16,
            poison=True,
        )
        lowered = lower(config, MODEL, device=on.device, registry=registry)
        self.coordinator = SparseCoordinator(lowered, registry)
        self.device, self.slot = on.device, self.coordinator.request_begin()
        self.generator = torch.Generator().manual_seed(seed)
        self.q = torch.empty(MOST, HEADS, DIM)
        self.k, self.v = torch.empty(2, MOST, KV_HEADS, DIM)
        self.length = 0
        self._draw()

    def _draw(self) -> None:
        """Draw the tokens behind those that the request has."""
        for rows, scale in ((self.q, 2), (self.k, 1), (self.v, 1)):
            new = rows[self.length :]
            new.copy_(torch.randn(new.shape, generator=self.generator) * scale)

    def _run(self, count: int, queries: int = 1) -> Tensor:
        """Give the next tokens, and rows of NaN where a row has more queries than tokens."""
        rows, padding = slice(self.length, self.length + count), max(queries - count, 0)
        q, k, v = (
            torch.cat([x[rows], x.new_full((padding, *x.shape[1:]), torch.nan)]).to(self.device)
            for x in (self.q, self.k, self.v)
        )
        out = torch.full_like(q, torch.nan)
        self.coordinator.attention(0, q, k, v, out=out)
        self.coordinator.forward_end()
        self.length += count
        assert not out[count:].any(), "the output of a query that is padding must be 0"
        return out[:count].cpu()

    def prefill(self, count: int) -> None:
        """Read N tokens of the prompt."""
        self.coordinator.forward_begin(prefill=[(self.slot, count)])
        self._run(count)

    def decode(self) -> tuple[Tensor, list[list[int]]]:
        """One step: its output ``[H, D]``, and the tokens that each kv-head attends."""
        out, lanes = self.verify(1, 1)
        return out[0], lanes

    def reject(self, count: int) -> None:
        """Take back the newest tokens; others will come in their place."""
        self.length -= count
        self.coordinator.rollback(self.slot, self.length)
        self._draw()

    def verify(self, count: int, queries: int) -> tuple[Tensor, list[list[int]]]:
        """One step of several tokens in a row of ``queries``: output ``[count, H, D]``, and the
        tokens that each kv-head attends, of which a query sees those up to its own."""
        self.coordinator.lanes[0].selection.ids.fill_(-7)
        self.coordinator.forward_begin([self.slot], append=[count], queries=queries)
        out = self._run(count, queries)
        closed = (self.length - count) // self.unit
        tail = list(range(closed * self.unit, self.length))
        lanes = []
        for row in self.coordinator.lanes[0].selection.ids.tolist():
            units = [unit for unit in row if unit != -1]
            assert len(set(units)) == len(units) == min(closed, len(row))
            assert all(0 <= unit < closed for unit in units)
            lanes.append([unit * self.unit + i for unit in units for i in range(self.unit)] + tail)
        return out, lanes * (KV_HEADS // len(lanes))

    def exact(self, head: int, tokens: list[int], back: int = 0) -> tuple[Tensor, Tensor]:
        """Output of a query head over these tokens, in float64 and in float32; of the token that
        is ``back`` before the newest."""
        q = self.q[self.length - 1 - back, head][None, None]
        k, v = (x[tokens, head * KV_HEADS // HEADS][:, None] for x in (self.k, self.v))
        rough = (q[0] @ k[:, 0].T * MODEL.scale).softmax(-1) @ v[:, 0]
        return attention(q, k, v, MODEL.scale)[0][0], rough

    def mass(self, head: int, tokens: list[int]) -> float:
        """Softmax mass in float64 that a query head gives to these tokens."""
        keys = self.k[: self.length, head * KV_HEADS // HEADS].double()
        logits = keys @ self.q[self.length - 1, head].double() * MODEL.scale
        return float(logits.softmax(0)[tokens].sum())

    def largest_value(self, head: int) -> Tensor:
        """The norm of the largest value that a query head may attend."""
        values = self.v[: self.length, head * KV_HEADS // HEADS].double()
        largest: Tensor = values.norm(dim=-1).max()
        return largest


class DecodeTests:
    """Tests of algorithms that attend and whose selections are nested, of any unit.

    A subclass names the algorithm and its shapes, beside the fixture ``on``::

        from topkv_testing.fixtures import on as on


        class TestDecode(DecodeTests):
            entry = ENTRY
            shapes = staticmethod(shapes)
    """

    entry: PluginEntry
    shapes: Any

    def test_a_covering_budget_is_dense(self, on: Tier) -> None:
        """Dense in every step, from the second token on, in the open unit and at its edges."""

        @examples(on, cpu=15, interpret=1)
        @given(
            shape=self.shapes(),
            seed=st.integers(0, 99),
            prompt=st.integers(1, MOST - 8) | st.just(MOST - 7),
        )
        def check(shape: Shape, seed: int, prompt: int) -> None:
            request = Request(self.entry, on, MOST // shape[0] - 1, shape, seed)
            request.prefill(prompt)
            for _ in range(7):
                out, lanes = request.decode()
                for head in range(HEADS):
                    everything = list(range(request.length))
                    assert sorted(lanes[head * KV_HEADS // HEADS]) == everything
                    truth, rough = request.exact(head, everything)
                    assert_as_good(out[head : head + 1], truth, rough, f"head {head}")

        check()

    def test_a_step_attends_its_selection_and_the_open_unit(self, on: Tier) -> None:
        """The error is at most twice the mass that is left out times the largest value."""

        @examples(on, cpu=25, interpret=1)
        @given(
            shape=self.shapes(),
            seed=st.integers(0, 99),
            prompt=st.integers(20, 40),
            select=st.integers(2, 4),
        )
        def check(shape: Shape, seed: int, prompt: int, select: int) -> None:
            request = Request(self.entry, on, select, shape, seed)
            request.prefill(prompt)
            for _ in range(5):
                out, lanes = request.decode()
                for head in range(HEADS):
                    tokens = lanes[head * KV_HEADS // HEADS]
                    assert request.length - 1 in tokens
                    truth, rough = request.exact(head, tokens)
                    assert_as_good(out[head : head + 1], truth, rough, f"head {head}")
                    dense, _ = request.exact(head, list(range(request.length)))
                    values = request.largest_value(head)
                    left = max(1 - request.mass(head, tokens), 0)
                    assert (out[head].double() - dense[0]).norm() <= 2 * left * values + 1e-5

        check()

    def test_a_draft_sees_the_tokens_up_to_its_own(self, on: Tier) -> None:
        """Rows append several tokens, some are rejected, and others come in their place."""
        if self.entry.capabilities.queries == 1:
            pytest.skip(f"{self.entry.name} takes one query a row")

        @examples(on, cpu=25, interpret=2)
        @given(
            data=st.data(),
            shape=self.shapes(),
            seed=st.integers(0, 99),
            prompt=st.integers(1, 24),
            select=st.integers(2, 6),
        )
        def check(data: st.DataObject, shape: Shape, seed: int, prompt: int, select: int) -> None:
            request = Request(self.entry, on, select, shape, seed)
            request.prefill(prompt)
            for _ in range(6):
                queries = data.draw(st.integers(1, request.most))
                count = data.draw(st.integers(1, queries))
                out, lanes = request.verify(count, queries)
                for head, query in product(range(HEADS), range(count)):
                    back = count - 1 - query
                    attended, end = lanes[head * KV_HEADS // HEADS], request.length - back
                    tokens = [token for token in attended if token < end]
                    truth, rough = request.exact(head, tokens, back)
                    assert_as_good(out[query, head][None], truth, rough, f"head {head}, {query}")
                request.reject(data.draw(st.integers(0, count - 1)))

        check()

    def test_a_larger_budget_attends_no_less_mass(self, on: Tier) -> None:
        """In each step and query head: selections are nested."""

        @examples(on, cpu=10, interpret=1)
        @given(shape=self.shapes(), seed=st.integers(0, 99), prompt=st.integers(30, 40))
        def check(shape: Shape, seed: int, prompt: int) -> None:
            requests = [Request(self.entry, on, select, shape, seed) for select in (2, 3, 5, 9)]
            for request in requests:
                request.prefill(prompt)
            for _ in range(2):
                attended = [request.decode()[1] for request in requests]
                for few, many in pairwise(attended):
                    assert all(set(a) <= set(b) for a, b in zip(few, many, strict=True))
                for head in range(HEADS):
                    lane = head * KV_HEADS // HEADS
                    masses = [
                        r.mass(head, a[lane]) for r, a in zip(requests, attended, strict=True)
                    ]
                    assert all(a <= b + 1e-12 for a, b in pairwise(masses))

        check()
