"""Latent attention (MLA) through the coordinator, and the indexer of the models that have one.

The core keeps one row a token, ``[latent | rope]``, and attends in the latent space, prompts too.
SGLang's layers bring queries there and results back (its absorbed method), so keys of an
attention backend are rows already. Of an indexer (DeepSeek-V3.2, section 2.1) the projections are
taken, and neither its keys, which the algorithm keeps, nor its top-k.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from topkv.types import Index, IndexerShape
from topkv_sglang.args import BACKEND

CLASSES = ("DeepseekV3ForCausalLM", "DeepseekV32ForCausalLM", "GlmMoeDsaForCausalLM")
"""Classes of models whose latent attention is served, where they have an indexer."""


PLAIN = {
    "index_kpool": 1,
    "index_init_tokens": 0,
    "index_local_tokens": 0,
    "learnable_sink": False,
}
"""Fields of a model's configuration by which an indexer would select others, or rows attend to
more, and their values where nothing of that happens."""


def latent_reasons(arguments: Any, model: Any) -> list[str]:
    """Reasons against a model with latent attention.

    Args:
        arguments: SGLang's, once they are resolved.
        model: SGLang's ``ModelConfig``.
    """
    text, kind = model.hf_text_config, model.hf_config.architectures[0]
    fields = {name: getattr(text, name, None) for name in PLAIN}
    found = {
        f"of {kind}; served is {', '.join(CLASSES)}": kind not in CLASSES,
        "without an indexer": not has_indexer(model),
        "with adapters (enable_lora), which would not reach the indexer": arguments.enable_lora
        or arguments.lora_paths,
    }
    found |= {
        f"with {name} = {value}": value not in (None, PLAIN[name])
        for name, value in fields.items()
    }
    return [f"not supported: latent attention (MLA) {what}" for what, so in found.items() if so]


def has_indexer(model: Any) -> bool:
    """Return True if layers of a model select for themselves.

    Args:
        model: SGLang's ``ModelConfig``.
    """
    return getattr(model.hf_text_config, "index_topk", None) is not None


def indexer_of_config(model: Any) -> IndexerShape | None:
    """Geometry of the indexers of a model with latent attention; None where it has none.

    Args:
        model: SGLang's ``ModelConfig``.
    """
    from sglang.srt.configs.model_config import dsa_layer_skips_topk

    if not has_indexer(model):
        return None
    text, layers = model.hf_text_config, range(model.num_hidden_layers)
    own = tuple(layer for layer in layers if not dsa_layer_skips_topk(text, layer))
    some = None if len(own) == len(layers) else own
    return IndexerShape(text.index_n_heads, text.index_head_dim, some)


def attend_absorbed() -> None:
    """Let SGLang's layers of latent attention hand rows to the attention backend, for prompts too;
    its default for a prompt is keys and values of each head."""
    from sglang.srt.models.deepseek_common.attention_backend_handler import (
        AttentionBackendRegistry,
    )
    from sglang.srt.models.deepseek_common.attention_forward_methods.forward_methods import (
        AttnForwardMethod,
    )

    AttentionBackendRegistry.register(BACKEND, lambda layer, batch: AttnForwardMethod.MLA)


def latent_layers(model: Any) -> list[Any]:
    """Return the layers in which a model attends to rows. Their indexers project from now on, and
    select nothing.

    Args:
        model: SGLang's, once it is loaded.
    """
    from sglang.srt.models.deepseek_v2 import DeepseekV2AttentionMLA

    found = []
    for module in model.modules():
        if isinstance(module, DeepseekV2AttentionMLA):
            found.append(module.attn_mqa)
            module.attn_mqa.topkv_index = None  # those without an indexer share a selection
            if module.indexer is not None:
                module.indexer.forward = partial(_project, module.attn_mqa, module.indexer)
    return found


def _project(
    layer: Any, indexer: Any, *, x: Tensor, q_lora: Tensor, positions: Tensor, **_: Any
) -> None:
    """Run the ``forward`` of an indexer.

    Args:
        layer: SGLang's ``RadixAttention`` behind it, which gets the index.
        indexer: SGLang's.
        x: ``[tokens, hidden]`` what the attention layer is given.
        q_lora: ``[tokens, q_lora_rank]`` its normed query latents.
        positions: ``[tokens]``.
    """
    heads, size, turned = indexer.n_heads, indexer.head_dim, indexer.rope_head_dim
    q = indexer.wq_b(q_lora)[0].view(-1, heads, size)
    if indexer.use_dsa_indexer_fusion:
        k, weights = _plain(indexer.wk_weights_proj, x).split([size, heads], dim=-1)
    else:
        k, weights = indexer.wk(x)[0], _plain(indexer.weights_proj, x)
    k = indexer.k_norm(k)
    q_rope, k_rope = indexer.rotary_emb(
        positions, q[..., :turned].contiguous(), k[:, None, :turned].contiguous()
    )
    q = torch.cat([q_rope.view(-1, heads, turned), q[..., turned:]], dim=-1)
    k = torch.cat([k_rope.view(-1, turned), k[:, turned:]], dim=-1)
    layer.topkv_index = Index(q, k, weights.float() * (heads**-0.5 * indexer.softmax_scale))


def _plain(projection: Any, x: Tensor) -> Tensor:
    """Apply a projection that is never quantized; SGLang has some in 16 bits in any model."""
    return linear(x, projection.weight.to(x.dtype))
