"""``topkv generate``: a local model continues a prompt through topkv."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from time import perf_counter
from typing import Any, TextIO

import attrs
import torch
from transformers import PreTrainedModel
from transformers.generation import TextStreamer

from topkv import attach
from topkv.config import SparseConfig
from topkv.errors import RequestError
from topkv.plugins import registry
from topkv_cli.named import require_plugins
from topkv_evaluation.loading import load_served, load_tokenizer
from topkv_evaluation.measured import measured, settings_of, stats_of
from topkv_transformers.engine import lower_for
from topkv_transformers.session import AttachedModel

PREFILL_CHUNK = 2048


@dataclass(frozen=True)
class Job:
    """A model directory, a prompt, and options of decoding.

    Attributes:
        model: directory with config, weights and tokenizer.
        config: settings of the user; room for one request of this length is added if not set.
        dtype: name of a dtype, or "auto" for that of the checkpoint.
        stream: where the text goes as it comes; None for nowhere.
        trust_remote_code: True if Python code that the directory names may run.
    """

    model: Path
    prompt: str
    config: SparseConfig
    new_tokens: int
    dtype: str
    device: str
    stream: TextIO | None = None
    trust_remote_code: bool = False


class Writer(TextStreamer):
    """Streamer that writes text, and keeps the time of the first and the last new token."""

    def __init__(self, tokenizer: Any, stream: TextIO | None) -> None:
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.stream = stream
        self.tokens = 0
        self.first = self.last = 0.0

    def put(self, value: torch.Tensor) -> None:
        prompt = self.next_tokens_are_prompt
        super().put(value)
        if not prompt:
            self.last = perf_counter()
            self.first = self.first or self.last
            self.tokens += 1

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        if self.stream is not None:
            print(text, end="\n" if stream_end else "", file=self.stream, flush=True)

    @property
    def steps_per_second(self) -> float | None:
        """Decode steps a second; None without any, since the prefill gives the first token."""
        seconds = self.last - self.first
        return (self.tokens - 1) / seconds if self.tokens > 1 and seconds > 0 else None


def _check(model: PreTrainedModel, config: SparseConfig) -> None:
    """Refuse settings that cannot serve a long prompt, however short this one is."""
    alone = attrs.evolve(config, max_requests=1, host_memory=None, device_memory=None)
    lower_for(model, alone, registry())


def _fit(job: Job, prompt_tokens: int, positions: int | None) -> SparseConfig:
    if prompt_tokens == 0:
        raise RequestError("the prompt is empty; pass at least one token")
    length = prompt_tokens + job.new_tokens
    if positions is not None and length > positions:
        raise RequestError(
            f"the model has {positions} positions, and {prompt_tokens} prompt tokens with "
            f"{job.new_tokens} new ones need {length}; shorten the prompt or lower "
            "--max-new-tokens"
        )
    return with_room(job.config, length)


def with_room(config: SparseConfig, tokens: int) -> SparseConfig:
    """Return settings with room for one request of this length, where no room was set."""
    return SparseConfig(**{"max_requests": 1, "max_tokens": tokens, **config.as_dict()})


def run_generate(job: Job, say: Any) -> dict[str, Any]:
    """Generate greedily, and return what ``topkv generate --json`` prints.

    Args:
        job: the job.
        say: called with one line before the prompt is read.

    Raises:
        TopkvError: model, prompt or configuration are refused.
    """
    require_plugins(job.config, registry())
    trust = job.trust_remote_code
    model = load_served(job.model, job.device, dtype=job.dtype, trust_remote_code=trust)
    tokenizer = load_tokenizer(job.model, trust_remote_code=trust)
    _check(model, job.config)
    inputs = tokenizer(job.prompt, return_tensors="pt", return_token_type_ids=False)
    inputs = inputs.to(model.device)
    prompt_tokens = inputs["input_ids"].shape[1]
    config = _fit(job, prompt_tokens, getattr(model.config, "max_position_embeddings", None))
    with attach(model, config, engine="transformers") as handle:
        settings = settings_of(handle)
        shown = ", ".join(f"{name} {value}" for name, value in settings.items())
        say(f"reading {prompt_tokens} tokens; {shown}")
        return _generate(handle, tokenizer, inputs, job) | settings


def _generate(handle: AttachedModel, tokenizer: Any, inputs: Any, job: Job) -> dict[str, Any]:
    writer = Writer(tokenizer, job.stream)
    cache = handle.new_cache()
    pad = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0
    sequences = handle.model.generate(
        **inputs,
        past_key_values=cache,
        streamer=writer,
        do_sample=False,
        max_new_tokens=job.new_tokens,
        prefill_chunk_size=PREFILL_CHUNK,
        pad_token_id=pad,
    )
    new = sequences[0, inputs["input_ids"].shape[1] :]
    facts = {
        "text": tokenizer.decode(new, skip_special_tokens=True),
        "prompt_tokens": inputs["input_ids"].shape[1],
        "new_tokens": len(new),
        "steps_per_second": writer.steps_per_second,
        **measured(handle, cache.slots),
        "stats": stats_of(handle),
    }
    cache.close()
    return facts
