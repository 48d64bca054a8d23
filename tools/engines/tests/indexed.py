"""Tiny random models of latent attention with an indexer of their own, whose stock model is that
of Transformers."""

from __future__ import annotations

import torch

PAD, TOPK = 0, 16
"""Id of the token that pads, and tokens that an indexer selects."""

SIZES = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "first_k_dense_replace": 3,  # no experts, for which engines have no kernels on a CPU
    "moe_layer_freq": 1,
    "q_lora_rank": 48,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "index_topk": TOPK,
    "index_head_dim": 32,
    "index_n_heads": 16,  # enough that hardly a score is exactly 0
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "pad_token_id": PAD,
    "bos_token_id": None,
    "eos_token_id": None,
}

YARN = {  # SGLang has no other rotation for latent attention on a CPU
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
"""A value of ``rope_parameters``."""

FAMILIES = {
    "DeepseekV32": {},
    "GlmMoeDsa": {  # vLLM has other names for what layers do
        "indexer_types": ["full", "shared", "full"],
        "index_topk_pattern": "FSF",
        "indexer_rope_interleave": True,
    },
}
"""Families of Transformers, and what they have of their own."""

BFLOAT16 = ("indexer.wk.weight", "indexer.weights_proj.weight")
"""Weights that SGLang has in 16 bits, whatever the dtype of a model."""


class Model:
    """A tiny random model, saved.

    Args:
        family: of ``FAMILIES``.
        path: of a folder.
        changes: of ``SIZES``.
    """

    def __init__(self, family, path, **changes):
        import transformers

        torch.manual_seed(0)
        config = getattr(transformers, f"{family}Config")(**SIZES | FAMILIES[family] | changes)
        self.stock = getattr(transformers, f"{family}ForCausalLM")(config).float().eval()
        # The embedding of padding is 0, and 0 ties all scores should it ever be generated.
        torch.nn.init.normal_(self.stock.get_input_embeddings().weight.data[PAD])
        for name, weight in self.stock.named_parameters():
            if name.endswith(BFLOAT16):
                weight.data = weight.data.bfloat16().float()
        self.stock.save_pretrained(path)
        self.family, self.path = family, str(path)

    @torch.no_grad()
    def answer(self, prompt, tokens):
        """Tokens that the stock model generates."""
        ids = torch.tensor([prompt])
        mask = torch.ones_like(ids)
        out = self.stock.generate(ids, attention_mask=mask, max_new_tokens=tokens, do_sample=False)
        return out[0, len(prompt) :].tolist()


def prompts_of(prompt, lengths, seed=0):
    """Return prompts without padding, by a fixture ``prompt(length, seed)``."""
    return [[token % 95 + 1 for token in prompt(length, seed)] for length in lengths]
