"""The kernel on a CPU, every thread a fiber in random order: see ``emulator/cuda.h``."""

from __future__ import annotations

import faulthandler
import multiprocessing
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plugins.cuda_topk.tests.emulated import (
    COMPILER,
    KINDS,
    LARGEST,
    SHAPES,
    aligned,
    build,
    check,
    make,
    run_full,
    sources,
)
from topkv_cuda_topk import reference
from topkv_cuda_topk.shapes import Shape, ranks

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(COMPILER is None, reason="needs g++ or clang++"),
]


@pytest.fixture(scope="module")
def kernels(tmp_path_factory):
    """The kernel by shape, compiled as it is asked for."""
    return cache(partial(build, sources(tmp_path_factory.mktemp("emulated"))))


@pytest.mark.sampled(3)
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
    """A part of the bin of infinite scores ends behind the last of all keys."""
    random = np.random.default_rng(0)
    for columns, select, count in ((400, 50, 70), (2048, 300, 1500)):
        scores = aligned(1, columns, 0)
        scores[:] = random.standard_normal(columns)
        scores[0, 0] = low
        scores[0, 1 + random.permutation(columns - 1)[:count]] = np.inf
        check(kernels(SHAPES[0]), scores, [columns], select)


def tiny(steps) -> np.ndarray:
    """Scores N subnormal steps above 0 or below."""
    steps = np.asarray(steps)
    return np.where(steps < 0, 2**31 - steps, steps).astype(np.uint32).view(np.float32)


def test_zeros_at_the_pivot(kernels):
    """The pivot falls on the key between 0 and the scores below, which is no score's, and just as
    many as are wanted are above, as lists that do not fit when they are merged."""
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
    """Return True if all rows are right, in a process that a faulty kernel may wreck."""
    process = multiprocessing.get_context("fork").Process(target=run_rows, args=(run, shape))
    process.start()
    process.join()
    return process.exitcode == 0


def test_rows_that_faults_are_looked_for_on(kernels):
    assert ends_well(kernels(SHAPES[1]), SHAPES[1])


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", MUTANTS)
def test_faults_are_seen(tmp_path, name):
    """Each of these changes to the kernel is caught by the rows that it passes itself."""
    file, good, bad = MUTANTS[name]
    text = (sources(tmp_path) / file).read_text()
    assert text.count(good) == 1
    (tmp_path / file).write_text(text.replace(good, bad))
    assert not ends_well(build(tmp_path, SHAPES[1]), SHAPES[1])
