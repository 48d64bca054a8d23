"""Kernels in graphs, without host syncs, at wide addresses and on host memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from attrs import evolve
from torch import Tensor

from topkv.types import Tables, newest_units
from topkv_testing.backend.attend import check_attend
from topkv_testing.backend.bench import (
    expect,
    make_backend,
    plain_geometries,
    result,
    rounded_sums,
)
from topkv_testing.backend.cases import AttendCase, AttendInputs, by_lane, by_row
from topkv_testing.backend.plans import AdaptCase, StepInputs
from topkv_testing.backend.queries import most_queries, with_queries
from topkv_testing.host_reads import no_host_reads, require_interpreted
from topkv_testing.kit import KitTests, Subject
from topkv_testing.strategies import Geometry


def _need_device(subject: Subject, what: str) -> None:
    if subject.tier.device.type != "cuda":
        pytest.skip(f"{what} shows only on a CUDA device; the tier is {subject.tier.name!r}")


@contextmanager
def _no_synchronization() -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _short(subject: Subject, geometry: Geometry) -> Geometry:
    """The geometry in a dtype of two bytes if one is stated: wide pools are then half as large."""
    stated = subject.entry.capabilities.dtypes or ("bfloat16",)
    short = [name for name in ("bfloat16", "float16") if name in stated]
    return evolve(geometry, dtype=getattr(torch, short[0])) if short else geometry


class DecodeRun:
    """Adapt and attend on tensors at fixed addresses, as one decode step of one layer, of ``most``
    queries a row."""

    def __init__(self, subject: Subject, geometry: Geometry, batch: int, most: int = 1) -> None:
        ring = max(2, newest_units(most, geometry.unit))
        sizes = (40, 44, ring, 6)
        self.case = AdaptCase(geometry, ((-1, 0),) * batch, (), *sizes, most=most)
        self.backend, self.model, self.group = self.case.backend(subject)
        device, lanes = subject.tier.device, batch * geometry.lane_heads
        self.step = StepInputs.empty(self.group, batch, device)
        self.queries: Tensor | None = None
        if most > 1:
            self.queries = torch.ones(batch, dtype=torch.int32, device=device)
        self.set(((-1, 0),) * batch, 0)
        inputs = self._inputs()
        self.pools = [pool.to(device) for pool in inputs.pools]
        self.k, self.v = inputs.views(self.pools)
        self.q = by_row(inputs.q, geometry.lane_heads).to(device)
        self.table = result((lanes, self.case.width), torch.int32, device)
        self.lengths = result((lanes,), torch.int32, device)
        self.tables = Tables(self.table.body, self.lengths.body, queries=self.queries)
        self.out = result(self.q.shape, self.q.dtype, device)
        self.lse = result(self.q.shape[:3], torch.float32, device)

    def set(self, rows: tuple[tuple[int, int], ...], seed: int) -> None:
        """Write another step: rows, counts and slots."""
        lanes = len(rows) * self.case.geometry.lane_heads
        counts = tuple((17 * seed + 7 * lane) % (self.case.select + 1) for lane in range(lanes))
        self.case = evolve(self.case, requests=rows, counts=counts, seed=seed)
        if self.queries is not None:
            wanted = [1 + (seed + row) % self.case.most for row in range(len(rows))]
            pairs = zip(wanted, rows, strict=True)
            queries = tuple(max(1, min(count, length)) for count, (_, length) in pairs)
            self.case = evolve(self.case, queries=queries)
            self.queries.copy_(torch.tensor(queries))
        self.case.fill(self.step)

    def _inputs(self) -> AttendInputs:
        """Inputs of ``attend`` in the step that is set."""
        inputs = self.case.attend_inputs()
        if self.queries is None:
            return inputs
        inputs.lengths = torch.tensor([len(where) for where, _ in inputs.tokens])
        return with_queries(inputs, list(self.case.queries), self.case.most)

    def decode(self) -> None:
        """Call the hooks that a coordinator calls for one layer."""
        self.tables.attached = None
        self.backend.adapt_page_table(self.step.view, self.step.plan, self.tables)
        self.backend.attend(self.q, self.k, self.v, self.tables, self.out.body, self.lse.body)

    def check_after(self, step: Callable[[], object], subject: Subject) -> None:
        """Fill the inputs anew, poison the results, run ``step`` and compare."""
        inputs = self._inputs()
        self.q.copy_(by_row(inputs.q, self.case.geometry.lane_heads))
        for mine, fresh in zip(self.pools, inputs.pools, strict=True):
            mine.copy_(fresh)
        self.table.body.fill_(-77)
        self.lengths.body.fill_(-77)
        self.out.body.fill_(torch.nan)
        self.lse.body.fill_(torch.nan)
        step()
        self.case.check(self.table.body, self.lengths.body)
        for name in ("table", "lengths", "out", "lse"):
            getattr(self, name).assert_intact(name)
        heads = self.case.geometry.lane_heads
        lse = by_lane(self.lse.body, heads).cpu()
        expected = inputs.expected(self.model.scale)
        expected.check(by_lane(self.out.body, heads).cpu(), lse, rounded_sums(subject))


class DeviceTests(KitTests):
    """Behaviour of a backend that shows on a CUDA device, and hardly elsewhere."""

    kind = "backend"

    def test_graph_replay_follows_its_inputs(self, subject: Subject) -> None:
        self._replay(subject, 1)

    def test_graph_replay_follows_the_queries_of_rows(self, subject: Subject) -> None:
        """A graph of several queries a row, of which each replay has others."""
        self._replay(subject, most_queries(subject))

    @staticmethod
    def _replay(subject: Subject, most: int) -> None:
        _need_device(subject, "a captured graph")
        if not subject.entry.capabilities.capture:
            pytest.skip(f"{subject.entry.name} does not state capture")
        for plain in plain_geometries(subject):
            geometry, unit = _short(subject, plain), plain.unit
            run = DecodeRun(subject, geometry, 3, most)
            run.decode()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                run.decode()
            steps = (
                ((0, 9 * unit), (-1, 0), (2, 1)),
                ((2, 5 * unit + 1), (1, 7), (5, 500)),
                ((-1, 0), (-1, 0), (4, unit)),
            )
            for seed, rows in enumerate(steps):
                run.set(rows, seed + 1)
                run.check_after(graph.replay, subject)

    def test_decode_neither_synchronizes_nor_allocates(self, subject: Subject) -> None:
        _need_device(subject, "a synchronization")
        for geometry in plain_geometries(subject):
            run = DecodeRun(subject, geometry, 3)
            run.set(((1, 40), (-1, 0), (2, 3)), 1)
            run.decode()  # compiles
            device = subject.tier.device

            def quiet(run: DecodeRun = run, device: torch.device = device) -> None:
                before = torch.cuda.memory_stats(device)["allocation.all.allocated"]
                with _no_synchronization():
                    run.decode()
                after = torch.cuda.memory_stats(device)["allocation.all.allocated"]
                assert after == before, f"decode made {after - before} allocations"

            run.check_after(quiet, subject)

    def test_hot_hooks_read_nothing_on_the_host(self, subject: Subject) -> None:
        """No ``item()``, ``tolist()`` or ``nonzero()`` in a decode, seen on a CPU too."""
        require_interpreted(subject)
        stated = subject.entry.capabilities.queries
        for most in {1, 3 if stated is None else min(stated, 3)}:
            run = DecodeRun(subject, plain_geometries(subject)[0], 3, most)
            run.set(((1, 40), (-1, 0), (2, 3)), 1)
            with no_host_reads():
                run.decode()

    def test_attends_beyond_2_31_elements(self, subject: Subject) -> None:
        _need_device(subject, "a pool of 2**31 elements")
        for plain in plain_geometries(subject):
            geometry = _short(subject, plain)
            unit, dim = geometry.unit, geometry.dim
            heads = geometry.kv_heads // geometry.lane_heads
            lengths = (3 * unit, 1, 5 * unit + 1, 2 * unit)
            case = AttendCase(geometry, lengths, 1)
            backend, model, _ = make_backend(subject, geometry, case.batch)
            inputs = case.make()
            few = inputs.pools[0].shape[0]
            slots = 2**31 // (heads * 2 * unit * dim) + few
            wide = torch.full(
                (slots, heads, 2, unit, dim),
                torch.nan,
                dtype=geometry.dtype,
                device=subject.tier.device,
            )
            assert wide.numel() > 2**31
            wide[-few:].copy_(inputs.pools[0])
            used = torch.arange(inputs.table.shape[1]) * unit < inputs.lengths[:, None]
            table = inputs.table.where(~used, inputs.table + slots - few).to(wide.device)
            sizes = inputs.lengths.to(wide.device)
            each = geometry.lane_heads
            q = inputs.q.to(wide.device).reshape(case.batch, 1, -1, dim)
            out = result(q.shape, geometry.dtype, wide.device)
            lse = result(q.shape[:3], torch.float32, wide.device)
            tables = Tables(table, sizes)
            backend.attend(q, wide[:, :, 0], wide[:, :, 1], tables, out.body, lse.body)
            norm = by_lane(lse.body, each).cpu()
            expected = inputs.expected(model.scale)
            expected.check(by_lane(out.body, each).cpu(), norm, rounded_sums(subject))
            del wide

    def test_prefill_beyond_2_31_elements(self, subject: Subject) -> None:
        _need_device(subject, "a pool of 2**31 elements")
        geometry, device = _short(subject, plain_geometries(subject)[0]), subject.tier.device
        backend, model, _ = make_backend(subject, geometry, 1)
        heads, dim, tokens = geometry.kv_heads, geometry.dim, 128
        random = torch.Generator().manual_seed(0)

        def normal(*shape: int) -> Tensor:
            return torch.randn(shape, generator=random).to(geometry.dtype)

        stride = 2**31 // 1024 * 10 + 2 * heads * dim  # tokens are 20 million elements apart
        pool = torch.full((stride * tokens,), torch.nan, dtype=geometry.dtype, device=device).view(
            tokens, stride
        )[:, : 2 * heads * dim]
        kv = normal(tokens, heads, 2, dim)
        far = pool.unflatten(1, (heads, 2, dim))
        far.copy_(kv)
        q = normal(tokens, heads * geometry.group, dim)
        out = result(q.shape, torch.float32, device)
        lse = result(q.shape[:2], torch.float32, device)
        backend.prefill(q.to(device), far[:, :, 0], far[:, :, 1], 0, 0, out.body, lse.body)
        causal = torch.ones(tokens, tokens, dtype=torch.bool).tril()
        wanted = expect(q, kv[:, :, 0], kv[:, :, 1], model.scale, causal)
        wanted.check(out.body.cpu(), lse.body.cpu(), rounded_sums(subject))

    def test_reads_pinned_host_memory_in_place(self, subject: Subject) -> None:
        """A streamed layer: its pages are its units, and K and V are in host memory."""
        if not subject.entry.capabilities.host_memory:
            pytest.skip(f"{subject.entry.name} does not state host_memory")
        _need_device(subject, "reading host memory")
        for geometry in plain_geometries(subject):
            if geometry.scope != "shared":
                continue
            backend, model, _ = make_backend(
                *(subject, geometry, 4), select=0, buffer=0, ring=0, residency="streamed"
            )
            unit = geometry.unit
            case = AttendCase(geometry, (9 * unit, 0, 1, 4 * unit + 1), 2, "pages")
            check_attend(subject, backend, model.scale, case.make(), host=True)
