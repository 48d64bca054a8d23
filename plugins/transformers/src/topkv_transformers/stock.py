"""The layers of a mixed model that topkv leaves alone, in one cache.

Windows, convolutions and linear states hold what Transformers gives them to hold, on the device,
and forget as they go on. What a ``TopkvCache`` promises beyond that, copies and the way back after
an exception, is done by keeping what they held: a reference to what they replace, a copy of what
they write in place.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from copy import deepcopy
from itertools import chain
from typing import Any

from torch import Tensor
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from topkv.errors import CapabilityError, RequestError

FULL = "full_attention"

STOCK = {"sliding_attention", "linear_attention", "conv", "mamba", "moe", "mlp"}
"""Kinds of layers that may stand beside full ones; the last two have no cache at all."""


def layer_types(config: Any) -> list[str]:
    """Kind of each layer of a model, as Transformers' own cache sees it."""
    types = getattr(config, "layer_types", None)
    if types:
        return list(types)
    slides = getattr(config, "sliding_window", None) is not None and not covering_window(config)
    return ["sliding_attention" if slides else FULL] * config.num_hidden_layers


def covering_window(config: Any) -> int | None:
    """The window of all layers if it holds every position of the model, so that nothing slides."""
    window = getattr(config, "sliding_window", None)
    positions = getattr(config, "max_position_embeddings", None)
    if window is None or positions is None or getattr(config, "layer_types", None):
        return None
    return window if window >= positions else None


class FreshLayers:
    """Makes empty layers of Transformers' own cache, None where one of ours stands.

    The config is copied: one that changes later changes nothing in the caches that there are.
    """

    def __init__(self, config: Any) -> None:
        self.config, self.copy = config, deepcopy(config)

    def check(self) -> None:
        """Raise RequestError if the config names other layers than it did."""
        before, now = _shown(self.copy), _shown(self.config)
        if before != now:
            raise RequestError(
                f"the config was changed since the model was attached: expected {before}, got "
                f"{now}; undo the change, or detach() the handle and attach again"
            )

    def __call__(self) -> list[Any]:
        types = layer_types(self.copy)
        if set(types).isdisjoint(STOCK):
            return [None] * len(types)
        layers = DynamicCache(config=self.copy).layers
        return [None if kind == FULL else layer for kind, layer in zip(types, layers, strict=True)]


def _shown(config: Any) -> str:
    """The layers of a config, and the window of those that slide."""
    types = Counter(layer_types(config))
    slide = f" of {config.sliding_window} tokens" if "sliding_attention" in types else ""
    return ", ".join(f"{count} x {kind}" for kind, count in types.items()) + slide


class StockLayers:
    """The stock layers of one cache.

    Args:
        make: makes empty ones, as ``FreshLayers`` does.

    Attributes:
        layers: one for each layer of the model, None where one of ours stands.
    """

    def __init__(self, make: Callable[[], list[Any]] = list) -> None:
        self._make = make
        self.layers = make()

    def __iter__(self) -> Iterable[Any]:
        return iter([layer for layer in self.layers if layer is not None])

    @property
    def tensors(self) -> list[Tensor]:
        """Tensors that the layers hold on the device."""
        return [each for layer in self for each in _tensors(vars(layer))]

    def keep(self) -> list[dict[str, Any]]:
        """Return what the layers hold now, for one call of ``restore``. Waits for nothing."""
        return [
            {name: _kept(value, in_place(layer)) for name, value in vars(layer).items()}
            for layer in self
        ]

    def restore(self, kept: list[dict[str, Any]]) -> None:
        """Hold again what ``keep`` of these layers, or of those of another cache, returned."""
        for layer, values in zip(self, kept, strict=True):
            layer.__dict__ = values

    def reset(self) -> None:
        """Hold nothing, of any number of rows."""
        self.restore([vars(layer) for layer in self._make() if layer is not None])

    def check_crop(self) -> None:
        """Raise CapabilityError if tokens cannot be taken back."""
        reasons = [
            f"layer {index} ({type(layer).__name__}) {why}; fork() the cache where you may "
            "want to go back to"
            for index, layer in enumerate(self.layers)
            if (why := _why_forgotten(layer))
        ]
        if reasons:
            raise CapabilityError("this TopkvCache cannot be cropped", reasons)

    def crop(self, columns: int) -> None:
        """Keep the first ``columns`` columns. Idempotent; ``check_crop`` has passed."""
        for layer in self:
            if isinstance(layer, DynamicSlidingWindowLayer):
                change = columns - layer.get_seq_length()
                if change:
                    layer.crop(change)


def _why_forgotten(layer: Any) -> str:
    """Return why a layer cannot go back, empty if it can."""
    if isinstance(layer, DynamicSlidingWindowLayer):
        passed = layer.get_seq_length() >= layer.sliding_window
        return f"has passed its window of {layer.sliding_window} tokens" if passed else ""
    # A layer without a cache has no state either.
    return "keeps one state of all tokens" if in_place(layer) else ""


def in_place(layer: Any) -> bool:
    """Return True if a layer writes into the tensors that it holds."""
    return hasattr(layer, "recurrent_states")


def _kept(value: Any, copied: bool) -> Any:
    if isinstance(value, Tensor):
        return value.clone() if copied else value
    if isinstance(value, dict):
        return {name: _kept(each, copied) for name, each in value.items()}
    return value


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, dict):
        return list(chain.from_iterable(map(_tensors, value.values())))
    # What has no dimension is a number that Transformers keeps on the host.
    return [value] if isinstance(value, Tensor) and value.ndim else []
