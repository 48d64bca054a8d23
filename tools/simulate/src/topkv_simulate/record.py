"""Recorder of the end of a text, decoded through an attached model, a token or several a step."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from attrs import frozen
from torch import Tensor

from topkv import attach
from topkv.config import SparseConfig
from topkv.errors import ConfigError
from topkv.plugins import registry
from topkv_cli.named import require_plugins
from topkv_cli.options import device_or_default, quiet_transformers
from topkv_simulate.recorder import recording
from topkv_simulate.trace import Trace

CHUNK, TOKENS = 1024, 4096
DEFAULTS = {"algorithm": "quest", "backend": "triton_attention"}


def record_text(handle: Any, tokens: Tensor, steps: int, queries: int = 1) -> Trace:
    """Read a text into an attached model and record what its last tokens select.

    Args:
        handle: handle of ``topkv.attach(..., engine="transformers")``, with no requests yet and
            room for the text.
        tokens: int64 ``[1, n]`` on the model's device.
        steps: last tokens, which are decoded; at least two tokens are before them.
        queries: tokens of a decode step, at most ``max_queries``: the text's stand for drafts that
            are all accepted.
    """
    prompt = tokens.shape[1] - steps
    with recording(handle.coordinator) as recorder, torch.inference_mode():
        cache = handle.new_cache()
        # Chunks of alike sizes: a last chunk of one token would be a decode step.
        for chunk in torch.tensor_split(tokens[:, :prompt], -(-prompt // CHUNK), dim=1):
            handle.model(chunk, past_key_values=cache, logits_to_keep=1)
        cache.state.most = queries
        for token in tokens[:, prompt:].split(queries, dim=1):
            handle.model(token, past_key_values=cache)
        cache.close()
    return recorder.trace()


@frozen
class Job:
    """The options of ``topkv record``; None leaves a choice to the defaults."""

    config: SparseConfig
    model: Path | None = None
    text: Path | None = None
    tokens: int | None = None
    steps: int = 256
    queries: int = 1
    device: str | None = None
    trust_remote_code: bool = False


def run(job: Job) -> Trace:
    """Record the trace of a job.

    Raises:
        ConfigError: topkv-evaluation is not installed, or the text is too short.
        TopkvError: model, text or settings are refused.
    """
    try:
        from topkv_evaluation import CHECKPOINT, commands, generate, loading
    except ModuleNotFoundError as error:
        if str(error.name).partition(".")[0] != "topkv_evaluation":
            raise
        raise ConfigError(
            "topkv record loads models as topkv-evaluation does, which is not installed",
            [
                "pip install topkv-evaluation, or record a model that you attach yourself: "
                "topkv_simulate.recorder.recording(handle.coordinator)"
            ],
        ) from error
    trust, device = job.trust_remote_code, device_or_default(job.device)
    with quiet_transformers():
        folder = job.model and commands.ModelFolder().convert(str(job.model), None, None)
        folder = folder or CHECKPOINT
        require_plugins(job.config, registry())
        tokens = _tokens(job, folder, loading)
        if tokens.shape[1] < job.steps + 2:
            why = f"expected at least {job.steps + 2} tokens for {job.steps} steps behind a prompt"
            raise ConfigError("the text is too short", [f"{why}, got {tokens.shape[1]}"])
        model = loading.load_model(folder, trust_remote_code=trust).to(device).eval()
        with attach(
            model, generate.with_room(job.config, tokens.shape[1]), engine="transformers"
        ) as handle:
            return record_text(handle, tokens.to(device), job.steps, job.queries)


def _tokens(job: Job, folder: Path, loading: Any) -> Tensor:
    """Return the tokens of the text, int64 ``[1, n]``."""
    if job.text is not None:
        try:
            text = job.text.read_text(encoding="utf-8")
        except UnicodeError as error:
            raise ConfigError(f"--text {job.text}", [f"expected UTF-8; {error}"]) from error
        tokenizer = loading.load_tokenizer(folder, trust_remote_code=job.trust_remote_code)
        tokens: Tensor = tokenizer(text, return_tensors="pt")["input_ids"]
        return tokens[:, : job.tokens]
    if job.model is not None:
        raise ConfigError("--model", ["a model of your own needs a text of your own; pass --text"])
    from topkv_evaluation.retrieval import make_prompt

    try:
        document = make_prompt(job.tokens or TOKENS, seed=0)
    except ValueError as error:
        raise ConfigError("no text can be made", [f"{error}; or pass --text"]) from error
    return torch.from_numpy(document.tokens.astype("int64"))[None]
