"""Tensor parallel ranks of vLLM, see ``topkv_engines.ranks``.

Blocks are the scheduler's. vLLM takes the least number of them that a rank has room for.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch.distributed

from topkv_engines.ranks import shared_file


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


def host_file(vllm_config: Any) -> AbstractContextManager[int | None]:
    """Open the file of the host pool that ranks share, see ``shared_file``; None where there are
    as many kv-heads as ranks."""
    ranks = vllm_config.parallel_config.tensor_parallel_size
    alike = ranks // kv_heads(vllm_config)
    if alike < 2:
        return nullcontext()
    from vllm.distributed.parallel_state import get_tp_group

    group = get_tp_group()

    def exchange(text: str) -> list[str]:
        texts = [""] * ranks
        torch.distributed.all_gather_object(texts, text, group=group.cpu_group)
        return texts

    return shared_file(group.rank_in_group, alike, exchange)


def kv_heads(vllm_config: Any) -> int:
    """Number of kv-heads of the whole model; latent attention has one row a token."""
    model = vllm_config.model_config
    return 1 if model.use_mla else int(model.get_total_num_kv_heads())
