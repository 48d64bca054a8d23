"""The kernel on a real GPU, against a sort in float64: every way through it, on any scores."""

from __future__ import annotations

import threading

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.cuda_topk.tests.emulated import LARGEST, ODD, POISON, expected
from topkv.hooks.topk import TopKSetup
from topkv.ops.topk import topk
from topkv_cuda_topk import compiler, reference
from topkv_cuda_topk.shapes import Shape, shape_of
from topkv_cuda_topk.topk import CudaTopK

FOUND, TRIED = compiler.find()
CUDA = torch.cuda.is_available()
pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not CUDA, reason="needs a CUDA device"),
    pytest.mark.skipif(FOUND is None, reason="; ".join(TRIED)),
    pytest.mark.skipif(
        CUDA and torch.cuda.get_device_capability() < compiler.CAPABILITY,
        reason="needs compute capability 9.0",
    ),
]
INTS = {"dtype": torch.int32, "device": "cuda"}


def select_by(run, scores, lengths, select):
    """ids, from a poisoned result with a margin that must stay untouched."""
    ids = torch.full((len(scores), select + 3), POISON, **INTS)
    run(scores, torch.tensor(lengths, **INTS), ids[:, :select])
    assert (ids[:, select:] == POISON).all(), "wrote behind its row"
    return ids[:, :select].cpu()


def check(run, scores, lengths, select):
    """Compare with a sort; scores behind the length of a row are poison as well."""
    scores = torch.as_tensor(scores, dtype=torch.float32).clone()
    for row, length in zip(scores, lengths, strict=True):
        row[max(length, 0) :] = torch.inf
    got = select_by(run, scores.cuda(), lengths, select)
    for row, length, ids in zip(scores.numpy(), lengths, got.tolist(), strict=True):
        assert ids == expected(row, length, select)


def made(rows, columns, select):
    work = CudaTopK(TopKSetup(rows, columns, select, torch.device("cuda")))
    return lambda scores, lengths, ids: topk(scores, lengths, ids, impl="triton", work=work)


def shaped(*numbers):
    """The kernel for a shape that nobody would choose for these rows."""
    kernel = compiler.kernel_for(Shape(*numbers), torch.cuda.current_device())
    assert kernel.clusters > 0
    return kernel.launch


def make(kind: str, rows: int, width: int) -> torch.Tensor:
    normal = torch.randn(rows, width, generator=torch.Generator().manual_seed(width))
    ramp = torch.arange(width).float().expand(rows, width)
    kinds = {
        "normal": lambda: normal,
        "far from 0": lambda: normal + 10,
        "around 0": lambda: normal - 1.4,
        "far apart": lambda: torch.where(normal.abs() > 2.5, 1e30 * normal, normal),
        "softmax": lambda: (4 * normal).softmax(-1),
        "wide": lambda: normal.sign() * (normal.abs() * 20).exp2(),
        "equal": lambda: torch.zeros(rows, width),
        "two values": lambda: (normal > 1.5).float(),
        "few values": lambda: (2 * normal).round(),
        "subnormal": lambda: (normal * 20).round() * 2.0**-149,
        "infinite": lambda: torch.where(normal > 1.0, torch.inf, normal),
        "infinite above the least": lambda: torch.where(normal > 0.5, torch.inf, -LARGEST),
        "infinite below": lambda: torch.where(normal < 2.5, -torch.inf, normal),
        "nan": lambda: torch.where(normal > 0.5, torch.nan, normal),
        "only nan": lambda: torch.full((rows, width), torch.nan),
        "ascending": lambda: ramp,
        "descending": lambda: -ramp,
        "at the end": lambda: normal + 50 * (ramp > width - 3000),
        "period": lambda: ramp % 16 + normal / 100,
        "crowd below a gap": lambda: torch.where(normal > 2.2, 1e30, 1 + normal * 2.0**-20),
        "crowd above a gap": lambda: torch.where(normal > -2.2, 1 + normal * 2.0**-20, -1e30),
        "zeros of both signs": lambda: torch.where(normal > 1.8, normal, normal.sign() * 0.0),
    }
    return kinds[kind]().clone()


