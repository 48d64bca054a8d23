"""``TopkvCache``: a Transformers cache whose layers live in the host pool of a coordinator."""

from __future__ import annotations

import operator
import weakref
from itertools import count
from typing import Any

import torch
from torch import Tensor
from transformers import Cache
from transformers.cache_utils import CacheLayerMixin

from topkv.errors import CapabilityError, RequestError
from topkv.kv.held import tensor_bytes
from topkv_transformers.attention import MARK
from topkv_transformers.requests import CacheRequests
from topkv_transformers.state import CacheState
from topkv_transformers.stock import StockLayers


class TopkvLayer(CacheLayerMixin):
    """One layer: hands new keys and values on, and holds none itself."""

    is_sliding = False
    is_compileable = False
    is_croppable = True
    supports_early_init = False

    def __init__(self, requests: CacheRequests, state: CacheState, index: int) -> None:
        super().__init__()
        self.requests, self.state, self.index = requests, state, index

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Do nothing: the coordinator has allocated everything."""

    def update(
        self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """Mark the new keys ``[B, Hkv, q, D]`` with forward and layer, for the attention function.

        Raises:
            RequestError: no forward of the attached model is open over this cache, or the model
                is about to call another attention function with the keys.
        """
        forward = self.requests.opened(self.state)
        self.requests.attention.check()
        setattr(key_states, MARK, (forward, self.index))
        return key_states, value_states

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.state.seen + query_length, 0

    def get_seq_length(self) -> int:
        return self.state.seen

    def get_max_length(self) -> int:
        return -1

    def get_max_cache_shape(self) -> int:
        """The older name of ``get_max_length``."""
        return -1


class TopkvCache(Cache):
    """The rows of one batch; each is a request of the coordinator.

    Made by ``handle.new_cache()``. Give it to ``generate`` or to the model as
    ``past_key_values``, again for every further turn. ``close`` ends its requests; so does the
    garbage collector when nobody holds the cache any more. Layers that topkv leaves alone are
    stock layers of Transformers, which hold ``stock_bytes`` on the device.
    """

    def __init__(self, requests: CacheRequests, state: CacheState | None = None) -> None:
        self.requests = requests
        if state is None:
            requests.stock.check()
        self.state = state or CacheState(StockLayers(requests.stock))
        ours = count()
        super().__init__(
            layers=[
                TopkvLayer(requests, self.state, next(ours)) if stock is None else stock
                for stock in self.state.stock.layers
            ]
        )
        self._finalizer = weakref.finalize(self, requests.release, self.state)
        self._finalizer.atexit = False

    @property
    def slots(self) -> tuple[int, ...]:
        """Request slots of the rows; empty before the first forward."""
        return tuple(self.state.slots)

    @property
    def batch_size(self) -> int:
        """Rows, -1 before the first forward."""
        return len(self.state.slots) or -1

    @property
    def stock_bytes(self) -> int:
        """Bytes on the device of layers that slide over a window or keep a state."""
        return tensor_bytes(self.state.stock.tensors)

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[Tensor, Tensor]:
        """See ``TopkvLayer.update``, which a compiled layer leaves to ``compiled.attend``."""
        # Had it read its number here, each layer would be compiled by itself.
        if torch.compiler.is_compiling():
            return key_states, value_states
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)

    def check_owner(self, requests: CacheRequests) -> None:
        """Refuse to be used by another model than the one that it was made for."""
        if self.requests is not requests:
            raise RequestError("the TopkvCache belongs to another model; use new_cache() of this")

    def close(self) -> None:
        """End the requests. The cache is then empty and can be used again. Idempotent."""
        self.requests.release(self.state)

    def reset(self) -> None:
        """End the requests, as ``close`` does; Transformers uses this name."""
        self.close()

    def crop(self, tokens_to_remove: int) -> None:
        """Take the newest columns back. A cache that keeps none is closed.

        Args:
            tokens_to_remove: minus the number of columns, as in Transformers.

        Raises:
            TypeError, ValueError: not an integer, or out of range; nothing has changed.
            CapabilityError: a layer of another kind has forgotten what it would need; neither.
        """
        state = self.state
        expected = f"crop expects minus the number of columns to remove, at most {state.seen}"
        try:
            change = operator.index(tokens_to_remove)
        except TypeError:
            raise TypeError(f"{expected}, as an integer, got {tokens_to_remove!r}") from None
        if not -state.seen <= change <= 0:
            raise ValueError(f"{expected}, got {change}")
        self.requests.truncate(state, state.seen + change)

    def fork(self) -> TopkvCache:
        """A second cache with the same tokens; full pages are shared until one is written.

        Raises:
            DeviceMemoryError, HostMemoryError: no room; nothing has changed.
        """
        twin = TopkvCache(self.requests)
        self.requests.fork(self.state, twin.state)
        return twin

    def __deepcopy__(self, memo: dict[int, Any]) -> TopkvCache:
        return self.fork()

    def reorder_cache(self, beam_idx: Tensor) -> None:
        _refuse("reorder_cache", "beams are not supported; leave num_beams at 1")

    def batch_repeat_interleave(self, repeats: int) -> None:
        _refuse("batch_repeat_interleave", "repeat the inputs instead of a filled cache")

    def batch_select_indices(self, indices: Tensor) -> None:
        _refuse("batch_select_indices", "rows of a TopkvCache cannot be taken apart")


def _refuse(call: str, reason: str) -> None:
    raise CapabilityError(f"TopkvCache does not offer {call}", [reason])
