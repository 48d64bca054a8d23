"""Tensor parallel ranks: each has some of the heads, a coordinator and a host pool for them.

Blocks are the scheduler's, so pages are the same on all ranks, and so is what each does in a step
(``topkv_vllm.requests``). vLLM takes the least number of blocks that a rank has room for.

Where there are fewer kv-heads than ranks, and latent attention has one, some ranks keep the same
rows. These share one host pool, and each writes all of it, the same bytes as the others. None is
asked to wait for another: a rank may still write for a request that has ended while the next one
that is ahead writes for the request that got its pages. But it reads them no sooner than in the
second layer of that step, and between two layers all ranks meet in an all-reduce, behind which
each has written both, in this order.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch.distributed

from topkv.config import LoweredConfig
from topkv.errors import HostMemoryError
from topkv.hooks.algorithm import AlgorithmSpec


def rank_reasons(
    vllm_config: Any, lowered: LoweredConfig, specs: Sequence[AlgorithmSpec | None]
) -> list[str]:
    """Reasons why algorithms cannot select where each rank has some of the heads alone.

    Args:
        vllm_config: vLLM's ``VllmConfig``.
        lowered: of one rank.
        specs: of its groups; None for dense ones.
    """
    ranks, heads = vllm_config.parallel_config.tensor_parallel_size, kv_heads(vllm_config)
    reasons = {}
    for group, spec in zip(lowered.groups, specs, strict=True):
        shared = group.scope == "shared" and heads > 1
        if ranks == 1 or spec is None or spec.heads == "none":
            continue
        if spec.heads == "all" or shared:
            why = "all heads of a layer share a selection"
            hint = "set scope to 'kv_head'"
            if spec.heads == "all":
                why, hint = "a selection uses all heads of a layer", "set other parameters"
            reasons[
                f"tensor parallel ranks: with {group.algorithm} {why}, and each of {ranks} ranks "
                f"has some of the {heads} kv-heads alone; {hint}, or tensor_parallel_size to 1"
            ] = None
    return [*reasons]


def split_reasons(vllm_config: Any) -> list[str]:
    """Note for readers of the reasons of one rank; nothing where there is one rank alone."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    if ranks == 1:
        return []
    heads = vllm_config.model_config.get_num_kv_heads(vllm_config.parallel_config)
    return [
        f"this is of one of {ranks} tensor parallel ranks, which has {heads} of the "
        f"{kv_heads(vllm_config)} kv-heads of the model; what is by kv-head, such as a file of a "
        "calibration, must be so too"
    ]


@contextmanager
def host_file(vllm_config: Any) -> Iterator[int | None]:
    """Open a file in memory that all ranks map that keep the same rows; None if no other one does.

    All ranks have to ask for it at a time. It lasts as long as it is mapped.

    Raises:
        HostMemoryError: another rank is no process of this machine, or of another user.
    """
    ranks = vllm_config.parallel_config.tensor_parallel_size
    alike = ranks // kv_heads(vllm_config)
    if alike < 2:
        yield None
        return
    from vllm.distributed.parallel_state import get_tp_group

    group, paths = get_tp_group(), [""] * ranks
    first, own = group.rank_in_group // alike * alike, os.memfd_create("topkv")
    try:
        path = f"/proc/{os.getpid()}/fd/{own}"
        torch.distributed.all_gather_object(paths, path, group=group.cpu_group)
        try:
            file = os.open(paths[first], os.O_RDWR)
        except OSError as error:
            raise HostMemoryError(
                f"rank {group.rank_in_group} keeps the same rows as rank {first}, and cannot map "
                f"its host pool ({error}); tensor parallel ranks must be processes of one user on "
                "one machine"
            ) from error
        try:
            torch.distributed.barrier(group=group.cpu_group)  # all have opened theirs
            yield file
        finally:
            os.close(file)
    finally:
        os.close(own)


def kv_heads(vllm_config: Any) -> int:
    """Number of kv-heads of the whole model; latent attention has one row a token."""
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())
