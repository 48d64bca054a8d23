"""Every path of the kernels, at blocks so small that short rows take them."""

from __future__ import annotations

import os

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.hooks.topk import TopKSetup  # noqa: E402
from topkv.ops import topk_kernels  # noqa: E402
from topkv.ops.topk import topk  # noqa: E402
from topkv_testing.topks import best  # noqa: E402
from topkv_triton_topk import kernels, launch  # noqa: E402
from topkv_triton_topk.topk import PivotTopK  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
pytestmark = [pytest.mark.slow, *[pytest.mark.gpu] * CUDA]
SMALL = {
    "SAMPLES": 32,
    "MIN_CANDIDATES": 16,
    "SLICE": 64,
    "WORD_BLOCK": 4,
    "WALK_BLOCK": 128,
    "PAD_BLOCK": 16,
}
ODD_BITS = [
    *(0x00000000, 0x80000000, 0x00000001, 0x80000001, 0x007FFFFF, 0x807FFFFF, 0x00800000),
    *(0x7F7FFFFF, 0xFF7FFFFF, 0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00000, 0x7F800001),
    *(0x3F800000, 0x3F800001, 0xBF800000, 0xBF800001),
]


@pytest.fixture
def small(monkeypatch):
    """Rows of more than 32 columns are long, in slices of 64."""
    monkeypatch.setattr(topk_kernels, "MAX_BLOCK", 32)
    for name, value in SMALL.items():
        monkeypatch.setattr(launch, name, value)


@pytest.fixture
def walks(monkeypatch):
    """Rows that were walked so far, in a list; only the interpreter can count them."""
    seen: list[None] = []
    if not CUDA:
        real = kernels.walk

        def walk(*args, **kwargs):
            seen.append(None)
            return real(*args, **kwargs)

        monkeypatch.setattr(kernels, "walk", walk)
    return seen


def pivot(rows: int, columns: int, select: int) -> PivotTopK:
    return PivotTopK(TopKSetup(rows, columns, select, torch.device(DEVICE)))


def select_by_pivot(scores: Tensor, lengths: Tensor, ids: Tensor) -> None:
    """Select with scratch of just this size, which starts as garbage."""
    work = pivot(*scores.shape, ids.shape[1])
    if work.scratch is not None:
        work.scratch.fill_(-7)
    topk(scores, lengths, ids, impl="triton", work=work)


def check(scores: np.ndarray, lengths: list[int], select: int) -> None:
    """The scores behind a row's length are poison, and so are the ids and what follows them."""
    scores = scores.astype(np.float32, order="C", copy=True)
    for row, length in zip(scores, lengths, strict=True):
        row[max(length, 0) :] = np.inf
    ids = torch.full((len(lengths), select + 3), -77, dtype=torch.int32, device=DEVICE)
    device_lengths = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    select_by_pivot(torch.from_numpy(scores).to(DEVICE), device_lengths, ids[:, :select])
    assert (ids[:, select:] == -77).all(), "wrote behind its row"
    for row, length, got in zip(scores, lengths, ids[:, :select].tolist(), strict=True):
        assert got == best(row, length, select)


