"""``topkv demo``: a question about a distant fact, answered dense, through topkv, and by a window.

All three read the context with dense attention, in chunks. Then every token of the question and of
the answer is one decode step: dense, over the selection of an algorithm, or over a window of
the same budget. The fact is outside the window, so only a good selection finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from time import perf_counter
from typing import Any

import torch
from transformers import Cache, DynamicCache, PreTrainedModel

from topkv import attach
from topkv.config import SparseConfig
from topkv.errors import ConfigError
from topkv.plugins import PluginRegistry
from topkv.plugins import registry as default_registry
from topkv_cli.named import require_plugins
from topkv_evaluation import CHECKPOINT, window
from topkv_evaluation.loading import load_model
from topkv_evaluation.measured import measured, settings_of, stats_of
from topkv_evaluation.retrieval import (
    ASK_BYTES,
    VALUE_DIGITS,
    Document,
    exact_match,
    make_prompt,
)

CHUNK = 1024

Advance = Callable[[str, int], None]
"""Called with the name of a run and how many tokens it has read or written since."""


@dataclass(frozen=True)
class Settings:
    """Options of the user; None leaves a choice to the defaults of topkv and its plugins."""

    tokens: int = 12288
    algorithm: str | None = "quest"
    backend: str | None = "triton_attention"
    budget: int = 512
    buffer: int = 1024
    unit: int | None = None
    impl: str | None = None
    device: str = "cpu"
    seed: int = 0

    def sparse(self, **changes: Any) -> SparseConfig:
        """Make settings: all layers sparse, and room for one request of exactly this length."""
        values = asdict(self)
        names = ("algorithm", "backend", "budget", "buffer", "unit", "impl")
        chosen = {name: values[name] for name in names} | changes
        length = self.tokens + VALUE_DIGITS
        return SparseConfig(dense_layers=(), max_requests=1, max_tokens=length, **chosen)


@dataclass
class Run:
    """Result of one way to the answer.

    Attributes:
        answer: the digits.
        steps_per_second: decode steps a second, of the question and of the answer.
        facts: other measured figures.
        stats: counts of the run, and what was held at its end; empty for dense attention.
    """

    answer: str
    steps_per_second: float
    facts: dict[str, Any] = field(default_factory=dict)
    stats: dict[str, Any] = field(default_factory=dict)


def answer_question(
    model: PreTrainedModel, cache: Cache, document: Document, advance: Callable[[int], None]
) -> Run:
    """Prefill the context, then step through the question and the answer token by token."""
    tokens = torch.from_numpy(document.tokens.astype("int64")).to(model.device)[None]
    context = tokens.shape[1] - ASK_BYTES
    with torch.inference_mode():
        for start in range(0, context, CHUNK):
            chunk = tokens[:, start : min(start + CHUNK, context)]
            model(chunk, past_key_values=cache, logits_to_keep=1)
            advance(chunk.shape[1])
        began, steps, answer = perf_counter(), 0, b""
        question = list(tokens[:, context:].split(1, dim=1))
        while len(answer) < VALUE_DIGITS:
            token = question.pop(0)
            logits = model(token, past_key_values=cache).logits[:, -1]
            advance(1)
            steps += 1
            if not question:
                question = [logits.argmax(-1, keepdim=True)]
                answer += bytes(question[0].flatten().tolist())
    rate = steps / (perf_counter() - began)
    return Run(answer.decode("latin-1"), rate)


def _dense(model: PreTrainedModel, document: Document, advance: Callable[[int], None]) -> Run:
    cache = DynamicCache(config=model.config)
    run = answer_question(model, cache, document, advance)
    held = sum(layer.keys.nbytes + layer.values.nbytes for layer in cache.layers)
    run.facts["full_kv_bytes"] = held // cache.get_seq_length() * len(document.tokens)
    return run


def _sparse(
    model: PreTrainedModel,
    document: Document,
    config: SparseConfig,
    advance: Callable[[int], None],
    registry: PluginRegistry | None = None,
) -> Run:
    with attach(model, config, engine="transformers", registry=registry) as handle:
        cache = handle.new_cache()
        run = answer_question(model, cache, document, advance)
        run.facts = {**settings_of(handle), **measured(handle, cache.slots)}
        run.stats = stats_of(handle)
        cache.close()
    return run


def demo_prompt(settings: Settings) -> Document:
    """Make the prompt; no fact is where the window of the same budget would hold it.

    Raises:
        ConfigError: the prompt is too short for that.
    """
    recent = max(settings.tokens // 3, settings.budget + 256)
    try:
        return make_prompt(settings.tokens, seed=settings.seed, recent=recent)
    except ValueError as error:
        raise ConfigError("no prompt can be made", [str(error)]) from error


def load_checkpoint(device: str) -> PreTrainedModel:
    """Load the checkpoint of this package, in the dtype that it is saved in."""
    return load_model(CHECKPOINT).to(device).eval()


def run_demo(settings: Settings, advance: Advance) -> dict[str, Any]:
    """Answer the question three times; return what ``topkv demo --json`` prints.

    Raises:
        TopkvError: the settings are refused.
    """
    began = perf_counter()
    require_plugins(settings.sparse(), default_registry())
    document, model = demo_prompt(settings), load_checkpoint(settings.device)
    with attach(model, settings.sparse(), engine="transformers"):
        pass  # settings that are refused are refused before anything is computed
    dense = _dense(model, document, partial(advance, "dense"))
    sparse = _sparse(model, document, settings.sparse(), partial(advance, "topkv"))
    chosen = sparse.facts
    same = {name: chosen[name] for name in ("backend", "impl", "unit")}
    control = settings.sparse(algorithm=window.NAME, **same)
    registry = window.registry_with_window()
    shown = _sparse(model, document, control, partial(advance, "window"), registry)
    return {
        "context_tokens": len(document.tokens),
        "question": document.text[-ASK_BYTES:].strip(),
        "fact_distance_tokens": document.distance,
        "expected": document.expected,
        "dense_answer": dense.answer,
        "sparse_answer": sparse.answer,
        "correct": exact_match(sparse.answer, document.expected),
        "window_answer": shown.answer,
        "window": _describe(shown.facts),
        **chosen,
        **dense.facts,
        "steps_per_second": sparse.steps_per_second,
        "dense_steps_per_second": dense.steps_per_second,
        "stats": sparse.stats,
        "seed": settings.seed,
        "seconds": perf_counter() - began,
    }


def _describe(facts: dict[str, Any]) -> str:
    unit, budget = facts["unit"], facts["budget_tokens"]
    sinks = window.SINK_UNITS * unit
    return (
        f"algorithm 'window' of the demo, through the same path: the first {sinks} tokens and "
        f"the newest {budget - sinks}, tail included"
    )
