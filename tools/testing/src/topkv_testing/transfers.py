"""Conformance suite of transfer engines: slots of units, and every byte that moves.

A package with an engine of its own subclasses it::

    class TestMine(TransferTests):
        @pytest.fixture
        def plugin(self):
            return "mine"

The engine gets a group with two or three requests, pages in random order, random bytes (NaN
among them) in the host pool, NaN in the device buffer and -77 in every output. An entry is a
multiple of 16 bytes, as ``topkv.config.lower`` makes sure; units are powers of two.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings
from hypothesis.stateful import run_state_machine_as_test

from topkv_testing.host_reads import no_host_reads, require_interpreted
from topkv_testing.kit import Subject, examples
from topkv_testing.machines.residency import ResidencyMachine
from topkv_testing.models.host_formats import formats_of
from topkv_testing.transfer.bench import Row
from topkv_testing.transfer.cases import bench_of
from topkv_testing.transfer.gpu import check_captured, check_far_addresses
from topkv_testing.transfer.moves import MoveTests
from topkv_testing.transfer.plans import PlanTests
from topkv_testing.transfer.queries import SeveralTests


class TransferTests(PlanTests, MoveTests, SeveralTests):
    """Every test of a transfer engine. Outputs follow from the contract, ``topkv.hooks.transfer``,
    alone, so the comparison is exact."""

    kind = "transfer"

    def test_state_machine(self, subject: Subject) -> None:
        """Random histories over the engine alone, see ``ResidencyMachine``."""
        machine = type("Machine", (ResidencyMachine,), {"subject": subject})
        few = examples(subject.tier, cpu=40, interpret=3, gpu=25)
        steps = 12 if subject.tier.name == "interpret" else 20
        run_state_machine_as_test(machine, settings=settings(few, stateful_step_count=steps))

    def test_hot_hooks_read_nothing_on_the_host(self, subject: Subject) -> None:
        """No ``item()``, ``tolist()`` or ``nonzero()`` in append, plan, load and offload."""
        require_interpreted(subject)
        bench = bench_of(subject, requests=2)
        bench.put([Row(1, 20, 20, appended=True), Row()])
        lanes = 2 * bench.group.lane_heads
        ids = torch.arange(4, dtype=torch.int32).expand(lanes, 4).contiguous()
        k = torch.ones((2, 1, bench.group.num_kv_heads, bench.group.head_dim))
        with no_host_reads():
            bench.engine.append(bench.views[0], k, k)
            bench.engine.plan(bench.views[0], ids, bench.limit, bench.plan)
            bench.engine.load(bench.views[0], bench.plan)
            bench.engine.offload()

    def test_addresses_beyond_32_bits(self, subject: Subject) -> None:
        """Host pool and device buffer of more than 2**31 bytes, used at their far ends."""
        _require_gpu(subject)
        for host_format in formats_of(subject.entry):
            check_far_addresses(subject, host_format)

    def test_captured_replays_equal_eager(self, subject: Subject) -> None:
        """Plan, load and offload in one CUDA graph, over changing rows, without a host sync."""
        _require_gpu(subject)
        for host_format in formats_of(subject.entry):
            check_captured(subject, host_format)


def _require_gpu(subject: Subject) -> None:
    if subject.tier.name != "gpu":
        pytest.skip("this is about memory and graphs of a GPU")