def make(kind: str, rows: int, width: int, seed: int = 0) -> np.ndarray:
    """Scores fp32 [rows, width], rows differing where the kind allows it."""
    random = np.random.default_rng(seed)
    normal = random.standard_normal((rows, width))
    ramp = np.broadcast_to(np.arange(width), (rows, width))
    kinds = {
        "normal": lambda: normal,
        "softmax": lambda: np.exp(4 * normal - 12),
        "all equal": lambda: np.zeros((rows, width)),
        "two values": lambda: (normal > 1.5) * 2.0 - 1,
        "few values": lambda: (2 * normal).round(),
        "denormals": lambda: random.integers(-40, 40, (rows, width)) * 2.0**-149,
        "infinities": lambda: random.choice([np.inf, -np.inf, 1, 2], (rows, width)),
        "nan": lambda: np.where(normal > 0.5, np.nan, normal),
        "only nan": lambda: np.full((rows, width), np.nan),
        "tiny range": lambda: 1 + random.integers(0, width, (rows, width)) * 2.0**-23,
        "ascending": lambda: ramp,
        "descending": lambda: -ramp,
        "one slice": lambda: normal + 50 * (ramp // 64 == 1),
        "period": lambda: ramp % 16 + normal / 100,
        "crowd below a gap": lambda: np.where(normal > 2.2, 1e30, 1 + normal * 2.0**-20),
        "crowd above a gap": lambda: np.where(normal > -2.2, 1 + normal * 2.0**-20, -1e30),
    }
    return kinds[kind]().astype(np.float32, order="C")


KINDS = [
    *("normal", "softmax", "all equal", "two values", "few values", "denormals", "infinities"),
    *("nan", "only nan", "tiny range", "ascending", "descending", "one slice", "period"),
    *("crowd below a gap", "crowd above a gap"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("select", [1, 64, 130])
def test_every_kind_of_scores(small, kind, select):
    check(make(kind, 3, 600), [600, 577, 300], select)


@pytest.mark.parametrize("select", [1, 40, 65])
def test_ragged_lengths(small, select):
    lengths = [-3, 0, 1, select - 1, select, select + 1, 63, 64, 65, 127, 128, 129, 319, 320, 999]
    check(make("few values", len(lengths), 320), lengths, select)
    check(make("normal", len(lengths), 320), lengths, select)


@pytest.mark.parametrize("width", [33, 64, 65, 127, 129])
def test_more_ids_than_scores_and_about_as_many(small, width):
    for select in (width - 1, width, width + 1, 2 * width):
        check(make("few values", 2, width), [width, width - 1], select)


def test_any_bits(small):
    bits = st.one_of(st.sampled_from(ODD_BITS), st.integers(0, 2**32 - 1))

    @settings(deadline=None, max_examples=60)
    @given(
        palette=st.lists(bits, min_size=1, max_size=12),
        spread=st.sampled_from([0, 1, 40, 2**20]),
        width=st.sampled_from([100, 257, 400]),
        select=st.sampled_from([1, 3, 17, 64, 90]),
        length=st.floats(0, 1),
        seed=st.integers(0, 2**20),
    )
    def run(palette, spread, width, select, length, seed):
        random = np.random.default_rng(seed)
        chosen = random.choice(np.array(palette, dtype=np.uint64), (2, width))
        noise = random.integers(0, spread + 1, (2, width), dtype=np.uint64)
        scores = ((chosen + noise) & 0xFFFFFFFF).astype(np.uint32).view(np.float32)
        check(scores, [width, round(length * width)], select)

    run()


@pytest.mark.parametrize("kind", ["normal", "few values", "all equal", "nan"])
@pytest.mark.parametrize(
    "constants",
    [
        pytest.param({"PIVOT_SIGMAS": -4.0}, id="pivot too high"),
        pytest.param({"PIVOT_SIGMAS": 12.0, "ROOM_SIGMAS": -99.0}, id="pivot too low"),
    ],
)
def test_bad_pivots_change_only_the_time(small, walks, monkeypatch, kind, constants):
    for name, value in constants.items():
        monkeypatch.setattr(launch, name, value)
    check(make(kind, 3, 600), [600, 599, 200], 40)
    if kind == "normal" and not CUDA:
        assert len(walks) == 3, "these rows were to show that the walk is right"


@pytest.mark.parametrize("kind", KINDS)
def test_no_usual_row_is_walked(walks, kind):
    for select in (127, 2048):
        check(make(kind, 1, 1 << 17, seed=select), [1 << 17], select)
    assert not walks


@pytest.mark.parametrize("select", [1, 127, 2048, 8192])
def test_candidates_have_room_at_every_length(select):
    """The block is sized by the longest row; the rows below it must need no more."""
    before = 0
    for columns in range(9000, 1 << 20, 9999):
        block = launch.candidate_block(columns, select)
        assert max(before, select) <= block <= launch.MAX_CANDIDATES
        before = block
        samples = launch.samples_of(columns, select)
        for length in range(max(select, 4000), columns + 1, 39999):
            assert launch.need(samples, length, select) <= block


@pytest.mark.parametrize("kind", ["normal", "few values", "one slice"])
def test_parts_of_the_list_may_lie_in_any_order(small, monkeypatch, kind):
    """Slices take their parts of the list in the order in which they happen to run."""
    real, moved = kernels.collect_kernel, []

    class Shuffled:
        def __getitem__(self, grid):
            def launch(scores, lengths, work, *rest, **options):
                words, block = rest[6], options["BLOCK"]
                for row, length in zip(work, lengths.tolist(), strict=True):
                    slices = -(-length // 64)
                    pairs = row[2 * words : 2 * words + 2 * block].view(-1, 2)
                    parts = row[2 * words + 2 * block + 4 :][: 2 * slices].view(-1, 2)
                    order = sorted(range(slices), key=lambda part: (part * 7) % slices)
                    old, at = pairs.clone(), 0
                    for part in order:
                        first, count = parts[part].tolist()
                        pairs[at : at + count] = old[first : first + count]
                        parts[part, 0] = at
                        at += count
                    moved.append(at)
                return real[grid](scores, lengths, work, *rest, **options)

            return launch

    monkeypatch.setattr(kernels, "collect_kernel", Shuffled())
    monkeypatch.setattr(launch, "SAMPLES", 128)
    check(make(kind, 3, 2000), [2000, 1977, 1990], 40)
    assert len(moved) == 3
    assert kind == "few values" or min(moved) >= 40, "no list was read"


def test_ids_that_fit_no_block_are_walked():
    check(make("few values", 2, 70000), [70000, 40000], 39999)


def test_rows_may_be_strided_and_unaligned(small):
    wide = make("few values", 2, 700)
    ids = torch.full((2, 50), -77, dtype=torch.int32, device=DEVICE)
    lengths = torch.tensor([601, 500], dtype=torch.int32, device=DEVICE)
    select_by_pivot(torch.from_numpy(wide).to(DEVICE)[:, 7:608], lengths, ids)
    for row, length, got in zip(wide[:, 7:608], (601, 500), ids.tolist(), strict=True):
        assert got == best(row, length, 50)


@pytest.mark.gpu
@pytest.mark.skipif(not CUDA, reason="needs a CUDA device")
@pytest.mark.parametrize("early", [True, False])
def test_two_streams_and_replays_do_not_mix(monkeypatch, early):
    monkeypatch.setattr(launch, "EARLY", early)
    scores = [torch.randn(16, 1 << 17, device="cuda") for _ in range(2)]
    lengths = torch.full((16,), 1 << 17, dtype=torch.int32, device="cuda")
    ids = [torch.empty((16, 2048), dtype=torch.int32, device="cuda") for _ in range(2)]
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    works = [pivot(16, 1 << 17, 2048) for _ in range(2)]
    for one, out, graph, work in zip(scores, ids, graphs, works, strict=True):
        topk(one, lengths, out, impl="triton", work=work)
        with torch.cuda.graph(graph):
            # The kernel before writes the scores: an early start must not read the old ones.
            one.neg_()
            topk(one, lengths, out, impl="triton", work=work)
    streams = [torch.cuda.Stream() for _ in range(2)]
    torch.cuda.synchronize()
    for _ in range(21):
        for stream, graph in zip(streams, graphs, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
    torch.cuda.synchronize()
    for one, out in zip(scores, ids, strict=True):
        for row, got in zip(one.cpu().numpy(), out.tolist(), strict=True):
            assert got == best(row, 1 << 17, 2048)


def test_scratch_is_made_once(small):
    scores = torch.randn(2, 96, generator=torch.Generator().manual_seed(5)).to(DEVICE)
    lengths = torch.tensor([96, 70], dtype=torch.int32, device=DEVICE)
    work = pivot(5, 96, 7)
    assert pivot(5, 30, 7).scratch is None
    for poison in (-1, 2**30):
        work.scratch.fill_(poison)
        ids = torch.full((2, 7), -7, dtype=torch.int32, device=DEVICE)
        topk(scores, lengths, ids, impl="triton", work=work)
        for row, length, got in zip(scores.cpu().numpy(), (96, 70), ids.tolist(), strict=True):
            assert got == best(row, length, 7)


def test_scratch_is_enough_for_all_that_is_smaller(small):
    @settings(deadline=None, max_examples=30)
    @given(st.data())
    def run(data):
        rows, width, select = (data.draw(st.integers(1, most)) for most in (3, 400, 90))
        work = pivot(rows, width, select)
        rows, width, select = (data.draw(st.integers(1, most)) for most in (rows, width, select))
        scores = torch.from_numpy(make("few values", rows, width)).to(DEVICE)
        lengths = torch.full((rows,), width, dtype=torch.int32, device=DEVICE)
        ids = torch.full((rows, select), -7, dtype=torch.int32, device=DEVICE)
        topk(scores, lengths, ids, impl="triton", work=work)
        for row, got in zip(scores.cpu().numpy(), ids.tolist(), strict=True):
            assert got == best(row, width, select)

    run()


@pytest.mark.parametrize("sizes", [(3, 96, 7), (2, 97, 7), (2, 96, 8)])
def test_more_than_it_was_made_for_is_refused(small, sizes):
    rows, columns, select = sizes
    work = pivot(2, 96, 7)
    ints = {"dtype": torch.int32, "device": DEVICE}
    scores, ids = torch.zeros(rows, columns, device=DEVICE), torch.zeros(rows, select, **ints)
    said = f"{select} of {columns} scores in {rows} rows, and it was made for at most 7 of 96 in 2"
    with pytest.raises(ValueError, match=said):
        topk(scores, torch.ones(rows, **ints), ids, impl="triton", work=work)
