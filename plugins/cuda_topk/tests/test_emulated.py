"""The kernel on a CPU, every thread a fiber in random order: see ``emulator/cuda.h``."""

from __future__ import annotations

import ctypes
import faulthandler
import multiprocessing
import shutil
import subprocess
from functools import cache, partial
from pathlib import Path

import numpy as np
import pytest
from attrs import asdict
from hypothesis import given, settings
from hypothesis import strategies as st

import topkv_cuda_topk
from topkv_cuda_topk import reference
from topkv_cuda_topk.shapes import Shape, ranks

COMPILER = shutil.which("g++") or shutil.which("clang++")
pytestmark = pytest.mark.skipif(COMPILER is None, reason="needs g++ or clang++")

SOURCES = Path(topkv_cuda_topk.__file__).parent
EMULATOR = Path(__file__).parent / "emulator"
POISON = -77
SHAPES = [
    *(Shape(1, 512, 4, 512, 512), Shape(2, 512, 12, 1536, 1024), Shape(4, 512, 8, 1024, 512)),
    *(Shape(2, 1024, 36, 2048, 1024), Shape(8, 512, 4, 512, 512)),
]
"""The last but one has masks of 64 bits, and all little room for candidates."""
LARGEST = float(np.finfo(np.float32).max)
ODD = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1.17e-38, 1, -1, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38, LARGEST],
    dtype=np.float32,
)


def sources(folder: Path) -> Path:
    """A folder with the kernel, in which the emulator's ``device.cuh`` stands for its own."""
    for path in [*SOURCES.glob("*.cu*"), *EMULATOR.iterdir()]:
        shutil.copy(path, folder)
    return folder


