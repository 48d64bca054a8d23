"""Kernels against the reference of the same plugin, and capture. Part of the algorithm suite."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import pytest
import torch
from attrs import evolve
from hypothesis import strategies as st
from torch import Tensor

from topkv_testing.algorithm.bench import AlgorithmBench, lanes
from topkv_testing.algorithm.case import Case
from topkv_testing.algorithm.cases import cases, rounded_cases, sizes_of
from topkv_testing.algorithm.memory import UNWRITTEN, same_bits
from topkv_testing.algorithm.options import options_of
from topkv_testing.differences import require_same
from topkv_testing.host_reads import no_host_reads, require_graph, require_interpreted
from topkv_testing.kit import Data, KitTests, Subject, drawn
from topkv_testing.models.indexed import index_scores


def index_share(bench: AlgorithmBench, slot: int, q: Tensor, chosen: list[list[int]]) -> Tensor:
    """float64 ``[1]``: index scores of the tokens chosen, as a share of the size of all scores."""
    queries, weights = bench.case.asked(q)
    assert weights is not None  # the algorithm selects by an index
    scores = index_scores(queries, weights, bench.keys[slot][:, 0])[0]
    return scores[chosen[0]].sum()[None] / scores.abs().sum().clamp(min=1e-30)


def attention_mass(bench: AlgorithmBench, slot: int, q: Tensor, chosen: list[list[int]]) -> Tensor:
    """float64 ``[lane_heads]``: softmax mass of each lane's units, mean over its query heads."""
    model, group = bench.model, bench.group
    keys = bench.keys[slot].double()
    keys = keys.repeat_interleave(q.shape[1] // keys.shape[1], 1)
    weights = torch.einsum("hd,nhd->hn", q[0].double(), keys).mul(model.scale).softmax(-1)
    weights = weights.unflatten(0, (group.lane_heads, -1)).mean(1)
    unit_of = torch.arange(keys.shape[0]) // group.unit
    return torch.stack(
        [
            lane[torch.isin(unit_of, torch.tensor(units, dtype=torch.long))].sum()
            for lane, units in zip(weights, chosen, strict=True)
        ]
    )


def measured(bench: AlgorithmBench, slot: int, q: Tensor, chosen: list[list[int]]) -> Tensor:
    """The worth of a selection to queries ``[1, H, D]``: ``attention_mass``, or ``index_share``
    where the model's indexer has weights."""
    measure = attention_mass if bench.case.weights is None else index_share
    return measure(bench, slot, q, chosen)


def require_both(subject: Subject) -> None:
    """Skip a comparison of kernels with the reference where one of them is missing."""
    impls = subject.entry.impls
    if subject.tier.impl == "reference" or "reference" not in impls:
        pytest.skip(f"tier {subject.tier.name}: nothing to compare, impls are {impls}")


class KernelTests(KitTests):
    """Errors that only kernels can make."""

    kind = "algorithm"

    @drawn(cpu=40, interpret=6, gpu=20, needs=[require_both], case=rounded_cases)
    def test_kernels_select_what_the_reference_selects(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """Equal attention mass, or index scores, in float64; ties may go either way."""
        benches = [AlgorithmBench(subject, case, impl=i) for i in ("reference", "triton")]
        sizes = [data.draw(benches[0].long_lengths()) for _ in range(2)]
        q, results = case.queries(2), []
        for bench in benches:
            for slot, size in zip((2, 0), sizes, strict=True):
                bench.prefill(slot, case.tokens(slot)[:size])
            bench.append([2, 0], case.tokens(9)[:2])
            results.append(lanes(bench.retrieve(q, [2, 0])))
        assert_alike(benches, [2, 0], q, results)

    @drawn(
        cpu=0,
        interpret=0,
        needs=[require_both],
        case=partial(cases, units=(1, 4, 16), keys=("normal",), exact=False),
    )
    def test_long_requests_select_what_the_reference_selects(
        self, subject: Subject, case: Case
    ) -> None:
        """A request of ``long_units``, several blocks of them, in a slot that is not the first."""
        options = options_of(subject)
        widest = max(sizes_of(subject).selects)
        case = evolve(case, least_units=options.long_units, select=widest)
        benches = [AlgorithmBench(subject, case, impl=i) for i in ("reference", "triton")]
        keys, q = case.tokens(1), case.queries(1)
        for bench in benches:
            bench.prefill(1, keys[:-1])
            bench.append([1], keys[-1:])
        assert_alike(benches, [1], q, [lanes(b.retrieve(q, [1])) for b in benches])

    @drawn(cpu=1, interpret=2, needs=[require_interpreted], case=cases)
    def test_hot_hooks_read_nothing_on_the_host(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """No ``item()``, ``tolist()`` or ``nonzero()`` in ``update`` and ``retrieve_topk``."""
        bench, rows = AlgorithmBench(subject, case), [1, -1, 0]
        for slot in (0, 1):
            bench.prefill(slot, case.tokens(slot)[: data.draw(bench.long_lengths())])
        k, q = bench.stage(rows, case.tokens(9)[:3]), case.queries(3)
        shape = (3 * bench.group.lane_heads, bench.group.select)
        ids = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=bench.device)
        with no_host_reads():
            bench.update(k)
            bench.select(q, ids)

    @drawn(cpu=0, interpret=0, case=cases)
    def test_pools_beyond_2_31_elements(self, subject: Subject, case: Case) -> None:
        """Pages at the far end of large pools select what those at the near end select."""
        if subject.tier.name != "gpu":
            pytest.skip("needs the memory of a CUDA device")
        chosen, q = [], case.queries(2)
        for far in (False, True):
            bench = AlgorithmBench(subject, case, far=far)
            for slot in (2, 0):
                bench.prefill(slot, case.tokens(slot)[: case.most - 1])
            bench.append([2, 0], case.tokens(9)[:2])
            chosen.append(lanes(bench.retrieve(q, [2, 0])))
        assert chosen[1] == chosen[0], f"far pages select {chosen[1]}, near ones {chosen[0]}"

    @drawn(cpu=1, interpret=1, gpu=8, needs=[require_graph], case=cases)
    def test_decode_step_replays_from_a_graph(
        self, subject: Subject, case: Case, data: Data
    ) -> None:
        """``update`` and ``retrieve_topk``: no host sync, and replays equal eager calls."""
        eager, graphed = (AlgorithmBench(subject, case) for _ in range(2))
        for slot in range(eager.requests):
            keys = case.tokens(slot)[: data.draw(eager.long_lengths(most=case.most - 8))]
            eager.prefill(slot, keys)
            graphed.prefill(slot, keys)
        replay, k, q, ids = captured(graphed, case)
        for step in range(4):
            rows = data.draw(st.permutations([0, 1, 2]))
            rows = [slot if data.draw(st.booleans()) else -1 for slot in rows]
            new, queries = case.tokens(10 + step)[:3], case.queries(3, salt=20 + step)
            eager.append(rows, new, settle=False)
            expected = eager.retrieve(queries, rows)
            k.copy_(graphed.stage(rows, new))
            q.copy_(queries)
            ids.fill_(UNWRITTEN)
            replay()
            got = ids.cpu().view(expected.shape)
            assert same_bits(got, expected), f"step {step}: replayed {got}, eager {expected}"
            for bench in (eager, graphed):  # as the core does it, before the next token
                bench.settle_due(rows)
            for slot in set(rows) - {-1}:
                what = f"step {step}: a replay wrote other representations of slot {slot}"
                require_same(graphed.stored(slot), eager.stored(slot), what)


def assert_alike(
    benches: Sequence[AlgorithmBench],
    slots: Sequence[int],
    q: Tensor,
    results: Sequence[list[list[list[int]]]],
) -> None:
    """Reference and kernels select units of the same mass; ties may go either way.

    Args:
        benches: that of the reference first.
        slots, q: of the rows.
        results: ids of both benches, by row and lane.
    """
    bench = benches[0]
    for row, slot in enumerate(slots):
        expected, got = (measured(bench, slot, q[row], result[row]) for result in results)
        assert (expected - got).abs().max() <= options_of(bench.subject).mass, (
            f"the reference selects {results[0][row]} of mass {expected.tolist()}, the kernels "
            f"{results[1][row]} of mass {got.tolist()}"
        )


def captured(
    bench: AlgorithmBench, case: Case
) -> tuple[Callable[[], None], Tensor, Tensor, Tensor]:
    """A replay of one step of the bench, and the tensors that it reads and writes."""
    padded = [-1] * bench.requests  # every call before the first replay changes nothing
    k = bench.stage(padded, case.tokens(0)[: bench.requests])
    q = case.queries(bench.requests).to(bench.device)
    shape = (bench.requests * bench.group.lane_heads, bench.group.select)
    ids = torch.full(shape, UNWRITTEN, dtype=torch.int32, device=bench.device)

    def step() -> None:
        bench.update(k)
        bench.select(q, ids)

    step()  # compiles
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay, k, q, ids
