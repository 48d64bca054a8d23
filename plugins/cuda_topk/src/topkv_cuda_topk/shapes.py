"""Division of a row among thread blocks, and the room that its candidates need."""

from __future__ import annotations

import math

from attrs import asdict, frozen

MAX_CLUSTER = 8
"""Most thread blocks of a cluster on every device that has clusters."""

MAX_PART = 36 * 1024
"""Most scores of a block: what its shared memory holds beside the candidates."""

MAX_COLUMNS = MAX_CLUSTER * MAX_PART
"""Longest row."""

FEWEST = 2048
"""Scores of a block below which a row is not divided further."""

USUAL_CLUSTER = 4
"""Blocks of a cluster as long as a row fits them: larger ones find no place side by side."""

MAX_ROOM = 13312
"""Most candidates of a row: what shared memory holds beside a block's scores."""

HALF_SHARED = 108 * 1024
"""Shared memory that scores and candidates of each of two blocks of a multiprocessor can have."""

DRAWN = (1, 2, 4, 8)
"""Scores that a thread may draw for the pivot."""

SAMPLE_COST = 2.4
"""Time of a sample over that of room for a candidate, as measured on an H200."""

PIVOT_SIGMAS, SLACK, ROOM_SIGMAS = 3.5, 16, 5.0
"""Distance of the pivot's rank among the samples from the expected one, on the safe side; which
part of that the search may end lower; and room for the error of the sample."""


@frozen
class Shape:
    """Sizes that the kernel is compiled for.

    Attributes:
        cluster: thread blocks of a row.
        threads: of a block.
        items: scores of a thread.
        room: candidates of a row.
        samples: scores that the pivot is drawn from.
        resident: blocks that a multiprocessor holds at a time, as far as it depends on registers.
    """

    cluster: int
    threads: int
    items: int
    room: int
    samples: int
    resident: int = 1

    @property
    def columns(self) -> int:
        """Longest row that the kernel takes."""
        return self.cluster * self.threads * self.items

    @property
    def definitions(self) -> list[str]:
        """Options that define the sizes for the compiler."""
        return [f"-D{name.upper()}={value}" for name, value in asdict(self).items()]


def ranks(columns: int, select: int, samples: int) -> tuple[int, int]:
    """First and last rank that the pivot may have among the samples of ``columns`` places.

    The number of samples among the K best is about Poisson with mean m = samples * K / columns,
    and the pivot has rank m + 3.5 sqrt(m) + 4 or a little more. For a row that ends earlier, fewer
    samples stand for fewer scores, and m is the same.
    """
    mean = samples * select / max(columns, 1)
    first = min(int(mean + PIVOT_SIGMAS * math.sqrt(mean)) + 4, samples)
    return first, first + first // SLACK


def need(samples: int, columns: int, select: int) -> int:
    """Room for the candidates of a row.

    They are as many as the samples above the pivot stand for, and the room is for 5 deviations of
    that: rows that need more are found by a slower way, some 1e-4 of them.
    """
    _, most = ranks(columns, select, samples)
    return math.ceil((most + ROOM_SIGMAS * math.sqrt(most)) * columns / samples)


def sampling(columns: int, select: int, threads: int) -> tuple[int, int]:
    """Samples, as many as pay for themselves by fewer candidates; and room for these.

    A row of no more scores than there is room for needs no samples: all of it are candidates.
    """
    counts = [threads * drawn for drawn in DRAWN]
    samples = min(counts, key=lambda count: SAMPLE_COST * count + need(count, columns, select))
    room = min(max(need(samples, columns, select), select), columns)
    return samples, threads * math.ceil(room / threads)


def shape_of(rows: int, columns: int, select: int, multiprocessors: int) -> Shape:
    """The division of ``rows`` rows of ``columns`` scores, at most ``MAX_COLUMNS``.

    As many blocks a row as there are multiprocessors for, and more only where a row needs them.
    """
    cluster = 1
    while (
        cluster < USUAL_CLUSTER
        and 2 * cluster * rows <= multiprocessors
        and 2 * cluster * FEWEST <= columns
    ):
        cluster *= 2
    while cluster * MAX_PART < columns:
        cluster *= 2
    part = math.ceil(columns / cluster)
    threads = 512 if part <= 512 * 32 else 1024
    items = 4 * math.ceil(part / (4 * threads))
    samples, room = sampling(columns, select, threads)
    # Blocks that take turns anyway are better off two at a time, if there is memory for that.
    halved = 4 * max(threads * items, room) + 6 * room <= HALF_SHARED
    resident = 2 if threads == 512 and halved and rows * cluster > multiprocessors else 1
    return Shape(cluster, threads, items, room, samples, resident)
