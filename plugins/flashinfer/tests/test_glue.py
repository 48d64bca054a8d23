"""Code around the library: kernels against plain Python, and the prompts' parts."""

from __future__ import annotations

import os

import numpy
import pytest
import torch
from attrs import evolve
from hypothesis import given, settings
from hypothesis import strategies as st

CUDA = torch.cuda.is_available()
if not CUDA:
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.types import GroupShape, Tables  # noqa: E402
from topkv_flashinfer import kernels, latent, plans, prompts, reference  # noqa: E402
from topkv_testing.backend.plans import AdaptCase, StepInputs  # noqa: E402
from topkv_testing.strategies import Geometry  # noqa: E402

DEVICE = "cuda" if CUDA else "cpu"
ON = pytest.mark.parametrize(
    "device", [pytest.param(DEVICE, marks=[pytest.mark.gpu] if CUDA else [])]
)
TRASH = -(2**31)


def ints(values, device=DEVICE):
    return torch.tensor(values, dtype=torch.int32, device=device)


def tables(data, unit):
    """Lengths and a page table, trash behind the pages in use; and the pages of each lane."""
    lanes, width = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
    most = st.one_of(st.just(0), st.integers(0, width * unit))
    lengths = [data.draw(most) for _ in range(lanes)]
    lists = [[n * 100 + i for i in range(-(-size // unit))] for n, size in enumerate(lengths)]
    table = ints([pages + [TRASH] * (width - len(pages)) for pages in lists])
    return lengths, table, lists


@ON
def test_the_table_is_spread_over_a_constant_count(device):
    @given(data=st.data(), unit=st.sampled_from([1, 2, 16]))
    @settings(deadline=None, max_examples=30)
    def check(data, unit):
        lengths, table, lists = tables(data, unit)
        lanes, width = table.shape
        wide = torch.nn.functional.pad(table, (0, 3), value=TRASH)  # rows at another stride
        indices, last = ints([-7] * (lanes * width + 4)), ints([-7] * (lanes + 1))
        kernels.spread_kernel[(lanes, -(-width // 4))](
            *(wide[:, :width], ints(lengths), indices, last, width, wide.stride(0)),
            UNIT=unit,
            BLOCK=4,
        )
        spread = [page for pages in lists for page in pages + [0] * (width - len(pages))]
        assert indices.tolist() == spread + [-7] * 4
        # What the library counts: whole pages but the last, and the tokens of that.
        counted = [(width - 1) * unit + each for each in last[:-1].tolist()]
        assert counted == lengths
        assert last[-1] == -7
        same = reference.spread(table.cpu(), ints(lengths, "cpu"), unit)
        assert [each.tolist() for each in same] == [spread, last[:-1].tolist()]

    check()


def test_a_query_sees_all_but_the_tokens_behind_it():
    """Two rows of two lanes; the second has a lane with fewer tokens than queries."""
    seen = reference.seen(torch.tensor([9, 5, 2, 0]), torch.tensor([2, 3]), 3).view(2, 3, 2)
    assert seen.tolist() == [[[8, 4], [9, 5], [0, 0]], [[0, 0], [1, 0], [2, 0]]]


@ON
def test_each_query_has_lanes_of_its_own(device):
    """In the order of rows, queries and lanes of a row."""

    @given(data=st.data(), unit=st.sampled_from([1, 2, 16]), most=st.integers(2, 4))
    @settings(deadline=None, max_examples=30)
    def check(data, unit, most):
        lengths, table, _ = tables(data, unit)
        lanes, width = table.shape
        each = 2 if lanes % 2 == 0 else 1
        rows = lanes // each
        queries = ints([data.draw(st.integers(1, most)) for _ in range(rows)])
        pages = plans.Pages.empty(lanes * most, width, torch.device(device))
        for buffer in (pages.indices, pages.last, pages.seen):
            buffer.fill_(-7)
        sizes = ints(lengths)
        got = pages.take(Tables(table, sizes, queries=queries), unit, most)
        seen = reference.seen(sizes, queries, most)
        assert torch.equal(got, seen)
        apart = table.view(rows, 1, each, width).expand(-1, most, -1, -1).flatten(0, 2)
        same = reference.spread(apart, seen, unit)
        assert torch.equal(pages.indices, same[0])
        assert torch.equal(pages.last, same[1])

    check()


def small_step(device):
    """A plan of two lanes of three units to adapt, and what comes of it."""
    geometry = Geometry(1, 1, 16, 1, 1, "shared", torch.float32)
    case = AdaptCase(geometry, ((0, 9), (2, 3)), (2, 1), 2, 4, 2, 3)
    group = GroupShape((0,), 1, 1, 1, 16, torch.float32, 64, 3, 64, 2, 4, 2)
    inputs = StepInputs.empty(group, 2, device)
    case.fill(inputs)
    return case, inputs


@ON
def test_pages_are_copied_unless_they_were_written_along(device):
    pages = plans.Pages.empty(4, 3, torch.device(device))
    case, inputs = small_step(device)
    tables = Tables(ints([[TRASH] * 3] * 2), ints([-7, -7]))

    def spoil():
        pages.indices.fill_(4)
        pages.last.fill_(-7)

    def check():
        case.check(tables.table, tables.lengths)
        assert pages.indices.tolist() == [*tables.table.flatten().tolist(), *[4] * 6]
        assert pages.last.tolist() == [*(size - 2 for size in tables.lengths.tolist()), -7, -7]

    spoil()
    pages.adapt(inputs.view, inputs.plan, tables)
    check()
    spoil()
    pages.take(tables, 1)
    assert pages.indices.tolist() == [4] * 12, "a table that was written along is copied"
    pages.take(evolve(tables, attached=None), 1)  # as of a dense layer, and after a plan
    check()
    spoil()
    pages.take(evolve(tables, attached=plans.Pages.empty(4, 3, torch.device(device))), 1)
    check()


@ON
def test_a_table_that_does_not_fit_is_adapted_all_the_same(device):
    pages = plans.Pages.empty(1, 5, torch.device(device))
    assert pages.fitting(1, 5) is pages
    for lanes, width in ((2, 2), (1, 6)):
        other = pages.fitting(lanes, width)
        assert (other.indices.numel(), other.last.numel()) == (lanes * width, lanes)
    case, inputs = small_step(device)
    tables = Tables(ints([[TRASH] * 3] * 2), ints([-7, -7]), attached=pages)  # of the last step
    pages.adapt(inputs.view, inputs.plan, tables)
    case.check(tables.table, tables.lengths)
    assert not pages.indices.any()
    assert tables.attached is None


def planned(lanes, width, unit, limit, order):
    """A workspace as the library's planner leaves one: works of ``limit`` tokens, any order."""
    tokens = width * unit
    spans = [
        (lane, first, min(first + limit, tokens))
        for lane in range(lanes)
        for first in range(0, tokens, limit)
    ]
    order.shuffle(spans)
    columns = {
        latent.KV_INDPTR: [lane * width for lane, _, _ in spans],
        latent.KV_LEN: [tokens] * len(spans),
        latent.KV_START: [first for _, first, _ in spans],
        latent.KV_END: [behind for _, _, behind in spans],
        latent.WORK_INDPTR: [0, len(spans) // 2, len(spans)],
    }
    info, words = [0] * latent.INFO, []
    info[latent.CLUSTERS] = 2
    for place, column in columns.items():
        info[place] = 4 * len(words)
        words += column + [-99] * (4 - len(column) % 4)
    return info, ints(words).view(torch.uint8), spans


@ON
def test_works_are_cut_down_to_the_lengths(device):
    @given(
        lengths=st.lists(st.integers(0, 24), min_size=1, max_size=4),
        limit=st.sampled_from([3, 8, 24]),
        order=st.randoms(use_true_random=False),
    )
    @settings(deadline=None, max_examples=30)
    def check(lengths, limit, order):
        info, workspace, spans = planned(len(lengths), 12, 2, limit, order)
        before = workspace.clone()
        works = latent.works_of(info, workspace, len(lengths), 12, 2)
        assert torch.equal(workspace, before), "finding the works changed them"
        for sizes in (lengths, [24] * len(lengths), lengths[::-1]):  # as replays do
            kernels.works_kernel[(-(-works.count // 4),)](
                *(works.lane, works.first, works.behind, ints(sizes)),
                *(works.kv_len, works.kv_start, works.kv_end, works.count),
                BLOCK=4,
            )
            attended = [set() for _ in sizes]
            for work, (lane, first, behind) in enumerate(spans):
                start, end = int(works.kv_start[work]), int(works.kv_end[work])
                assert works.kv_len[work] == sizes[lane]
                assert (start, end) == (0, 0) or first == start < end <= behind
                assert not attended[lane] & set(range(start, end)), "attended twice"
                attended[lane] |= set(range(start, end))
            assert attended == [set(range(size)) for size in sizes]
            same = reference.works(works.lane, works.first, works.behind, ints(sizes))
            got = (works.kv_len, works.kv_start, works.kv_end)
            assert all(torch.equal(a, b) for a, b in zip(got, same, strict=True))
        changed = (workspace != before).nonzero()[:, 0].tolist()
        inside = [range(info[p], info[p] + 4 * works.count) for p in (11, 13, 14)]
        assert all(any(byte in span for span in inside) for byte in changed)

    check()


@pytest.mark.parametrize(
    ("place", "value", "said"),
    [
        (latent.KV_LEN, 23, "lengths are not all 24"),
        (latent.KV_INDPTR, 5, "multiples of 12 pages"),
        (latent.KV_INDPTR, 36, "multiples of 12 pages"),
        (latent.KV_START, -1, "leave 0 .. 24"),
        (latent.KV_END, 25, "leave 0 .. 24"),
        (latent.KV_END, 23, "do not add up"),
    ],
)
def test_a_plan_of_another_layout_is_refused(place, value, said):
    import random

    info, workspace, spans = planned(3, 12, 2, 8, random.Random(0))
    work = [behind for _, _, behind in spans].index(24)
    start = info[place] + 4 * work
    workspace[start : start + 4].view(torch.int32).fill_(value)
    with pytest.raises(RuntimeError, match=said):
        latent.works_of(info, workspace, 3, 12, 2)
    with pytest.raises(RuntimeError, match="17 numbers instead of 18"):
        latent.works_of(info[:-1], workspace, 3, 12, 2)


@given(st.lists(st.lists(st.booleans(), min_size=5, max_size=5), min_size=1, max_size=7))
def test_masks_are_packed_from_the_lowest_bit(rows):
    mask = torch.tensor(rows)
    expected = numpy.packbits(mask.numpy().reshape(-1), bitorder="little")
    assert reference.packed(mask).tolist() == expected.tolist()


@given(st.integers(0, 9), st.integers(0, 9), st.integers(-12, 12))
def test_a_chunk_falls_into_blind_triangle_and_whole(queries, keys, ahead):
    counts = [min(max(i + ahead + 1, 0), keys) for i in range(queries)]
    blind, whole = prompts.regions(queries, keys, ahead)
    assert 0 <= blind <= whole <= queries
    assert counts[:blind] == [0] * blind
    assert counts[whole:] == [keys] * (queries - whole)
    # What the library's causal mask over the first keys gives: it ends at the last query and key.
    count = whole + ahead
    assert whole == blind or whole - blind <= count <= keys
    assert counts[blind:whole] == [count - (whole - 1 - i) for i in range(blind, whole)]


def test_far_keys_are_copied_and_near_ones_are_not():
    x = torch.arange(6.0).view(3, 2)
    assert prompts.near(x) is x
    far = torch.empty_strided((3, 1, 2), (2**30, 2, 1), device="meta")
    assert prompts.near(far).is_contiguous()


def test_tables_are_as_wide_as_the_core_makes_them():
    from topkv.types import GroupShape

    sparse = GroupShape((0,), 16, 1, 2, 64, torch.bfloat16, 128, 4, 99, 8, 8, 2)
    dense = GroupShape((0,), 128, 1, 2, 64, torch.bfloat16, 128, 4, 13, 0, 0, 0, "resident")
    assert plans.table_width(sparse) == 9
    assert [plans.table_width(sparse, queries) for queries in (1, 2, 17, 18)] == [9, 10, 10, 11]
    assert plans.table_width(dense) == 13
