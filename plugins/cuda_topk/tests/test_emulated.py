"""The kernel on a CPU, every thread a fiber in random order: see ``emulator/cuda.h``."""

from __future__ import annotations

import ctypes
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
from topkv_cuda_topk.shapes import Shape

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
ODD = np.array(
    [0.0, -0.0, 1e-45, -1e-45, 1.17e-38, 1, -1, np.inf, -np.inf, np.nan, 3.4e38, -3.4e38],
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
    constants = [f"-D{name.upper()}={value}" for name, value in asdict(shape).items()]
    # Hidden, or libraries for two shapes would share their fibers.
    options = ["-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fvisibility=hidden", *constants]
    command = [COMPILER, *options, "-x", "c++", "run.cpp", "-o", library]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    run = ctypes.CDLL(str(library)).run
    run.restype = ctypes.c_char_p
    pointers, strides = [ctypes.c_void_p] * 3, [ctypes.c_longlong] * 2
    run.argtypes = [*pointers, *strides, *[ctypes.c_int] * 3, ctypes.c_uint]
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
    rows, columns = scores.shape
    for row, length in zip(scores, lengths, strict=True):
        row[max(length, 0) :] = np.inf
    counts = np.array(lengths, dtype=np.int32)
    ids = np.full((rows, select + 3), POISON, dtype=np.int32)
    said = run(
        *(scores.ctypes.data, counts.ctypes.data, ids.ctypes.data),
        *(scores.strides[0] // 4, select + 3, columns, select, rows, seed),
    )
    assert said is None, said.decode()
    assert (ids[:, select:] == POISON).all(), "wrote behind its row"
    for row, length, got in zip(scores, lengths, ids[:, :select].tolist(), strict=True):
        assert got == expected(row, length, select)


def make(kind: str, width: int, random: np.random.Generator) -> np.ndarray:
    normal = random.standard_normal(width)
    kinds = {
        "normal": lambda: normal,
        "few values": lambda: (2 * normal).round(),
        "equal": lambda: np.zeros(width),
        "odd": lambda: random.choice(ODD, width),
        "bits": lambda: random.integers(0, 2**32, width, dtype=np.uint32).view(np.float32),
        "at the end": lambda: normal + 50 * (np.arange(width) > width - 300),
        "infinite below": lambda: np.where(random.random(width) < 0.9, -np.inf, normal),
    }
    with np.errstate(all="ignore"):
        return kinds[kind]().astype(np.float32)


KINDS = ["normal", "few values", "equal", "odd", "bits", "at the end", "infinite below"]


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
                places = reference.places(min(length, columns), shape.samples)
                row[places.numpy()] = data.draw(st.sampled_from([-1e9, 1e9]))
        check(kernels(shape), scores, lengths, select, seed)

    inner()


CHOSEN = "from + width);\n    }\n"
MUTANTS = {
    "blocks leave while others read": ("topk.cu", "turn);\n    wait();\n}", "turn);\n}"),
    "nobody waits for the copy": ("topk.cu", "if (copies) wait_for_copy(&shared.copied);", ""),
    "bins are looked at early": ("search.cuh", "__syncthreads();\n        choose(", "choose("),
    "the choice is read early": ("search.cuh", f"{CHOSEN}    __syncthreads();", CHOSEN),
    "scans share a line": ("block.cuh", "partial[turn++ & 1]", "partial[0]"),
    "blocks before are forgotten": ("candidates.cuh", "+ threadIdx.x < before", "< 0"),
    "ties have no budget": ("part.cuh", "ties < cut.budget; equal", "true; equal"),
}


def run_rows(run, shape: Shape) -> None:
    """Rows of several kinds in several orders."""
    random = np.random.default_rng(0)
    for seed, kind in enumerate(["normal", "few values", "equal", "at the end"] * 3):
        scores = aligned(1, shape.columns, 0)
        scores[0] = make(kind, shape.columns, random)
        check(run, scores, [shape.columns], 300, seed)


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
