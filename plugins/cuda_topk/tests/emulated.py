"""The emulator of ``emulator/cuda.h`` as a function, and rows for it."""

from __future__ import annotations

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
from attrs import asdict

import topkv_cuda_topk
from topkv_cuda_topk import reference
from topkv_cuda_topk.shapes import Shape, ranks

COMPILER = shutil.which("g++") or shutil.which("clang++")
SOURCES = Path(topkv_cuda_topk.__file__).parent
EMULATOR = Path(__file__).parent / "emulator"
POISON = -77
SHAPES = [
    *(Shape(1, 512, 4, 512, 512), Shape(2, 512, 12, 1536, 1024), Shape(4, 512, 8, 1024, 512)),
    *(Shape(2, 1024, 36, 2048, 1024), Shape(8, 512, 4, 512, 512)),
]
"""The last but one has masks of 64 bits, and all little room for candidates."""
LARGEST = float(np.finfo(np.float32).max)
ODD = [0.0, 1e-45, 1.17e-38, 1.0, 3.4e38, LARGEST, np.inf]
ODD = np.array([np.nan, *ODD, *(-value for value in ODD)], dtype=np.float32)


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
