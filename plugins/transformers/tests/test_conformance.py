"""The conformance kit on the Transformers engine, for two families of models."""

from __future__ import annotations

import pytest
from kit_case import PAD, VOCABULARY, TransformersCase
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from topkv_testing.engines import EngineTests


def case(config, model):
    return TransformersCase(
        lambda: model(
            config(
                vocab_size=VOCABULARY,
                hidden_size=32,
                intermediate_size=48,
                num_hidden_layers=2,
                num_attention_heads=4,
                num_key_value_heads=2,
                head_dim=16,
                max_position_embeddings=128,
                initializer_range=0.4,
                pad_token_id=PAD,
                bos_token_id=1,
                eos_token_id=None,
            )
        )
    )


LLAMA, QWEN3 = case(LlamaConfig, LlamaForCausalLM), case(Qwen3Config, Qwen3ForCausalLM)


class TestLlama(EngineTests):
    @pytest.fixture
    def plugin(self):
        return "transformers"

    @pytest.fixture
    def options(self):
        return LLAMA


class TestQwen3(EngineTests):
    @pytest.fixture
    def plugin(self):
        return "transformers"

    @pytest.fixture
    def options(self):
        return QWEN3
