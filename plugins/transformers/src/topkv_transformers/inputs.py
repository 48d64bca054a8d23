"""The cache among the inputs that ``generate`` prepares for each forward."""

from __future__ import annotations

from functools import wraps
from typing import Any

from transformers import PreTrainedModel

from topkv.errors import CapabilityError
from topkv_transformers.cache import TopkvCache
from topkv_transformers.classes import name_of

PREPARE = "prepare_inputs_for_generation"

RECOMPUTED = ("Phi3", "Phimoe")
"""Classes whose own ``prepare_inputs_for_generation`` leaves the cache out at the first forward
beyond ``config.original_max_position_embeddings`` columns, so that keys are made with the RoPE of
long texts."""


def last_column(model: PreTrainedModel) -> int | None:
    """Columns beyond which a model leaves out a cache that holds no more; None if none are."""
    if name_of(model) not in {f"{name}ForCausalLM" for name in RECOMPUTED}:
        return None
    return getattr(model.config, "original_max_position_embeddings", None)


class PreparedInputs:
    """Keeps a ``TopkvCache`` in what ``prepare_inputs_for_generation`` of a model returns.

    A cache without tokens that the model leaves out is put back: either way the forward begins
    at the first token.

    Raises:
        CapabilityError: the model leaves out a cache with tokens, or names another one. All
            forwards from there on would run without topkv.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._replaced = model.__dict__.get(PREPARE)
        original = getattr(model, PREPARE)

        @wraps(original)
        def prepare(*args: Any, **kwargs: Any) -> Any:
            inputs = original(*args, **kwargs)
            for name, given in kwargs.items():
                if isinstance(given, TopkvCache) and inputs.get(name) is not given:
                    self._put_back(inputs, name, given)
            return inputs

        setattr(model, PREPARE, prepare)

    def _put_back(self, inputs: dict[str, Any], name: str, given: TopkvCache) -> None:
        found = inputs.get(name)
        if found is not None or given.get_seq_length():
            instead = "no cache" if found is None else f"a {type(found).__name__}"
            raise CapabilityError(
                "this forward cannot run through topkv",
                [
                    f"{PREPARE} of {type(self.model).__name__} was given a TopkvCache of "
                    f"{given.get_seq_length()} columns and returned {instead}, over which "
                    "nothing would be served; generate with a cache of Transformers, "
                    "past_key_values=DynamicCache(config=model.config), or report the class"
                ],
            )
        inputs[name] = given

    def remove(self) -> None:
        """Give the model its own method back."""
        del self.model.__dict__[PREPARE]
        if self._replaced is not None:
            setattr(self.model, PREPARE, self._replaced)
