"""The conformance suite of exact top-k.

::

    from topkv_testing.topks import TopKTests


    class TestMine(TopKTests):
        @pytest.fixture
        def plugin(self):
            return "mine"

Every result is compared with a sort in float64, to the last tie. Scores behind the length of a row
are poison; ids, and the memory beside them, start as garbage.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from attrs import frozen
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray
from torch import Tensor

from topkv.hooks.topk import TopKSetup
from topkv_testing.host_reads import no_host_reads, require_graph, require_interpreted
from topkv_testing.kit import KitTests, Subject, drawn, examples
from topkv_testing.strategies import seeds

GARBAGE = -77
"""Value of ids before a call."""

MARGIN = 3
"""Columns beside scores and ids, which make rows strided and unaligned."""

ODD_BITS = (
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001),
    *(0x3F800000, 0x3F800001, 0xBF800000, 0xBF800001),
)
"""Both zeros, subnormals, the largest numbers, infinities, NaN, and neighbours, as fp32."""

BITS = st.one_of(st.sampled_from(ODD_BITS), st.integers(0, 2**32 - 1))

Rows = NDArray[np.float32]
"""``[N, U]``."""

KINDS: dict[str, Callable[[Any, Any], Any]] = {
    "normal": lambda normal, ramp: normal,
    "softmax": lambda normal, ramp: np.exp(4 * normal - 12),
    "equal": lambda normal, ramp: np.zeros_like(normal),
    "few values": lambda normal, ramp: (2 * normal).round(),
    "subnormal": lambda normal, ramp: (20 * normal).round() * 2.0**-149,
    "infinite": lambda normal, ramp: np.where(normal > 1, np.inf, -np.inf),
    "nan": lambda normal, ramp: np.where(normal > 0.5, np.nan, normal),
    "ascending": lambda normal, ramp: ramp + 0 * normal,
    "descending": lambda normal, ramp: -ramp + 0 * normal,
    "best at the end": lambda normal, ramp: normal + 50 * (ramp > 0.9 * len(ramp)),
    "crowd below a gap": lambda normal, ramp: np.where(normal > 2.2, 1e30, 1 + normal * 2.0**-20),
    "crowd above a gap": lambda normal, ramp: np.where(normal > -2, 1 + normal * 2.0**-20, -1e30),
}
"""Ways to make long rows of random numbers ``[N, U]`` and column numbers ``[U]``."""


@frozen
class TopKOptions:
    """Options that an author may give the suite.

    Attributes:
        widths: columns of long rows, at most 2**20; name widths at which another kernel begins.
        selects: K over them.
    """

    widths: Sequence[int] = (5000, 16384, 16385, 70000)
    selects: Sequence[int] = (1, 127, 2048, 9000)


def best(row: Rows, length: int, select: int) -> list[int]:
    """The definition of top-k: descending score, then ascending index; -1 behind the last.

    Args:
        row: ``[U]``.
        length: read as ``min(max(length, 0), U)``.
        select: K.
    """
    with np.errstate(invalid="ignore"):  # NaN that signals
        values = row[: min(max(length, 0), len(row))].astype(np.float64)
    values[np.isnan(values)] = -np.inf
    order = np.lexsort((np.arange(len(values)), -(values + 0.0)))[:select]
    return [*sorted(order.tolist()), *[-1] * (select - len(order))]


def check(work: Any, device: torch.device, scores: Rows, lengths: Sequence[int], K: int) -> None:
    """Call ``topk`` on rows that lie apart, and compare.

    Raises:
        AssertionError: ids differ from ``best``, or something beside them was written.
    """
    rows, width = scores.shape
    wide = np.full((rows, width + 2 * MARGIN), np.inf, dtype=np.float32)
    wide[:, MARGIN:-MARGIN] = scores
    for number, length in enumerate(lengths):
        wide[number, MARGIN + max(length, 0) :] = np.nan if number % 2 else np.inf
    around = torch.full((rows, K + MARGIN), GARBAGE, dtype=torch.int32, device=device)
    given = torch.from_numpy(wide).to(device)
    sizes = torch.tensor(lengths, dtype=torch.int32, device=device)
    work.topk(given[:, MARGIN:-MARGIN], sizes, around[:, :K])
    assert (around[:, K:] == GARBAGE).all(), "topk wrote beside its ids"
    for number, (length, ids) in enumerate(zip(lengths, around[:, :K].tolist(), strict=True)):
        expected = best(scores[number], length, K)
        if ids != expected:
            place = next(i for i, (a, b) in enumerate(zip(ids, expected, strict=True)) if a != b)
            raise AssertionError(
                f"row {number} of {rows}, {width} columns, length {length}, K = {K}: from place "
                f"{place} on ids are {ids[place : place + 8]}, expected "
                f"{expected[place : place + 8]}"
            )


def long_rows(kind: str, rows: int, width: int) -> Rows:
    """fp32 ``[rows, width]`` of one of ``KINDS``."""
    normal = np.random.default_rng(width).standard_normal((rows, width))
    made: Rows = KINDS[kind](normal, np.arange(width)).astype(np.float32)
    return made


class TopKTests(KitTests):
    """Every test of an exact top-k; the contract is ``topkv.hooks.topk``. The fixture ``options``
    may give ``TopKOptions``."""

    kind = "topk"

    @drawn(
        cpu=100,
        interpret=40,
        palette=st.lists(BITS, min_size=1, max_size=12),
        spread=st.sampled_from([0, 1, 40, 2**20]),
        width=st.integers(1, 300),
        select=st.integers(1, 310),
        lengths=st.lists(st.integers(-1, 301), min_size=1, max_size=3),
        seed=seeds(),
    )
    def test_any_bits(
        self,
        subject: Subject,
        palette: list[int],
        spread: int,
        width: int,
        select: int,
        lengths: list[int],
        seed: int,
    ) -> None:
        """Any fp32 there is, also NaN, both zeros and subnormals, in rows of any length."""
        random = np.random.default_rng(seed)
        chosen = random.choice(np.array(palette, dtype=np.uint64), (len(lengths), width))
        noise = random.integers(0, spread + 1, chosen.shape, dtype=np.uint64)
        scores = ((chosen + noise) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
        work = _made(subject, len(lengths), width, select)
        check(work, subject.tier.device, scores, lengths, select)

    @drawn(
        cpu=60, interpret=15, values=st.integers(1, 4), select=st.integers(1, 300), seed=seeds()
    )
    def test_of_equal_scores_the_lower_index_wins(
        self, subject: Subject, values: int, select: int, seed: int
    ) -> None:
        """Rows of few values, in which K cuts through a mass of ties."""
        scores = np.random.default_rng(seed).integers(0, values, (2, 700)) - 1
        work = _made(subject, 2, 700, select)
        check(work, subject.tier.device, scores.astype(np.float32), [700, 511], select)

    def test_ragged_lengths(self, subject: Subject) -> None:
        """Lengths beside K, beside powers of two, below 0 and beyond the row, in one call."""
        edges = {0, 1, 2, 1000, 1001, *(2**n for n in range(2, 10))}
        for select in (1, 64, 512):
            near = {*edges, select}
            lengths = sorted({edge + step for edge in near for step in (-1, 0, 1)})
            scores = long_rows("few values", len(lengths), 1000)
            work = _made(subject, len(lengths), 1000, select)
            check(work, subject.tier.device, scores, lengths, select)

    def test_long_rows(self, subject: Subject) -> None:
        """Rows of every kind and of all widths of the options, whole and cut short."""
        options = subject.options or TopKOptions()
        kinds = ["few values", "nan"] if subject.tier.name == "interpret" else [*KINDS]
        for width in options.widths:
            lengths = [width, width - 17, width // 3, width // 9]
            for select in options.selects:
                work = _made(subject, len(lengths), width, select)
                for kind in kinds:
                    scores = long_rows(kind, len(lengths), width)
                    check(work, subject.tier.device, scores, lengths, select)

    def test_serves_all_that_is_smaller(self, subject: Subject) -> None:
        """Call after call of fewer rows, columns and ids than the scratch was made for: nothing
        that an earlier call left there has an influence."""
        most = max((subject.options or TopKOptions()).widths)
        work = _made(subject, 5, most, 90)

        @examples(subject.tier, cpu=40, interpret=15)
        @given(st.integers(1, 5), st.integers(1, most), st.integers(1, 90), seeds())
        def run(rows: int, width: int, select: int, seed: int) -> None:
            random = np.random.default_rng(seed)
            scores = random.standard_normal((rows, width)).astype(np.float32)
            lengths = random.integers(0, width + 1, rows).tolist()
            check(work, subject.tier.device, scores, lengths, select)

        run()

    def test_arguments_stay_as_they_are(self, subject: Subject) -> None:
        """Scores and lengths are only read."""
        device = subject.tier.device
        scores = torch.from_numpy(long_rows("nan", 2, 600)).to(device)
        lengths = torch.tensor([600, 47], dtype=torch.int32, device=device)
        before = scores.clone(), lengths.clone()
        ids = torch.empty((2, 30), dtype=torch.int32, device=device)
        _made(subject, 2, 600, 30).topk(scores, lengths, ids)
        assert torch.equal(lengths, before[1]), "topk wrote to its argument lengths"
        assert torch.equal(scores.view(torch.int32), before[0].view(torch.int32)), (
            "topk wrote to its argument scores"
        )

    def test_reads_nothing_on_the_host(self, subject: Subject) -> None:
        """No ``item()``, ``tolist()`` or ``nonzero()``."""
        require_interpreted(subject)
        scores, lengths = torch.zeros(2, 600), torch.tensor([600, 47], dtype=torch.int32)
        ids = torch.empty((2, 30), dtype=torch.int32)
        work = _made(subject, 2, 600, 30)
        with no_host_reads():
            work.topk(scores, lengths, ids)

    def test_captured_replays_follow_scores_and_lengths(self, subject: Subject) -> None:
        """In one CUDA graph behind the kernel that makes the scores."""
        require_graph(subject)
        for width in (subject.options or TopKOptions()).widths:
            _check_replays(_made(subject, 4, width, 64), subject.tier.device, width)


def _made(subject: Subject, rows: int, columns: int, select: int) -> Any:
    return subject.make(TopKSetup(rows, columns, select, subject.tier.device))


def _check_replays(work: Any, device: torch.device, width: int) -> None:
    source = torch.empty((4, width), device=device)
    scores = torch.empty_like(source)
    lengths = torch.full((4,), width, dtype=torch.int32, device=device)
    ids = torch.full((4, 64), GARBAGE, dtype=torch.int32, device=device)

    def step() -> None:
        torch.mul(source, -1, out=scores)
        work.topk(scores, lengths, ids)

    source.normal_()
    step()
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    for sizes in ([width, 5, 0, width // 2], [0, width, width - 1, 64]):
        source.normal_()
        lengths.copy_(torch.tensor(sizes))
        ids.fill_(GARBAGE)
        graph.replay()
        rows: Tensor = (-source).cpu()
        for row, size, got in zip(rows.numpy(), sizes, ids.tolist(), strict=True):
            assert got == best(row, size, 64), f"{width} columns, length {size}: not replayed"
