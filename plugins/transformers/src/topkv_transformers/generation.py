"""``generate`` of an attached model: the work before and after the real one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from topkv.errors import CapabilityError, OutOfMemory, RequestError
from topkv_transformers.cache import TopkvCache
from topkv_transformers.drafts import (
    assistant_reasons,
    assisted,
    lookup_reasons,
    most_tokens,
    shared_reasons,
)
from topkv_transformers.forwards import left_padding
from topkv_transformers.inputs import last_column
from topkv_transformers.names import cache_in, with_cache
from topkv_transformers.prefixes import PromptPrefixes
from topkv_transformers.requests import CacheRequests
from topkv_transformers.state import CacheState

DEFAULT_NEW_TOKENS = 20
"""Tokens that Transformers generates when no length is given."""

# Options of ``generate``, the values that change nothing, and why others are refused.
_REFUSED: Mapping[str, tuple[tuple[Any, ...], str]] = {
    "num_beams": ((1,), "beams are not supported; give num_beams=1"),
    "num_beam_groups": ((1,), "beams are not supported; give num_beam_groups=None"),
    "constraints": ((), "constrained beams are not supported; give constraints=None"),
    "force_words_ids": ((), "constrained beams are not supported; give force_words_ids=None"),
    "penalty_alpha": ((0, 0.0), "contrastive search is not supported; give penalty_alpha=None"),
    "dola_layers": ((), "DoLa is not supported; give dola_layers=None"),
    "assistant_early_exit": (
        (),
        "drafts of a model's own first layers are not supported; give assistant_early_exit=None",
    ),
    "assistant_tokenizer": (
        (),
        "an assistant of another tokenizer is not supported; leave assistant_tokenizer out",
    ),
    "speculation_type": (
        (),
        "assistants that read hidden states are not supported; give speculation_type=None",
    ),
    "use_mtp": ((False,), "multi-token prediction is not supported; give use_mtp=False"),
    "custom_generate": ((), "custom decoding loops are not supported; leave custom_generate out"),
    "token_healing": (
        (False,),
        "it is not supported; heal the prompt before, and give token_healing=False",
    ),
    "cache_implementation": ((), "topkv brings the cache; leave cache_implementation out"),
    "use_cache": ((True,), "topkv is the cache; leave use_cache out"),
    "output_attentions": (
        (False,),
        "attention weights are never made; give output_attentions=False",
    ),
}

_OURS: Mapping[str, Any] = {"cache_implementation": None, "use_cache": True}
"""Options of the cache, which is ours: what a checkpoint has for them by default gives way."""


def refused_options(option: Callable[[str], Any]) -> list[str]:
    """Every option of ``generate`` that topkv does not offer, and why.

    Args:
        option: the value of an option by its name, None where it is not set.
    """
    return [
        f"{name}={_short(option(name))}: {reason}"
        for name, (harmless, reason) in _REFUSED.items()
        if option(name) is not None and option(name) not in harmless
    ]


def refused_defaults(config: Any) -> list[str]:
    """Every option in a checkpoint's ``generation_config`` that topkv does not offer, and why.

    Each of them must be given otherwise in a call.
    """
    return refused_options(lambda name: None if name in _OURS else getattr(config, name, None))


class Call:
    """One call of ``generate``: its options, and how many tokens it appends to each row.

    Args:
        model: the attached model.
        arguments: what ``generate`` was called with, by name.
        salt: see ``salt_of``.
    """

    def __init__(
        self, model: PreTrainedModel, arguments: dict[str, Any], salt: bytes = b""
    ) -> None:
        self.device, self.last_column = model.device, last_column(model)
        self.arguments, self.salt = arguments, salt
        self._configs = (arguments.get("generation_config"), model.generation_config)

    def option(self, name: str) -> Any:
        """The value that ``generate`` will use, None if nobody has set one."""
        if name in self.arguments:  # a None there stands above what configs say
            return self.arguments[name]
        values = [getattr(config, name, None) for config in self._configs]
        if name in _OURS and values[0] in (None, values[1]):
            return _OURS[name]
        return next((value for value in values if value is not None), None)

    def ours(self) -> dict[str, Any]:
        """Arguments that put our cache before what the checkpoint has by default."""
        default = self._configs[1]
        return {
            name: ours
            for name, ours in _OURS.items()
            if getattr(default, name, None) not in (None, ours)
        }

    @property
    def drafts(self) -> int:
        """The most tokens that prompt lookup drafts for a step; 0 without it."""
        return self.option("prompt_lookup_num_tokens") or 0

    @property
    def assistant(self) -> Any:
        """The model that drafts; None without one, or where prompt lookup goes before it."""
        return None if self.drafts else self.option("assistant_model")

    @property
    def assists(self) -> bool:
        """True if this call drafts for another model, which calls it again and again with the
        cache that it returned, cut to what was accepted."""
        return bool(self.option("is_assistant"))

    def refuse(self, requests: CacheRequests, seen: int) -> None:
        """Raise CapabilityError with every option that topkv does not offer.

        Args:
            requests: of the model's caches.
            seen: columns that the cache holds.
        """
        reasons = refused_options(self.option)
        if self.drafts or self.assistant is not None:
            reasons += self._draft_reasons(requests, seen)
        mask = self.arguments.get("attention_mask")
        if mask is not None and mask.ndim != 2:
            reasons.append(f"attention_mask: expected [B, n], got shape {list(mask.shape)}")
        if reasons:
            raise CapabilityError("generate cannot do this through topkv", reasons)

    def _draft_reasons(self, requests: CacheRequests, seen: int) -> list[str]:
        """Reasons against drafts; arguments as of ``refuse``."""
        rows, columns = self.mask().shape[:2]
        rows *= self.option("num_return_sequences") or 1
        if self.drafts:
            name, without = "prompt_lookup_num_tokens", "give prompt_lookup_num_tokens=None"
            reasons = lookup_reasons(requests, self.drafts)
        else:
            name, without = "assistant_model", "leave assistant_model out"
            reasons = assistant_reasons(requests, self.assistant, columns, self.new_tokens())
        reasons += shared_reasons(requests, rows, seen)
        named = f"{name}={_short(self.option(name))}"
        return [f"{named}: {reason}, or {without}" for reason in reasons]

    def columns_given(self) -> int:
        """Columns of the prompt that was passed."""
        inputs = self._inputs()
        return 1 if inputs is None else inputs.shape[1]

    def _inputs(self) -> Tensor | None:
        names = ("inputs_embeds", "inputs", "input_ids")
        given = (self.arguments.get(name) for name in names)
        return next((tensor for tensor in given if tensor is not None), None)

    def mask(self) -> Tensor:
        """The 2D mask of the prompt, inferred from padding tokens where none was passed."""
        mask = self.arguments.get("attention_mask")
        if mask is not None:
            return mask
        inputs = self._inputs()
        if inputs is None:
            return torch.ones((1, 1), dtype=torch.long, device=self.device)
        if self.assists:  # Transformers has left out a mask of ones
            return torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)
        pad, eos = self.option("pad_token_id"), self.option("eos_token_id")
        ends = [eos] if isinstance(eos, int) else eos
        if inputs.ndim == 2 and pad is not None and (ends is None or pad not in ends):
            return (inputs != pad).long()
        return torch.ones(inputs.shape[:2], dtype=torch.long, device=inputs.device)

    def new_tokens(self) -> int:
        """The most tokens that are generated."""
        count = self.option("max_new_tokens")
        if count is None:
            length = self.option("max_length")
            count = DEFAULT_NEW_TOKENS if length is None else length - self.columns_given()
        return max(1, count)

    def admit(self, cache: TopkvCache) -> None:
        """Begin the rows of a fresh cache and reserve pages for prompt and new tokens.

        Raises:
            RequestError: the prompt does not continue what the cache holds, or the config was
                changed since the model was attached.
            CapabilityError: the model would leave the cache out on the way.
            HostMemoryError, DeviceMemoryError: no room; the cache is as it was.
        """
        cache.requests.stock.check()
        state, mask = cache.state, self.mask()
        columns = mask.shape[1]
        padding = np.repeat(
            left_padding(mask, state.seen), self.option("num_return_sequences") or 1
        )
        self._check_prompt(state, mask, padding)
        self._check_columns(state, columns)
        # The last token that is generated is never appended.
        tokens = columns - np.maximum(padding, state.seen) + self.new_tokens() - 1
        fresh = not state.slots
        try:
            if fresh:
                cache.requests.begin(state, len(padding))
            cache.requests.reserve(state, self._stored_at_once(cache, tokens).tolist())
        except BaseException as error:
            if fresh:
                cache.close()
            if not isinstance(error, OutOfMemory):
                raise
            raise type(error)(
                f"generate needs room for {tokens.tolist()} further tokens in {len(tokens)} rows, "
                f"prompt and new tokens: {error}"
            ) from error
        state.padding = padding
        if not (self.assists and state.prompt):
            state.prompt = columns

    def _stored_at_once(self, cache: TopkvCache, tokens: np.ndarray) -> np.ndarray:
        """Most tokens of each row that are stored at a time, of ``tokens`` to come: a stage may
        give pages back as soon as the prompt is read."""
        coordinator = cache.requests.coordinator
        most = coordinator.requests.bound
        if most is None:
            return tokens
        room = most - coordinator.requests.length[cache.state.slots]
        return np.maximum(tokens - self.new_tokens() + 1, np.minimum(tokens, room))

    def _check_prompt(self, state: CacheState, mask: Tensor, padding: np.ndarray) -> None:
        columns, inputs = mask.shape[1], self._inputs()
        if inputs is not None:
            rows, given = inputs.shape[:2]
            if mask.shape[0] != rows or columns not in (given, given + state.seen):
                raise RequestError(
                    f"attention_mask: expected {rows} rows of {given + state.seen} columns (or "
                    f"of {given}, if all ids are passed), got {list(mask.shape)}"
                )
        if (padding == columns).any():
            empty = np.flatnonzero(padding == columns).tolist()
            raise RequestError(f"rows {empty} of attention_mask hold no token at all")
        if state.slots and (len(padding) != len(state.slots) or (padding != state.padding).any()):
            raise RequestError(
                f"the cache holds rows with {state.padding.tolist()} columns of left padding and "
                f"the prompt has {padding.tolist()}; pass the same rows again, longer"
            )
        if columns <= state.seen:
            raise RequestError(
                f"the cache holds {state.seen} columns and attention_mask covers {columns}; pass "
                "all ids again with the new ones behind them, or new ids with the mask of all"
            )

    def _check_columns(self, state: CacheState, columns: int) -> None:
        """Raise CapabilityError where the cache would be left out, see ``inputs.last_column``."""
        last, new = self.last_column, self.new_tokens()
        begins = state.seen or columns
        if last is None or begins > last or columns + new - 1 <= last:
            return
        room = last - columns + 1
        ways = [f"give max_new_tokens of at most {room}"] if room > 0 else []
        ways += ["pass all ids without past_key_values"] if state.seen and columns > last else []
        ways += ["generate without topkv by past_key_values=DynamicCache(config=model.config)"]
        raise CapabilityError(
            "generate cannot do this through topkv",
            [
                f"the model changes its RoPE beyond {last} columns "
                "(config.original_max_position_embeddings) and computes all tokens again "
                f"without its cache; this call goes on from {begins} columns to "
                f"{columns + new - 1}; {', or '.join(ways)}"
            ],
        )


def salt_of(given: str | bytes | None) -> bytes:
    """The option ``cache_salt``: pages of prompts are found under the salt that they were left
    under alone.

    Raises:
        RequestError: it is of another type.
    """
    if given is None or isinstance(given, bytes):
        return given or b""
    if not isinstance(given, str):
        raise RequestError(f"cache_salt: expected a text or bytes, got {type(given).__name__}")
    return given.encode("utf-8", "surrogatepass")


def _short(value: Any) -> str:
    """A value for a message; of a model, say, its type alone."""
    plain = isinstance(value, (bool, int, float, str))
    return repr(value) if plain else type(value).__name__


def _check_used(model: PreTrainedModel, cache: TopkvCache, before: int) -> None:
    """Raise CapabilityError if no forward has appended to a cache."""
    if cache.state.slots and cache.state.seen == before:
        raise CapabilityError(
            "generate cannot do this through topkv",
            [
                f"{type(model).__name__} has run no forward over the cache that it was given, so "
                "it has generated without topkv; its generate or forward leaves caches out"
            ],
        )


@contextmanager
def _verifying(model: PreTrainedModel, call: Call, cache: TopkvCache) -> Iterator[None]:
    """Let forwards over a cache verify drafts inside, where a call has some."""
    requests, state = cache.requests, cache.state
    most = requests.coordinator.config.max_queries
    if call.assists:
        # Its drafts are taken back between its calls, and each call begins with two tokens.
        state.most = most
        yield
        return
    if call.assistant is None:
        state.most, held = most if call.drafts else 1, nullcontext()
    else:
        state.most = most_tokens(requests, call.assistant)
        held = assisted(model, call.assistant, state.most)
    try:
        with held:
            yield
    finally:
        state.most = 1


def generate(
    model: PreTrainedModel,
    requests: CacheRequests,
    prefixes: PromptPrefixes,
    original: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> Any:
    """Call ``generate`` over a ``TopkvCache``, and end what must end.

    Nothing changes the model inside, so that it is looked at once, and again before its pages are
    published.

    A cache that is made here ends with the call, unless ``return_dict_in_generate`` hands it to
    the caller. A cache that was passed is the caller's: after an exception it holds what it held
    before.
    """
    arguments = inspect.signature(original).bind_partial(*args, **kwargs).arguments
    arguments |= arguments.pop("kwargs", {})
    salt = salt_of(arguments.pop("cache_salt", None))
    given = cache_in(arguments)
    if given is not None and not isinstance(given, TopkvCache):
        return original(**arguments)
    with requests.exclusive(), requests.watch.unchanged():
        call = Call(model, arguments, salt)
        call.refuse(requests, 0 if given is None else given.state.seen)
        cache = TopkvCache(requests) if given is None else given
        cache.check_owner(requests)
        before, kept = cache.state.seen, cache.state.stock.keep()
        try:
            if not call.drafts and call.assistant is None:  # else all ids are in one forward
                prefixes.take_over(call, cache)
            call.admit(cache)
            arguments = with_cache(arguments, cache)
            arguments |= {"attention_mask": call.mask(), **call.ours()}
            reached = cache.state.seen
            with _verifying(model, call, cache):
                output = original(**arguments)
            _check_used(model, cache, reached)
        except BaseException:
            requests.truncate(cache.state, before, kept)
            raise
        prefixes.publish(call, cache, output, before)
        if given is None and not call.option("return_dict_in_generate"):
            cache.close()
        return output
