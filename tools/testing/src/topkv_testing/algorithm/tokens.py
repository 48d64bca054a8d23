"""Tests of algorithms that select single tokens. Part of the algorithm suite.

Where a stage turns their tokens into units the group is stored by those larger units, and its
ring, which is in those, is not shown.
"""

from __future__ import annotations

import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases
from topkv_testing.algorithm.state import assert_same
from topkv_testing.kit import Data, KitTests, Subject, drawn


class WithoutRing(AlgorithmBench):
    """The bench without a ring: its views have 0 positions."""

    def __init__(self, subject: Subject, case: Case, *, requests: int = 3) -> None:
        super().__init__(subject, case, requests=requests)
        self.layer.ring_k = self.layer.ring_v = self.layer.ring_k[:, :, :0].contiguous()

    def _hold(self, slot: int, keys: Tensor) -> None:
        self.keys[slot] = torch.cat([self.keys[slot], keys])
        self._high[slot] = max(self._high[slot], len(self.keys[slot]))


class TokenTests(KitTests):
    """Algorithms whose unit is one token and nothing else."""

    kind = "algorithm"

    @drawn(cpu=40, interpret=3, gpu=10, case=cases)
    def test_single_tokens_need_no_ring(self, subject: Subject, case: Case, data: Data) -> None:
        """Prompts in chunks, steps, a rollback and a fork: the same with a ring and without."""
        if not subject.entry.capabilities.single_tokens:
            pytest.skip(f"{subject.entry.name} takes units of several tokens")
        benches = (AlgorithmBench(subject, case), WithoutRing(subject, case))
        prompt = data.draw(benches[0].lengths(most=case.most - 4))
        cuts = data.draw(st.lists(st.integers(1, prompt), max_size=2))
        for bench in benches:
            bench.prefill(1, case.tokens(1)[:prompt], cuts)
            bench.extend(1, case.tokens(2)[:2])
            bench.rollback(1, prompt + 1)
            bench.extend(1, case.tokens(3)[:1])
            bench.fork(1, 2)
            bench.extend(2, case.tokens(4)[:2])
        for slot in (1, 2):
            assert_same(subject, *benches, slot, f"slot {slot}, with a ring and without")
