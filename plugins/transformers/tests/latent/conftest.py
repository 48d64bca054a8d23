"""Tiny random DSA models, over the core's exact indexer and gathering backend."""

from __future__ import annotations

import pytest
import torch
from transformers import (
    DeepseekV32Config,
    DeepseekV32ForCausalLM,
    GlmMoeDsaConfig,
    GlmMoeDsaForCausalLM,
)

import topkv
from topkv.plugins import PluginRegistry
from topkv_testing.doubles import Entries
from topkv_testing.models.indexed import INDEXED
from topkv_transformers import entry

FAMILIES = {
    "deepseek": (DeepseekV32Config, DeepseekV32ForCausalLM),
    "glm": (GlmMoeDsaConfig, GlmMoeDsaForCausalLM),
}
PAD, VOCABULARY = 0, 96


class Dsa:
    """Makes models of both families, and attaches them."""

    registry = PluginRegistry(
        [
            ("topkv-doubles", topkv.__version__, Entries(INDEXED)),
            ("topkv-transformers", topkv.__version__, entry),
        ]
    )

    def config(self, family, **options):
        # Weights far larger than a trained model's, see the Llamas of these tests. With many index
        # heads hardly a score is exactly 0, so that no selection depends on the order of ties.
        values = {
            "vocab_size": VOCABULARY,
            "hidden_size": 64,
            "intermediate_size": 96,
            "moe_intermediate_size": 48,
            "num_hidden_layers": 3,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "n_shared_experts": 1,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "n_group": 1,
            "topk_group": 1,
            "first_k_dense_replace": 1,
            "q_lora_rank": 48,
            "kv_lora_rank": 32,
            "qk_rope_head_dim": 8,
            "qk_nope_head_dim": 16,
            "v_head_dim": 16,
            "index_topk": 16,
            "index_head_dim": 32,
            "index_n_heads": 16,
            "max_position_embeddings": 640,
            "initializer_range": 0.3,
            "pad_token_id": PAD,
            "bos_token_id": 1,
            "eos_token_id": None,
        }
        if family == "glm":
            values["num_hidden_layers"] = 4
            values["indexer_types"] = ["full", "shared", "full", "shared"]
        return FAMILIES[family][0](**{**values, **options})

    def model(self, family, seed=0, **options):
        torch.manual_seed(seed)
        model = FAMILIES[family][1](self.config(family, **options)).eval()
        # The embedding of padding is 0, and 0 ties all scores should it ever be generated.
        torch.nn.init.normal_(model.get_input_embeddings().weight.data[PAD])
        return model

    def prompt(self, tokens, pads, seed=0):
        """``input_ids`` and ``attention_mask`` of rows that are padded on the left."""
        generator = torch.Generator().manual_seed(seed)
        ids = torch.randint(2, VOCABULARY, (len(pads), tokens), generator=generator)
        mask = torch.arange(tokens) >= torch.tensor(pads)[:, None]
        return {"input_ids": ids.masked_fill(~mask, PAD), "attention_mask": mask.long()}

    def attach(self, model, **changes):
        settings = {
            "backend": "gather",
            "ring_tokens": 8,
            "page_tokens": 16,
            "max_requests": 4,
            "max_tokens": 1024,
            "max_request_tokens": 640,
            "prefill_block_tokens": 32,
            "poison": True,
            **changes,
        }
        return topkv.attach(model, settings, registry=self.registry)


@pytest.fixture
def dsa():
    return Dsa()
