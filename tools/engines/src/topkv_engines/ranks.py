"""Tensor parallel ranks: each has some of the heads, a coordinator and a host pool for them.

Pages are given out by the engine, so they are the same on all ranks, and so is what each does in a
step (``topkv_engines.requests``).

Where there are fewer kv-heads than ranks, and latent attention has one, some ranks keep the same
rows. These share one host pool, and each writes all of it, the same bytes as the others. None is
asked to wait for another: a rank may still write for a request that has ended while the next one
that is ahead writes for the request that got its pages. But it reads them no sooner than in the
second layer of that step, and between two layers all ranks meet in an all-reduce, behind which
each has written both, in this order.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

from topkv.config import LoweredConfig
from topkv.errors import HostMemoryError
from topkv.hooks.algorithm import AlgorithmSpec


def rank_reasons(
    ranks: int, kv_heads: int, lowered: LoweredConfig, specs: Sequence[AlgorithmSpec | None]
) -> list[str]:
    """Reasons why algorithms cannot select where each rank has some of the heads alone.

    Args:
        ranks: number of tensor parallel ranks.
        kv_heads: of the whole model.
        lowered: of one rank.
        specs: of its groups; None for dense ones.
    """
    reasons: dict[str, None] = {}
    for group, spec in zip(lowered.groups, specs, strict=True):
        shared = group.scope == "shared" and kv_heads > 1
        if ranks == 1 or spec is None or spec.heads == "none":
            continue
        if spec.heads == "all" or shared:
            why = "all heads of a layer share a selection"
            hint = "set scope to 'kv_head'"
            if spec.heads == "all":
                why, hint = "a selection uses all heads of a layer", "set other parameters"
            reasons[
                f"tensor parallel ranks: with {group.algorithm} {why}, and each of {ranks} ranks "
                f"has some of the {kv_heads} kv-heads alone; {hint}, or use one rank"
            ] = None
    return [*reasons]


@contextmanager
def shared_file(
    rank: int, alike: int, exchange: Callable[[str], Sequence[str]]
) -> Iterator[int | None]:
    """Open a file in memory that all ranks map that keep the same rows; None if no other one does.

    All ranks have to ask for it at a time. It lasts as long as it is mapped.

    Args:
        rank: number of this one.
        alike: neighbouring ranks that keep the same rows.
        exchange: gives a text to all ranks, and returns those of all; it waits for them.

    Raises:
        HostMemoryError: another rank is no process of this machine, or of another user.
    """
    if alike < 2:
        yield None
        return
    first, own = rank // alike * alike, os.memfd_create("topkv")
    try:
        paths = exchange(f"/proc/{os.getpid()}/fd/{own}")
        try:
            file = os.open(paths[first], os.O_RDWR)
        except OSError as error:
            raise HostMemoryError(
                f"rank {rank} keeps the same rows as rank {first}, and cannot map its host pool "
                f"({error}); tensor parallel ranks must be processes of one user on one machine"
            ) from error
        try:
            exchange("")  # all have opened theirs
            yield file
        finally:
            os.close(file)
    finally:
        os.close(own)
