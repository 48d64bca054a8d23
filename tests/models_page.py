"""The page of model classes: ``python -m tests.models_page > docs/models.md``.

Tested classes are read from the tests; reasons for refusals come from the engine.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator

import torch
import transformers

from tests.packaging.packages import ROOT
from topkv_transformers.classes import CLASSES
from topkv_transformers.support import refusals

TESTS = ROOT / "plugins" / "transformers" / "tests"
sys.path.append(str(TESTS))

from model_cases import CONTRARY  # noqa: E402

HEAD = """# Model classes

What of Transformers {version} can be attached, by the names of its classes without `ForCausalLM`,
and what was tested of each: in float32, on a CPU, with tiny random models of two or four layers,
and other numbers of heads, head dims and hidden sizes from class to class. `make test-models` runs
all of it, `make test` one class of each group. `topkv doctor --model DIR` says of a checkpoint
what becomes of each layer, and the bytes on both tiers. This page is what
`python -m tests.models_page` prints, and a test compares them.
"""

ABOUT = {
    "dense": "Grouped-query attention in all layers; in Qwen3 and Mellum some may slide.",
    "experts": "The same with mixtures of experts.",
    "windows": "Layers that slide over a window stay stock; topkv serves the others.",
    "sinks": "The same, with learned attention sinks.",
    "softcap": "Windows, and capped attention logits, by backends that cap: `triton_attention`, "
    "`flash_attention`, `flashinfer`.",
    "states": "Layers with a linear state or a convolution stay stock; topkv serves the others.",
    "latent": "Latent attention: one row a token for all heads, and Kimi-K2 as DeepseekV3.",
    "indexer": "Latent attention that selects for itself.",
    "blocks": "Grouped-query attention that selects blocks for itself, in prompts too.",
}

APART = {
    "indexer": "`plugins/transformers/tests/latent`",
    "blocks": "the tokens of the stock model, which is sparse: `test_blocks.py`",
}
"""Tests of groups that have tests of their own."""

COVERING = (
    "a budget that covers all: the tokens of the stock model, in one row, in three padded ones, "
    "in chunks, and in a second turn"
)
SMALL = "a small budget: in float64 the logits of the model over what was selected"

SHOWN = {
    "test_a_covering_budget_is_the_stock_model": COVERING,
    "test_windows_wider_than_the_prompt": "the same with windows wider than the prompt",
    "test_a_small_budget_is_the_model_over_what_was_selected": SMALL,
}

REFUSED = (
    *("AXK2", "BailingHybrid", "DeepseekV4", "DiffLlama"),
    *("Doge", "Falcon", "FalconH1", "GPTNeoX", "Gemma3n", "Gemma4"),
    *("HYV4", "Inkling", "JetMoe", "KimiLinear", "Llama4", "LongcatFlash", "Mamba2"),
    *("MiMoV2Flash", "MiniMax", "OPT", "Persimmon", "RecurrentGemma"),
    *("Zamba2", "Zaya"),
)
"""Refused classes: those that people ask for, and examples of each kind of attention."""

OWN = {
    "DiffLlama": "cuts its values in two behind the cache",
    "Doge": "masks by what its values are",
    "Gemma3n": "later layers read the keys of earlier ones",
    "Gemma4": "later layers read the keys of earlier ones",
    "MiMoV2Flash": "values are narrower than keys",
    "MiniMax": "takes only a cache of its own",
}
"""Reasons that no check of a configuration sees."""


def groups_of(test: str) -> list[str]:
    """The groups whose classes a test of ``test_models.py`` runs."""
    text = (TESTS / "test_models.py").read_text(encoding="utf-8")
    (found,) = re.findall(rf"names_of\(([^)]*)\)\n?\)\ndef {test}\(", text)
    return re.findall(r"\"(\w+)\"", found)


def reasons_of(name: str) -> list[str]:
    """Why a class is refused with its default configuration, beside that it is not listed."""
    kind = getattr(transformers, f"{name}ForCausalLM")
    with torch.device("meta"):
        model = kind._from_config(kind.config_class().get_text_config())
    reasons = [reason.split("; ")[0] for reason in refusals(model, on_meta=True)]
    return [*reasons[1:], *([OWN[name]] if name in OWN else [])] or ["was not compared yet"]


def lines() -> Iterator[str]:
    """Yield the lines of the page."""
    yield HEAD.format(version=transformers.__version__)
    yield "| group | classes | tested |"
    yield "| --- | --- | --- |"
    for group, names in CLASSES.items():
        shown = [reported for test, reported in SHOWN.items() if group in groups_of(test)]
        if CONTRARY & set(names):
            lacking = ", ".join(sorted(CONTRARY & set(names)))
            shown[-1] += f" (not {lacking}: what their stock models compute in chunks or steps is "
            shown[-1] += "not what they compute at once)"
        reported = "; ".join(shown) or APART[group]
        yield f"| {group} | {', '.join(names)}. {ABOUT[group]} | {reported} |"
    yield "\n## Refused\n"
    yield "A class that is not listed is refused by its name. There is more to say of some:\n"
    yield "| class | why |"
    yield "| --- | --- |"
    for name in REFUSED:
        yield f"| {name} | {'; '.join(reasons_of(name))} |"


if __name__ == "__main__":
    print("\n".join(lines()))
