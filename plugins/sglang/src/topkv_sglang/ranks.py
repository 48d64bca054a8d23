"""Tensor parallel ranks of SGLang, see ``topkv_engines.ranks``.

Each rank has a scheduler of its own, and all of them decide alike. Ranks keep the same rows with
latent attention, and on a GPU where there are fewer kv-heads than ranks; on a CPU SGLang adds
heads of zeros there.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed

from topkv_engines.ranks import shared_file


def split_reasons(arguments: Any, model: Any) -> list[str]:
    """Note for readers of the reasons of one rank; nothing where there is one rank alone.

    Args:
        arguments: SGLang's, once they are resolved.
        model: SGLang's ``ModelConfig``.
    """
    ranks, heads = arguments.tp_size, kv_heads(model)
    if ranks == 1:
        return []
    return [
        f"this is of one of {ranks} tensor parallel ranks, which has "
        f"{max(heads // ranks, 1)} of the {heads} kv-heads of the model; what is "
        "by kv-head, such as a file of a calibration, must be so too"
    ]


def host_file(model: Any) -> AbstractContextManager[int | None]:
    """Open the file of the host pool that ranks share, see ``shared_file``; None where each rank
    has kv-heads of its own.

    Args:
        model: SGLang's ``ModelConfig``.
    """
    from sglang.srt.runtime_context import get_parallel

    parallel = get_parallel()
    ranks = parallel.tp_size
    alike = ranks // kv_heads(model)
    if alike < 2:
        return nullcontext()
    group = parallel.tp_group.cpu_group

    def exchange(text: str) -> list[str]:
        texts = [""] * ranks
        torch.distributed.all_gather_object(texts, text, group=group)
        return texts

    return shared_file(parallel.tp_rank, alike, exchange)


def kv_heads(model: Any) -> int:
    """Number of kv-heads of the whole model; latent attention has one.

    Args:
        model: SGLang's ``ModelConfig``.
    """
    latent = model.attention_arch.name == "MLA"
    return 1 if latent else int(model.get_total_num_kv_heads())