KINDS = [
    *("around 0", "far apart", "infinite above the least"),
    *("normal", "far from 0", "softmax", "wide", "equal", "two values", "few values"),
    *("subnormal", "infinite", "infinite below", "nan", "only nan", "ascending", "descending"),
    *("at the end", "period", "crowd below a gap", "crowd above a gap", "zeros of both signs"),
]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("select", [1, 127, 2048])
def test_kinds_of_scores(kind, select):
    for columns in (5000, 32768, 131136):
        rows = make(kind, 5, columns)
        lengths = [columns, columns - 17, columns // 2, select + 1, 3]
        check(made(5, columns, select), rows, lengths, select)


@pytest.mark.parametrize(
    "shape",
    [
        *((1, 512, 4, 512, 512), (1, 512, 32, 512, 512), (2, 512, 4, 512, 512)),
        *((2, 1024, 4, 1024, 1024), (4, 512, 8, 512, 4096), (4, 1024, 16, 2048, 1024)),
        *((8, 512, 4, 512, 512), (8, 512, 16, 1536, 2048), (8, 1024, 32, 13312, 4096)),
        *((1, 512, 12, 512, 512), (2, 512, 20, 1024, 512), (1, 1024, 24, 1024, 1024)),
        *((2, 512, 28, 512, 512), (4, 1024, 36, 9216, 1024), (1, 1024, 36, 1024, 1024)),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "kind",
    ["normal", "far from 0", "far apart", "few values", "at the end", "nan", "equal", "wide"],
)
def test_shapes_with_little_room(shape, kind):
    """Rows with too little room for their candidates, and in more blocks than they need."""
    columns = shape[0] * shape[1] * shape[2]
    for width in {columns, columns - 5, columns // 2 + 3, max(columns // 7, 1)}:
        rows = make(kind, 3, width)
        select = min(shape[3], 300)
        check(shaped(*shape), rows, [width, width - 1, max(width // 3, 1)], select)


@pytest.mark.parametrize("columns", [20000, 32832, 100000, 131136, 294912])
def test_a_sample_that_misleads(columns):
    """Scores high or low just where the kernel looks: the guess is bad, and the ids are right."""
    for select in (100, 2048):
        count = torch.cuda.get_device_properties(0).multi_processor_count
        samples = shape_of(4, columns, select, count).samples
        for value in (-1e9, 1e9):
            rows = make("normal", 4, columns)
            lengths = [columns, columns - 1, columns * 3 // 4, columns]
            rows[:3, reference.places(columns, samples)] = value
            rows[2] = rows[2].round()
            check(made(4, columns, select), rows, lengths, select)


def test_every_length():
    lengths = [*range(-1, 70), *range(500, 530), *range(2040, 2060), *range(4090, 4100), 9999]
    rows = make("few values", len(lengths), 4100)
    for select in (1, 64, 2048, 4099):
        check(made(len(lengths), 4100, select), rows, lengths, select)


@given(st.data())
@settings(max_examples=150, deadline=None)
def test_any_values(data):
    rows, width, select = (data.draw(st.integers(1, high)) for high in (3, 60, 70))
    value = st.one_of(st.sampled_from(ODD.tolist()), st.floats(width=32))
    line = st.lists(value, min_size=width, max_size=width)
    scores = torch.tensor([data.draw(line) for _ in range(rows)], dtype=torch.float32)
    lengths = [data.draw(st.integers(-1, width + 1)) for _ in range(rows)]
    check(made(3, 60, 70), scores, lengths, select)


@given(
    seed=st.integers(0, 10**6),
    width=st.integers(1, 140_000),
    select=st.sampled_from([1, 64, 500, 2048]),
    values=st.sampled_from([2, 50, 10**4, 10**9]),
    skew=st.integers(0, 3),
)
@settings(max_examples=150, deadline=None)
def test_any_row(seed, width, select, values, skew):
    random = np.random.default_rng(seed)
    scores = random.integers(0, values, (4, width)) - values // 2
    scores = scores + skew * values * (np.arange(width) > random.integers(0, width))
    lengths = random.integers(0, width + 1, 4).tolist()
    check(made(16, 140_000, 2048), scores.astype(np.float32), lengths, select)


def test_rows_may_be_strided_and_unaligned():
    wide = make("normal", 4, 50_000).cuda()
    for first in range(5):
        part = wide[:, first : first + 40_001]
        lengths = [40_001, 3, 40_000, 17]
        got = select_by(made(4, 40_001, 256), part, lengths, 256)
        for row, length, ids in zip(part.cpu().numpy(), lengths, got.tolist(), strict=True):
            assert ids == expected(row, length, 256)


@pytest.mark.parametrize("rows", [1, 16, 64, 132, 133, 300])
def test_any_number_of_rows(rows):
    for columns in (3000, 32768):
        check(made(rows, columns, 128), make("normal", rows, columns), [columns] * rows, 128)


def test_replays_follow_scores_and_lengths():
    """The graph has the kernel that makes the scores too, behind which the top-k starts early."""
    scores, source = torch.empty(5, 131072, device="cuda"), torch.randn(5, 131072, device="cuda")
    lengths = torch.full((5,), 131072, **INTS)
    run, ids = made(5, 131072, 2048), torch.full((5, 2048), POISON, **INTS)

    def step():
        torch.mul(source, -1, out=scores)
        run(scores, lengths, ids)

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(3):
            step()
    for sizes in ([131072, 5, 0, 60000, 131071], [0, 131072, 2049, 1, 2048]):
        source.normal_()
        lengths.copy_(torch.tensor(sizes))
        ids.fill_(POISON)
        graph.replay()
        for row, length, got in zip(-source.cpu().numpy(), sizes, ids.tolist(), strict=True):
            assert got == expected(row, length, 2048)


def test_other_sizes_than_made_for_are_refused():
    run = made(2, 3000, 64)
    scores, ids = torch.zeros(2, 3001, device="cuda"), torch.zeros(2, 65, **INTS)
    with pytest.raises(ValueError, match="64 of 3001 scores"):
        run(scores, torch.ones(2, **INTS), ids[:, :64])
    with pytest.raises(ValueError, match="65 of 3000 scores"):
        run(scores[:, :3000], torch.ones(2, **INTS), ids)


def test_threads_that_have_not_called_yet():
    rows = make("normal", 2, 20_000)
    run, scores, done = made(2, 20_000, 64), rows.cuda(), []
    lengths, ids = torch.full((2,), 20_000, **INTS), torch.full((2, 64), POISON, **INTS)
    torch.cuda.synchronize()

    def work():
        run(scores, lengths, ids)
        done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
    for row, got in zip(rows.numpy(), ids.tolist(), strict=True):
        assert got == expected(row, 20_000, 64)


def test_no_columns():
    topk(
        torch.zeros(2, 0, device="cuda"),
        torch.zeros(2, **INTS),
        (ids := torch.full((2, 5), POISON, **INTS)),
        impl="triton",
        work=CudaTopK(TopKSetup(2, 0, 5, torch.device("cuda"))),
    )
    assert (ids == -1).all()


@pytest.mark.skipif(CUDA and torch.cuda.device_count() < 2, reason="needs two devices")
def test_on_a_device_that_is_not_current():
    rows, device = make("normal", 3, 40_000), torch.device("cuda", 1)
    work = CudaTopK(TopKSetup(3, 40_000, 300, device))
    ids = torch.full((3, 300), POISON, dtype=torch.int32, device=device)
    lengths = torch.full((3,), 40_000, dtype=torch.int32, device=device)
    topk(rows.to(device), lengths, ids, impl="triton", work=work)
    for row, got in zip(rows.numpy(), ids.tolist(), strict=True):
        assert got == expected(row, 40_000, 300)
    here = [x.to("cuda:0") for x in (rows, lengths, ids)]
    with pytest.raises(ValueError, match=r"on cuda:0, and it was made for .* on cuda:1"):
        topk(*here, impl="triton", work=work)


def test_the_usual_shapes_find_a_place():
    count = torch.cuda.get_device_properties(0).multi_processor_count
    for rows, columns in ((1, 262144), (16, 131072), (64, 32768), (64, 131072)):
        kernel = compiler.kernel_for(shape_of(rows, columns, 2048, count), 0)
        assert kernel.clusters * kernel.shape.cluster >= min(rows, 8) * kernel.shape.cluster
