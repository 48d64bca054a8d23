"""Prompts of ``generate`` that begin like earlier ones, and take over the pages of those."""

from __future__ import annotations

import inspect
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Protocol

import numpy as np
from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin

from topkv_prefixes.counts import PrefixCounts
from topkv_prefixes.prefixes import Prefixes
from topkv_transformers.cache import TopkvCache
from topkv_transformers.capture import DYNAMIC_ROPE
from topkv_transformers.forwards import left_padding
from topkv_transformers.requests import CacheRequests
from topkv_transformers.state import CacheState
from topkv_transformers.watch import ModelState

PLAIN = {"inputs", "input_ids", "attention_mask"}
"""Tensors of a call that keys and values of a prompt follow from; others may change them."""

NAMES = set(inspect.signature(GenerationMixin.generate).parameters) - {"self", "kwargs"}
NAMES |= {*PLAIN, *vars(GenerationConfig()), "cache", "past_key_values", "use_cache"}
"""Arguments that keys and values do not depend on but through ids; a model may take others."""


class Call(Protocol):
    """Interface to a call of ``generate``, see ``generation.Call``."""

    arguments: dict[str, Any]
    salt: bytes

    def option(self, name: str) -> Any: ...

    def mask(self) -> Tensor: ...


class PromptPrefixes:
    """Looks prompts up before ``generate``, and publishes what it leaves behind.

    Args:
        decoder: whose modules make keys and values. When they have changed, all is forgotten.
        requests: of the model's caches.

    Attributes:
        policy: ``keep`` of the plugin ``prefixes``; ``"off"`` where the setting ``pages`` names
            another one or none.
    """

    def __init__(self, decoder: nn.Module, requests: CacheRequests) -> None:
        self.decoder, self.requests = decoder, requests
        keeper = requests.coordinator.keeper
        self._found = keeper if isinstance(keeper, Prefixes) else None
        self.policy = self._found.settings.keep if self._found else "off"
        self._model: ModelState | None = None
        self._salt = b""

    @property
    def counts(self) -> PrefixCounts:
        """Tokens that were asked for and found, pages that are kept, and those that went."""
        return self._found.counts if self._found else PrefixCounts()

    def tenant(self, name: str) -> AbstractContextManager[None]:
        """Prompts of this thread meanwhile are those of a tenant, see ``Prefixes.tenant``::

        with handle.prefixes.tenant("acme"):
            model.generate(**inputs)
        """
        return self._found.tenant(name) if self._found else nullcontext()

    def forget(self) -> None:
        """Let nothing be found of what was published so far.

        This happens by itself when the model has changed, see ``watch.py``; a write through
        ``parameter.data`` alone cannot be seen. What a storage keeps of another state of the model
        is not found any more, either, and nothing of caches that were filled before is published.
        """
        self.requests.watch.renew()
        if self._found:
            self._found.forget(stored=False)

    def prefetch(self, input_ids: Tensor) -> None:
        """Begin to fetch what a storage keeps of prompts, and wait for nothing.

        Args:
            input_ids: int64 ``[B, n]``, without padding; as ``generate`` is going to get them.
        """
        if self._found is None:
            return
        with self.requests.exclusive():
            self._follow(self._found, self.requests.watch.look())
            for row in input_ids.cpu().numpy():
                self._found.prefetch(row, self._salt)

    def refusals(self) -> list[str]:
        """Every reason against ``pages: prefixes``; empty where it is off."""
        if self._found is None:
            return []
        reasons = list(self._found.off)
        rope = getattr(getattr(self.decoder, "rotary_emb", None), "rope_type", None)
        others = len(list(self.requests.stand_in.stock))
        if others:
            reasons.append(f"{others} layers keep states of their own, which lie in no page")
        if rope in DYNAMIC_ROPE:
            reasons.append(f"RoPE of type {rope!r} gives keys that depend on the whole length")
        return [*reasons, *self.requests.watch.look().walk.unwatched]

    def take_over(self, call: Call, cache: TopkvCache) -> None:
        """Begin the rows of a fresh cache with the columns that are found for all of them.

        Raises:
            DeviceMemoryError, HostMemoryError: no room; the cache is as it was.
        """
        prefixes = self._found
        if prefixes is None:
            return
        self._follow(prefixes, self.requests.watch.current())
        ids = None if cache.state.slots else self._ids(call)
        # Transformers cuts a whole prompt into chunks, and not what a cache lacks of it.
        if ids is None or call.option("prefill_chunk_size") is not None:
            return
        salt, mask = self._salt + call.salt, call.mask()
        ids, padding = self._rows(call, ids), self._rows(call, left_padding(mask))
        if ids.shape[1] != mask.shape[1] or len(ids) != len(padding):
            return  # it is refused further on
        prompts = [row[pads:] for row, pads in zip(ids, padding.tolist(), strict=True)]
        with self.requests.exclusive():
            for prompt in prompts:
                prefixes.fetch(prompt, salt)
        found = [prefixes.length(prompt, salt) for prompt in prompts]
        columns = int((padding + found).min())
        if not (padding < columns).any():
            columns = 0
        held = np.maximum(columns - padding, 0).tolist()
        state = cache.state
        self.requests.begin(
            state,
            len(prompts),
            lambda row: prefixes.begin(prompts[row], salt, most=held[row]),
        )
        state.feed(self.requests.watch.current())
        state.seen, state.padding = columns, padding
        lengths = map(self.requests.coordinator.length, state.slots)
        if list(lengths) != held:  # rows whose pages end elsewhere; all have theirs by now
            self.requests.truncate(state, columns)

    def publish(self, call: Call, cache: TopkvCache, output: Any, before: int) -> None:
        """Let later prompts find the rows of a cache, as far as their ids are known.

        Args:
            output: what ``generate`` returned.
            before: columns that the caller's cache held.
        """
        state = cache.state
        if self._found is None or not state.slots:
            return
        self._remember(call, state, output, before)
        # A prompt behind generated tokens has seen what was attended sparsely.
        if self.policy == "prompt" and before:
            return
        end = state.seen if self.policy == "all" else min(state.seen, state.prompt)
        if state.known.shape[1] < end or self.requests.watch.look() is not state.fed:
            return
        for row, slot in enumerate(state.slots):
            tokens = state.known[row, state.padding[row] : end]
            self._found.publish(slot, tokens, self._salt + call.salt)

    def _remember(self, call: Call, state: CacheState, output: Any, before: int) -> None:
        """Note the ids of the columns that a call has appended to a cache of known ones."""
        ids = self._ids(call)
        if ids is None or state.known.shape[1] != before:
            return
        sequences = output if isinstance(output, Tensor) else output.sequences
        given = state.prompt - ids.shape[1]  # columns before those that were passed
        new = sequences[:, before - given : state.seen - given].cpu().numpy()
        if given in (0, before) and new.shape == (len(state.slots), state.seen - before):
            state.known = np.concatenate([state.known, new], 1)

    def _ids(self, call: Call) -> np.ndarray | None:
        """Ids of the prompt, int64 ``[B, n]``; None where keys may depend on more than them."""
        if self._found is None or call.option("output_hidden_states"):
            return None
        tensors = {name for name, value in call.arguments.items() if isinstance(value, Tensor)}
        ids = call.arguments.get("input_ids", call.arguments.get("inputs"))
        if ids is None or ids.ndim != 2 or tensors - PLAIN or call.arguments.keys() - NAMES:
            return None
        if self.requests.watch.current().unsure:
            return None
        found: np.ndarray = ids.cpu().numpy()
        return found

    def _rows(self, call: Call, values: np.ndarray) -> np.ndarray:
        return np.repeat(values, call.option("num_return_sequences") or 1, axis=0)

    def _follow(self, prefixes: Prefixes, model: ModelState) -> None:
        """Forget all that was published of another state of the model than this one."""
        if model is self._model:
            return
        prefixes.forget(stored=False)
        # The storage outlives this process, so that more distinguishes its pages.
        if prefixes.storage and not model.unsure:
            self._salt = self.requests.watch.digest().encode()
        self._model = model
