"""``topkv share``: prompts decoded with every layer selecting, and the patterns that follow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from attrs import evolve
from torch import Tensor
from transformers import PreTrainedModel

from topkv import attach
from topkv.config import SparseConfig
from topkv.config.layers import show_ranges
from topkv.decode.layers import LayerPath
from topkv.errors import ConfigError
from topkv.plugins import registry
from topkv_cli.named import require_plugins
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.eval import recall
from topkv_evaluation.eval.batches import read_context
from topkv_evaluation.eval.catalogue import Catalogue
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.runs import CHUNK, CPU_CHUNK, Advance
from topkv_evaluation.loading import load_served, load_tokenizer
from topkv_evaluation.measured import settings_of
from topkv_evaluation.share.effects import effects_of
from topkv_evaluation.share.patterns import best_patterns, sources_of
from topkv_evaluation.share.prompts import Prompt, pieces, questions
from topkv_evaluation.share.similarity import Decoded, Shared, held_in
from topkv_transformers.session import AttachedModel

REFUSED = "no layers can share a selection"


@dataclass(frozen=True)
class Job:
    """Model, settings and prompts of a calibration.

    Attributes:
        config: settings of the user; sizes are those of one prompt meanwhile.
        model: directory of model and tokenizer; None for the checkpoint of this package.
        tasks, text: tasks of ``prompts.questions``, used without a text; path of
            ``prompts.pieces``.
        tokens: tokens of a context, or of a piece of the text with the tokens that are decoded.
        prompts: most prompts of each task.
        steps: tokens of a piece of the text that are decoded.
        selecting: layers that should select; None for one of four.
        device: device of the model.
        trust_remote_code: True if Python code that the directory names may run.
    """

    config: SparseConfig
    model: Path | None = None
    tasks: Sequence[str] = ()
    text: Path | None = None
    tokens: int = 4096
    prompts: int = 8
    steps: int = 64
    selecting: int | None = None
    device: str = "cpu"
    trust_remote_code: bool = False

    @property
    def folder(self) -> Path:
        """Directory of the model."""
        return self.model or CHECKPOINT


def calibrate(job: Job, advance: Advance = lambda prompts: None) -> dict[str, Any]:
    """Calibrate, and return what ``topkv share --json`` prints.

    Args:
        job: the job.
        advance: called with 1 behind each prompt.

    Raises:
        ConfigError: an option is wrong, or there is nothing to share under these settings.
        CapabilityError: the model cannot be attached.
        TopkvError: the settings are refused.
    """
    if job.tasks and job.text is not None:
        raise ConfigError("--tasks and --text exclude each other", ["leave one of them out"])
    require_plugins(job.config, registry())
    model = load_served(job.folder, job.device, trust_remote_code=job.trust_remote_code)
    prompts = _prompts(job, model)
    room = max(prompt.length for prompt in prompts)
    _check_positions(model, room)
    with torch.inference_mode():
        # The core refuses layers that cannot share, before anything is computed.
        with attach(model, _settings(job, "FS", room), engine="transformers"):
            pass
        with attach(model, _settings(job, "F", room), engine="transformers") as handle:
            layers = _layers(handle)
            if not 1 <= (job.selecting or 1) <= len(layers):
                why = f"expected 1 to {len(layers)}, the layers that are sparse"
                raise ConfigError("--selecting", [f"{why}, got {job.selecting}"])
            shared = Shared.of([*_decoded(handle, prompts, layers, advance)])
            return _result(job, len(prompts), layers, shared, settings_of(handle))


def _prompts(job: Job, model: PreTrainedModel) -> list[Prompt]:
    trust = job.trust_remote_code
    if job.text is not None:
        tokenizer = load_tokenizer(job.folder, trust_remote_code=trust)
        return pieces(job.text, tokenizer, job.tokens, job.steps, job.prompts)
    options = Options(
        model=job.folder,
        contexts=(job.tokens,),
        questions=job.prompts,
        per_context=1,
        trust_remote_code=trust,
    )
    return questions(Catalogue(model, options), job.tasks)


def _settings(job: Job, share: str, room: int) -> SparseConfig:
    """Return settings for one prompt at a time; a replayed graph could not be watched."""
    size = {"max_requests": 1, "max_tokens": room, "max_request_tokens": None}
    return evolve(job.config, share=share, capture="off", compile=None, **size)


def _layers(handle: AttachedModel) -> tuple[int, ...]:
    """Return the sparse layers, which are one group and all select."""
    groups = [group for group in handle.config.groups if group.shape.residency == "sparse"]
    named = " and ".join(show_ranges(group.shape.layers) for group in groups)
    if not groups:
        why = "all are dense; leave some out of dense_layers"
    elif len(groups) > 1:
        why = (
            f"layers {named} differ in their settings, and only equal ones share; make them equal"
        )
    elif len(groups[0].shape.layers) == 1:
        why = f"layer {named} is the only sparse one; make fewer layers dense"
    elif groups[0].selecting != groups[0].shape.layers:
        why = "the setting layers says itself which of them share; leave share out of it"
    else:
        return groups[0].shape.layers
    raise ConfigError(REFUSED, [why])


def _decoded(
    handle: AttachedModel, prompts: Sequence[Prompt], layers: Sequence[int], advance: Advance
) -> Iterator[Decoded]:
    """Decode each prompt, and yield what was seen of it."""
    paths = recall.watch(handle.coordinator)
    with effects_of(handle.model) as effects:
        for prompt in prompts:
            found = Decoded([], [])
            for held in _held(handle, paths, prompt):
                found.held.append(held)
                found.effects.append([effects[layer] for layer in layers])
            advance(1)
            yield found


def _held(handle: AttachedModel, paths: Sequence[LayerPath], prompt: Prompt) -> Iterator[Tensor]:
    """Yield ``held_in`` behind each step of a prompt that counts."""
    device = handle.model.device
    cache, _ = read_context(handle, prompt.start, CHUNK.get(device.type, CPU_CHUNK))
    recall.arm(paths, True)
    for step, token in enumerate(prompt.fed):
        handle.model(torch.tensor([[token]], device=device), past_key_values=cache)
        if step >= prompt.first:
            yield held_in(handle.coordinator, paths, cache.slots[0])
    recall.arm(paths, False)
    cache.close()


def _check_positions(model: PreTrainedModel, room: int) -> None:
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and room > positions:
        why = f"expected prompts of at most the {positions} positions of the model, got {room}"
        raise ConfigError("--tokens", [why])


def _result(
    job: Job, prompts: int, layers: Sequence[int], shared: Shared, settings: dict[str, Any]
) -> dict[str, Any]:
    patterns = []
    for selecting, text in enumerate(best_patterns(shared.losses().tolist()), start=1):
        at = sources_of(text), range(len(layers))
        tables = {"loss": shared.losses(), "mass": shared.mass}
        left = {name: float(table[at].mean()) for name, table in tables.items()}
        patterns.append({"selecting": selecting, "share": text, **left})
    selecting = job.selecting or -(-len(layers) // 4)
    return {
        **settings,
        "layers": [*layers],
        "prompts": prompts,
        "effect": shared.effect.tolist(),
        "similarity": _rows(shared.similarity),
        "mass": _rows(shared.mass),
        "patterns": patterns,
        "selecting": selecting,
        "config": {**job.config.as_dict(), "share": patterns[selecting - 1]["share"]},
    }


def _rows(table: Tensor) -> list[list[float | None]]:
    """Make rows by selecting layer, then sharing layer; null where the latter comes first."""
    return [
        [None if s < f else value for s, value in enumerate(row)]
        for f, row in enumerate(table.tolist())
    ]
