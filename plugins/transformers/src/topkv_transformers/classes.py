"""The model classes of Transformers that are served, by name: releases differ in what they have.

A class stands here because ``tests/test_models.py`` generates with it and with the stock model and
gets the same tokens. Nothing less would do: DiffLlama passes every check of ``support``, and cuts
its values in two behind the cache, which gives wrong tokens and no error.
"""

from __future__ import annotations

from collections.abc import Mapping

CLASSES: Mapping[str, tuple[str, ...]] = {
    "dense": (
        *("Apertus", "Arcee", "BitNet", "Cohere", "Emu3", "Ernie4_5", "Gemma", "Glm", "Glm4"),
        *("Granite", "Helium", "HunYuanDenseV1", "HyperCLOVAX", "Jais2", "Llama", "Ministral3"),
        *("Mistral", "NanoChat", "Nemotron", "Olmo", "Olmo2", "Phi", "Phi3", "Qwen2", "Qwen3"),
        *("SeedOss", "SmolLM3", "StableLm", "Starcoder2"),
    ),
    "experts": (
        *("AriaText", "Dots1", "Ernie4_5_Moe", "FlexOlmo", "Glm4Moe", "GraniteMoe"),
        *("GraniteMoeShared", "HunYuanMoEV1", "HYV3", "Mellum", "MiniMaxM2", "Mixtral", "Olmoe"),
        *("Phimoe", "Qwen2Moe", "Qwen3Moe", "SolarOpen"),
    ),
    "windows": (
        *("Afmoe", "Cohere2", "Cohere2Moe", "Cwm", "Exaone4", "ExaoneMoe", "Gemma3", "Laguna"),
        "Olmo3",
    ),
    "sinks": ("Flint", "GptOss", "GraniteMoeSWA", "GraniteSWA"),
    "softcap": ("Gemma2", "VaultGemma"),
    "states": (
        *("Bamba", "GraniteMoeHybrid", "Jamba", "Lfm2", "Lfm2Moe", "Lfm3", "NemotronH"),
        *("OlmoHybrid", "Qwen3Next", "Qwen3_5", "Qwen3_5Moe"),
    ),
    "latent": (
        *("AXK1", "DeepseekV2", "DeepseekV3", "Glm4MoeLite", "MiniCPM3", "Mistral4", "Youtu"),
    ),
    "indexer": ("DeepseekV32", "GlmMoeDsa"),
    "blocks": ("MiniMaxM3VL",),
}
"""Group to classes, without the ending ``ForCausalLM``. All have grouped-query attention but
``latent`` and ``indexer``, whose attention is latent. ``indexer`` and ``blocks`` select for
themselves, tokens and blocks. From ``windows`` to ``states`` most layers slide over the newest
tokens, or keep a state of all; topkv serves the others. Those of ``sinks`` have learned logits
without a value in each softmax, too, and ``softcap`` caps logits."""

GROUPS = {f"{name}ForCausalLM": group for group, names in CLASSES.items() for name in names}
"""The group of each class, by its whole name."""


def name_of(model: object) -> str | None:
    """A model's class, or the class of Transformers that it was derived from."""
    for cls in type(model).__mro__:
        if cls.__module__.startswith("transformers."):
            return cls.__name__
    return None


def group_of(model: object) -> str | None:
    """The group of a model's class, see ``name_of``."""
    return GROUPS.get(name_of(model) or "")
