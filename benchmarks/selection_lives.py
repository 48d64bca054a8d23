"""Lives of three requests in a coordinator of any hook API from 2 on, for ``same_selections.py``.

The requests differ in length. Their prompts come in chunks beside decode rows; tokens are taken
back, one request is cut, one ends, and one is forked.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

PROMPTS = {"reference": (37, 96, 203), "triton": (7, 18, 41)}
STEPS = {"reference": 42, "triton": 8}
CHUNK = 48


class Feed:
    """Rows of a model's layers, one after the other from one seed, alike in every checkout."""

    def __init__(self, data: str, model: Any) -> None:
        self.data, self.model, self.random = data, model, torch.Generator().manual_seed(7)
        self.few = self.draw(6, 1, model.head_dim)

    def draw(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.random)

    def keys(self, rows: int, heads: int, dim: int) -> Tensor:
        drawn = self.draw(rows, heads, dim)
        if self.data in ("equal", "few"):
            which = (drawn[:, 0, 0] * 97).long() % (1 if self.data == "equal" else 6)
            return self.few[which, :, :dim].expand(rows, heads, dim)
        if self.data == "mixed":
            return torch.where(drawn[:, :1, :1] > 0, drawn, self.few[:1, :, :dim])
        if self.data == "zeros":
            return torch.where(drawn > 1.5, drawn, 0.0)
        if self.data == "channels":
            drawn[..., [1, 1 + dim // 2]] *= 40
        return drawn * {"large": 1e4, "huge": 1e15, "tiny": 1e-40}.get(self.data, 1.0)

    def rows(self, rows: int) -> dict[str, Any]:
        """Arguments of ``attention`` for the rows of a forward in one layer."""
        from topkv.types import Index

        model = self.model
        k = self.keys(rows, model.num_kv_heads, model.head_dim).to(model.dtype)
        q = self.draw(rows, model.num_heads, model.head_dim).to(model.dtype)
        v = k if model.attention == "mla" else self.draw(*k.shape).to(model.dtype)
        if model.indexer is None:
            return {"q": q, "k": k, "v": v}
        heads, dim = model.indexer.num_heads, model.indexer.head_dim
        weights = self.draw(rows, heads) if model.attention == "mla" else None
        index_k = self.keys(rows, 1, dim)[:, 0].to(model.dtype)
        index = Index(self.draw(rows, heads, dim).to(model.dtype), index_k, weights)
        return {"q": q, "k": k, "v": v, "index": index}


class Life:
    """The requests of one case; ``kept`` is everything that came out, by number and name."""

    def __init__(self, coordinator: Any, feed: Feed, impl: str) -> None:
        self.coordinator, self.feed, self.steps = coordinator, feed, STEPS[impl]
        self.kept: dict[str, np.ndarray] = {}
        self.left = {coordinator.request_begin(): tokens for tokens in PROMPTS[impl]}
        for path in coordinator.layers:
            if path.selector:
                for call in ("select", "warm", "select_prompt"):
                    self.watch(path.selector, call)

    def keep(self, name: str, found: Tensor) -> None:
        kept = found.float() if found.is_floating_point() else found
        self.kept[f"{len(self.kept):05d} {name}"] = kept.cpu().numpy().copy()

    def watch(self, selector: Any, call: str) -> None:
        """Keep what a selector selects: what it returns, or before hook API 3 leaves behind."""
        original = getattr(selector, call)

        def watched(*given: Any) -> Any:
            found = original(*given)
            if call == "select_prompt":
                if found is not None:
                    self.keep(f"{call} {selector.view.layer}", found.ids.flatten(0, 1))
            else:
                ids = selector.lanes.ids if found is None else found.ids
                self.keep(f"{call} {selector.view.layer}", ids)
            return found

        setattr(selector, call, watched)

    def forward(self) -> None:
        """Decode a token of each request whose prompt is over, beside a chunk of the others."""
        left, coordinator = self.left, self.coordinator
        decode = [slot for slot, tokens in left.items() if not tokens]
        chunks = [(slot, min(tokens, CHUNK)) for slot, tokens in left.items() if tokens]
        rows = len(decode) + sum(tokens for _, tokens in chunks)
        coordinator.forward_begin(decode, chunks)
        for path in coordinator.layers:
            layer = path.view.layer
            self.keep(f"out {layer}", coordinator.attention(layer, **self.feed.rows(rows)))
            if decode:
                self.keep(f"lse {layer}", path.lanes.lse)
        coordinator.forward_end()
        left.update({slot: left[slot] - tokens for slot, tokens in chunks})

    def run(self) -> None:
        """Lead three requests through all that may happen to them."""
        coordinator, left = self.coordinator, self.left
        while any(left.values()):
            self.forward()
        for step in range(self.steps):
            first, second, third = left
            self.forward()
            if step % 5 == 4:
                self.try_to("rollback", third, coordinator.length(third) - 2)
            if step == self.steps // 3:
                cut = min(31, coordinator.length(second) // 2)
                if self.try_to("truncate", second, cut):
                    left[second] = 9
            if step in (self.steps // 2, self.steps * 3 // 4):
                coordinator.request_end(first)
                del left[first]
                forked = self.try_to("fork", third) if step > self.steps // 2 else None
                left[coordinator.request_begin() if forked is None else forked] = (
                    5 if step > self.steps // 2 else 33
                )

    def try_to(self, call: str, *given: Any) -> Any:
        """Call what some algorithms refuse, and keep that they do."""
        from topkv.errors import TopkvError

        try:
            found = getattr(self.coordinator, call)(*given)
        except TopkvError:
            self.keep(f"{call} refused", torch.ones(1))
            return None
        return True if found is None else found
