"""Tensor parallel ranks of SGLang, see ``topkv_engines.ranks``.

Each rank has a scheduler of its own, and all of them decide alike. On a CPU no two of them keep
the same rows but with latent attention: where there are fewer kv-heads than ranks, SGLang adds
heads of zeros.
"""

from __future__ import annotations

from typing import Any


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


def kv_heads(model: Any) -> int:
    """Number of kv-heads of the whole model; latent attention has one.

    Args:
        model: SGLang's ``ModelConfig``.
    """
    latent = model.attention_arch.name == "MLA"
    return 1 if latent else int(model.get_total_num_kv_heads())