def build(folder: Path, shape: Shape):
    """The kernel for a shape as a function of a library."""
    library = folder / f"{'_'.join(map(str, asdict(shape).values()))}.so"
    # Hidden, or libraries for two shapes would share their fibers.
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden"]
    command = [COMPILER, *options, *shape.definitions, "-x", "c++", "run.cpp", "-o", library]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    kernel = ctypes.CDLL(str(library)).run
    kernel.restype = ctypes.c_char_p
    pointers, strides = [ctypes.c_void_p] * 3, [ctypes.c_longlong] * 2
    kernel.argtypes = [*pointers, *strides, *[ctypes.c_int] * 5, ctypes.c_uint]

    def run(scores, counts, ids, select, seed):
        rows, columns = scores.shape
        said = kernel(
            *(scores.ctypes.data, counts.ctypes.data, ids.ctypes.data),
            *(scores.strides[0] // 4, ids.strides[0] // 4, columns, select),
            *(*ranks(columns, select, shape.samples), rows, seed),
        )
        assert said is None, said.decode()

    return run


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernel by shape, compiled as it is asked for."""
    return cache(partial(build, sources(tmp_path_factory.mktemp("emulated"))))


def expected(scores: np.ndarray, length: int, select: int) -> list[int]:
    """The definition, in float64: descending score, then ascending index; -1 behind it."""
    with np.errstate(invalid="ignore"):  # Signalling NaN.
        values = scores[: min(max(length, 0), len(scores))].astype(np.float64)
    values[np.isnan(values)] = -np.inf
    best = np.lexsort((np.arange(len(values)), -(values + 0.0)))[:select]
    return [*sorted(best.tolist()), *[-1] * (select - len(best))]


def check(run, scores, lengths, select, seed=0):
    """Rows of ``scores`` with poison behind their lengths, and ids with a margin behind."""
    for row, length in zip(scores, lengths, strict=True):
        row[max(length, 0) :] = np.inf
    counts = np.array(lengths, dtype=np.int32)
    ids = np.full((len(scores), select + 3), POISON, dtype=np.int32)
    run(scores, counts, ids, select, seed)
    assert (ids[:, select:] == POISON).all(), "wrote behind its row"
    for row, length, got in zip(scores, lengths, ids[:, :select].tolist(), strict=True):
        assert got == expected(row, length, select)


def make(kind: str, width: int, random: np.random.Generator) -> np.ndarray:
    normal = random.standard_normal(width)
    kinds = {
        "normal": lambda: normal,
        "far from 0": lambda: normal + 10,
        "around 0": lambda: normal - 1.5,
        "far apart": lambda: np.where(random.random(width) < 0.01, 1e30 * normal, normal),
        "few values": lambda: (2 * normal).round(),
        "equal": lambda: np.zeros(width),
        "odd": lambda: random.choice(ODD, width),
        "bits": lambda: random.integers(0, 2**32, width, dtype=np.uint32).view(np.float32),
        "at the end": lambda: normal + 50 * (np.arange(width) > width - 300),
        "infinite below": lambda: np.where(random.random(width) < 0.9, -np.inf, normal),
    }
    with np.errstate(all="ignore"):
        return kinds[kind]().astype(np.float32)


KINDS = [
    *("normal", "far from 0", "around 0", "far apart", "few values", "equal", "odd", "bits"),
    *("at the end", "infinite below"),
]


def aligned(rows: int, columns: int, first: int) -> np.ndarray:
    """Rows of which the first begins ``first`` scores behind a multiple of 16 bytes."""
    stride = columns + 8
    whole = np.zeros(rows * stride + 8, dtype=np.float32)
    start = first + -(whole.ctypes.data // 4) % 4
    return whole[start : start + rows * stride].reshape(rows, stride)[:, :columns]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_rows(kernels, shape):
    @settings(max_examples=12, deadline=None)
    @given(data=st.data(), kind=st.sampled_from(KINDS), seed=st.integers(0, 10**6))
    def inner(data, kind, seed):
        columns = data.draw(st.integers(max(shape.columns - 40, 1), shape.columns))
        columns = data.draw(st.sampled_from([columns, columns // 2 + 3, columns // 5 + 1]))
        select = data.draw(st.integers(1, min(shape.room, 400)))
        lengths = [columns, data.draw(st.integers(-1, columns + 1))]
        scores = aligned(2, columns, data.draw(st.integers(0, 3)))
        random = np.random.default_rng(seed)
        for row, length in zip(scores, lengths, strict=True):
            row[:] = make(kind, columns, random)
            if data.draw(st.booleans()) and length > 0:  # The sample misleads.
                places = reference.places(columns, shape.samples)
                row[places.numpy()] = data.draw(st.sampled_from([-1e9, 1e9]))
        check(kernels(shape), scores, lengths, select, seed)

    inner()


@pytest.mark.parametrize("low", [-LARGEST, -1e38])
def test_many_infinite_scores(kernels, low):
    """A part of their bin ends behind the last of all keys."""
    random = np.random.default_rng(0)
    for columns, select, count in ((400, 50, 70), (2048, 300, 1500)):
        scores = aligned(1, columns, 0)
        scores[:] = random.standard_normal(columns)
        scores[0, 0] = low
        scores[0, 1 + random.permutation(columns - 1)[:count]] = np.inf
        check(kernels(SHAPES[0]), scores, [columns], select)


def tiny(steps) -> np.ndarray:
    """Scores so many subnormal steps above 0 or below."""
    steps = np.asarray(steps)
    return np.where(steps < 0, 2**31 - steps, steps).astype(np.uint32).view(np.float32)


def test_zeros_at_the_pivot(kernels):
    """The pivot falls on the key between 0 and the scores below, which is no score's, and just as
    many as are wanted lie above, as lists that do not fit when they are merged."""
    shape, select, random = Shape(2, 512, 4, 1024, 2048), 1022, np.random.default_rng(0)
    places, counts = np.unique(reference.places(4096, shape.samples), return_counts=True)
    order = random.permutation(len(places))
    reach = 1 + counts[order].cumsum().searchsorted(ranks(4096, select, shape.samples)[0])
    zeros, positive = places[order[:reach]], places[order[: reach - 150]]
    scores = aligned(1, 4096, 0)
    scores[:] = tiny(-100)
    scores[0, zeros], scores[0, positive] = 0, tiny(random.integers(1, 100, len(positive)))
    scores[0, places[order[reach]]], scores[0, positive[:2]] = tiny(-600), [1e-30, tiny(299)]
    free = np.setdiff1d(np.arange(4096), places)
    for block, total in ((free[free < 2048], 509), (free[free >= 2048], 513)):
        new = total - np.isin(positive // 2048, block // 2048).sum()
        at = random.choice(block, new, replace=False)
        scores[0, at] = tiny(random.integers(1, 100, new))
    check(kernels(shape), scores, [4096], select)


def full(shape: Shape, short: int, first: int, random: np.random.Generator) -> np.ndarray:
    """A row with all but ``short`` of the candidates that there is room for, ``first`` of them in
    the first of two blocks, none where the kernel draws its sample."""
    scores = aligned(1, shape.columns, 0)
    scores[:] = -1e9
    free = np.setdiff1d(
        np.arange(shape.columns), reference.places(shape.columns, shape.samples).numpy()
    )
    first_block, last_block = free[free < shape.columns // 2], free[free >= shape.columns // 2]
    for block, count in ((first_block, first), (last_block, shape.room - short - first)):
        scores[0, random.choice(block, count, replace=False)] = random.random(count)
    return scores


def run_full(run, shape: Shape) -> None:
    """Lists of candidates that end within a four."""
    random = np.random.default_rng(0)
    for short in range(6):
        for first in (1, 2, 1023):
            select = shape.room - short - int(random.integers(10))
            check(run, full(shape, short, first, random), [shape.columns], select, short)


def test_candidates_that_just_fill_their_room(kernels):
    run_full(kernels(SHAPES[1]), SHAPES[1])


COUNTED = "&shared.bins[bin[i]], 1);\n    }\n"
LISTED = "atomicAdd(&shared.listed, 1)] = keys[i];\n    }\n"
SUMMED = "line[warp_of()] = {value, other};\n"
CHOSEN = "above + own, above};\n"
MUTANTS = {
    "blocks leave while others read": ("topk.cu", "p_ids);\n    wait();\n}", "p_ids);\n}"),
    "nobody waits for the copy": ("topk.cu", "if (copies) wait_for_copy(&shared.copied);", ""),
    "bins are looked at early": ("search.cuh", f"{COUNTED}    __syncthreads();", COUNTED),
    "keys are compared early": ("search.cuh", f"{LISTED}    __syncthreads();", LISTED),
    "the list of a search stays": ("search.cuh", "shared.listed = 0;", ";"),
    "the choice is read early": ("search.cuh", f"{CHOSEN}    __syncthreads();", CHOSEN),
    "sums are read early": ("block.cuh", f"{SUMMED}    __syncthreads();", SUMMED),
    "more are merged than there is room for": ("topk.cu", "merged > ROOM", "count > ROOM"),
    "fours are not filled": ("candidates.cuh", "four.keys[j] = 0", ""),
    "blocks before are forgotten": ("candidates.cuh", "+ threadIdx.x < before", "< 0"),
    "ties have no budget": ("candidates.cuh", "&& tie < cut.budget", ""),
    "ties have no budget in rows of them": ("any.cuh", "equal && ties < budget;", "equal;"),
}


def run_rows(run, shape: Shape) -> None:
    """Rows of several kinds in several orders."""
    faulthandler.disable()
    random = np.random.default_rng(0)
    for seed, kind in enumerate([*KINDS[:5], "equal", "at the end"] * 2):
        scores = aligned(1, shape.columns, 0)
        scores[0] = make(kind, shape.columns, random)
        check(run, scores, [shape.columns], 300, seed)
    run_full(run, shape)


def ends_well(run, shape: Shape) -> bool:
    """Whether all rows are right, in a process that a faulty kernel may wreck."""
    process = multiprocessing.get_context("fork").Process(target=run_rows, args=(run, shape))
    process.start()
    process.join()
    return process.exitcode == 0


def test_rows_that_faults_are_looked_for_on(kernels):
    assert ends_well(kernels(SHAPES[1]), SHAPES[1])


@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_seen(tmp_path, name):
    """Each of these changes to the kernel is caught by the rows that it passes itself."""
    file, good, bad = MUTANTS[name]
    text = (sources(tmp_path) / file).read_text()
    assert text.count(good) == 1
    (tmp_path / file).write_text(text.replace(good, bad))
    assert not ends_well(build(tmp_path, SHAPES[1]), SHAPES[1])
