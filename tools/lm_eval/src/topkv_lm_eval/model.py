"""``TopkvLM``: requests of the harness as prompts of topkv."""

from __future__ import annotations

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.models.huggingface import HFLM
from lm_eval.models.utils import (
    handle_stop_sequences,
    normalize_gen_kwargs,
    postprocess_generated_text,
)
from tqdm import tqdm

from topkv.errors import ConfigError
from topkv.plugins import registry
from topkv_cli.named import require_plugins
from topkv_cli.options import config_of, device_or_default
from topkv_evaluation.eval.choices import read_dense_layers
from topkv_evaluation.loading import DTYPES, load_served, load_tokenizer
from topkv_lm_eval.decoder import Asked, Decoder
from topkv_transformers.support import shape_of

TOGETHER = 64
"""Requests that are attached to and run as one group, in batches; progress is shown by group."""


class TopkvLM(HFLM):
    """A local model, its prompts read densely, their last line and all answers decoded sparsely.

    Args:
        pretrained: directory of model and tokenizer.
        algorithm, backend, budget, buffer, unit, impl: as in ``SparseConfig``.
        dense_layers: layers as in ``"0-1"``, or ``"no"``; None for the algorithm's default. The
            harness makes None of the word ``none``.
        config: file of further settings, which the arguments beat.
        question: what of a prompt is decoded sparsely: ``"line"``, its last line; a number of
            tokens; or ``"dense"``, nothing.
        batch_size: requests that are decoded together.
        max_length: positions; the model's by default. Longer prompts lose their beginning.
        max_gen_toks: tokens of an answer where a task does not say.
        device, dtype: of the model; by default the GPU if there is one, and the checkpoint's.
        trust_remote_code: whether Python code of the directory may run.
        max_batch_size: taken, as the harness passes it, and not used.

    What is not said here, texts as tokens among it, is as the harness's own model ``hf`` does it.

    Raises:
        ConfigError, CapabilityError: an argument is wrong, or the model cannot be attached.
    """

    max_gen_toks = 256

    def __init__(
        self,
        pretrained: str,
        algorithm: str | None = None,
        backend: str | None = None,
        budget: int | None = None,
        buffer: int | None = None,
        unit: int | None = None,
        impl: str | None = None,
        dense_layers: str | int | None = None,
        config: str | None = None,
        question: str | int = "line",
        batch_size: int | str = 1,
        max_length: int | None = None,
        max_gen_toks: int = 256,
        device: str | None = None,
        dtype: str = "auto",
        trust_remote_code: bool = False,
        max_batch_size: int | None = None,
    ) -> None:
        self.question, batch = _checked(question, batch_size, dtype)
        given = {"algorithm": algorithm, "backend": backend, "budget": budget, "buffer": buffer}
        given |= {"unit": unit, "impl": impl}
        chosen = config_of(Path(config) if config else None, given)
        trust = {"trust_remote_code": trust_remote_code}
        require_plugins(chosen, registry())
        settings = chosen.as_dict()
        place = device_or_default(device)
        model = load_served(Path(pretrained), place, dtype=dtype, **trust)
        if dense_layers is not None:
            words = "none" if dense_layers == "no" else str(dense_layers)
            layers = shape_of(model).num_layers
            settings["dense_layers"] = read_dense_layers(words, layers)
        super().__init__(
            model,
            tokenizer=load_tokenizer(Path(pretrained), **trust),
            backend="causal",
            batch_size=max(TOGETHER, batch),
            max_length=max_length,
        )
        unit = settings.pop("unit", None) or _unit_of(settings.get("algorithm"))
        self.decoder = Decoder(model, settings, unit, batch)
        self.max_gen_toks = max_gen_toks

    def _asked(
        self, text: str | None, tokens: list[int], room: int
    ) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Split a prompt into a dense and a sparse part; its beginning is cut off to fit."""
        sparse = 0 if self.question == "dense" else self.question
        if self.question == "line":
            before = (text or "").rstrip("\n").rpartition("\n")[0]
            sparse = len(tokens) - (len(self.tok_encode(before)) if before else 0)
        tokens = tokens[-room:]
        place = len(tokens) - min(int(sparse), len(tokens) - 1)
        return tuple(tokens[:place]), tuple(tokens[place:])

    def _loglikelihood_tokens(
        self,
        requests: list[tuple[Any, list[int], list[int]]],
        disable_tqdm: bool = False,
        **kwargs: Any,
    ) -> list[tuple[float, bool]]:
        """Answer ``loglikelihood``; requests are texts, tokens of context and of continuation."""
        asked = []
        for texts, context, answer in requests:
            # The last token of the answer is never fed.
            room = self.max_length + 1 - len(answer)
            if room < 1:
                what = f"a continuation of {len(answer)} tokens cannot be scored"
                raise ConfigError(what, [f"the model has {self.max_length} positions"])
            split = self._asked(texts[0] if texts else None, list(context), room)
            asked.append(Asked(*split, tuple(answer)))
        found = self._in_parts(asked, self.decoder.score, disable_tqdm)
        for (texts, _, _), result in zip(requests, found, strict=True):
            if texts is not None:
                self.cache_hook.add_partial("loglikelihood", texts, result)
        return found

    def _in_parts(self, asked: list[Asked], run: Any, quiet: bool) -> list[Any]:
        results: list[Any] = []
        with tqdm(total=len(asked), disable=quiet, desc="topkv") as bar:
            for first in range(0, len(asked), self.batch_size):
                part = asked[first : first + self.batch_size]
                results += run(part)
                bar.update(len(part))
        return results

    def generate_until(self, requests: list[Instance], disable_tqdm: bool = False) -> list[str]:
        """Generate texts greedily, up to a stop sequence.

        Raises:
            ConfigError: a task wants tokens to be drawn at random, or more than there is room for.
        """
        alike = defaultdict(list)
        for place, request in enumerate(requests):
            alike[json.dumps(request.args[1], sort_keys=True)].append(place)
        texts = [""] * len(requests)
        for places in alike.values():
            contexts = [requests[place].args[0] for place in places]
            wanted = requests[places[0]].args[1]
            for place, text in zip(
                places, self._texts(contexts, wanted, disable_tqdm), strict=True
            ):
                texts[place] = text
                self.cache_hook.add_partial("generate_until", requests[place].args, text)
        return texts

    def _texts(self, contexts: list[str], wanted: dict[str, Any], quiet: bool) -> list[str]:
        kwargs = normalize_gen_kwargs(wanted, self.max_gen_toks)
        if kwargs.get("do_sample") or kwargs.get("num_beams", 1) != 1:
            reason = "do_sample and num_beams must be off: the model topkv decodes greedily"
            raise ConfigError("the task cannot be run", [reason])
        eos = self.tokenizer.decode([self.eot_token_id])
        until = handle_stop_sequences(kwargs.get("until"), eos=eos)
        new_tokens = kwargs["max_gen_toks"]
        room = self.max_length - new_tokens
        if room < 1:
            reason = f"the model has {self.max_length} positions, and it generates {new_tokens}"
            raise ConfigError("the task cannot be run", [reason])
        asked = [
            Asked(*self._asked(text, self.tok_encode(text), room), new_tokens=new_tokens)
            for text in contexts
        ]

        def shown(tokens: Any) -> str:
            tokens = list(tokens)
            if self.eot_token_id in tokens:
                tokens = tokens[: tokens.index(self.eot_token_id)]
            return str(self.tokenizer.decode(tokens, skip_special_tokens=True))

        def ended(tokens: Any) -> bool:
            found = shown(tokens)
            return self.eot_token_id in tokens or any(stop and stop in found for stop in until)

        answers = self._in_parts(asked, lambda part: self.decoder.generate(part, ended), quiet)
        return [postprocess_generated_text(shown(tokens), until, None) for tokens in answers]


def _checked(question: str | int, batch_size: int | str, dtype: str) -> tuple[str | int, int]:
    """Check and convert the arguments that are no settings of topkv."""
    reasons = []
    if question not in ("line", "dense") and not (type(question) is int and question > 0):
        reasons.append(f"question: expected line, dense or a number of tokens, got {question!r}")
    batch = 1 if batch_size == "auto" else int(batch_size) if str(batch_size).isdigit() else 0
    if batch < 1:
        reasons.append(f"batch_size: expected a number of 1 or more, got {batch_size!r}")
    if dtype not in DTYPES:
        reasons.append(f"dtype: expected one of {', '.join(DTYPES)}, got {dtype!r}")
    if reasons:
        raise ConfigError("--model_args of topkv are refused", reasons)
    return question, batch


def _unit_of(algorithm: str | None) -> int:
    """Return the default unit of an algorithm, in tokens."""
    if algorithm is None:
        return 16
    entry = registry().get("algorithm", algorithm).entry
    return int((entry.defaults if entry else {}).get("unit", 16))
