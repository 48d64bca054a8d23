"""An exact indexer, the smallest algorithm for models that select for themselves: for tests."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.entries import Capabilities, PluginEntry
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, RepresentationSpec
from topkv.plugins.discovery import hookimpl
from topkv.types import LayerView, Selection
from topkv_authoring.selectors import KeepsUnits, host_ids


def index_scores(q: Tensor, weights: Tensor, k: Tensor) -> Tensor:
    """``sum_j weights[t, j] * relu(q[t, j] . k[s])``, float64 ``[rows, tokens]``.

    Args:
        q: ``[rows, H, D]``.
        weights: ``[rows, H]``.
        k: ``[tokens, D]``.
    """
    products = torch.einsum("thd,sd->ths", q.double(), k.double()).relu()
    return torch.einsum("th,ths->ts", weights.double(), products)


class Indexed(KeepsUnits):
    """Keeps index keys as they are; selects the K best tokens, of equal ones the first."""

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.model, self.group = setup.model, setup.group

    def representations(self) -> list[RepresentationSpec]:
        indexer = self.model.indexer
        shape = (indexer.head_dim if indexer else 0,)
        return [RepresentationSpec("index", "token", shape, torch.float64)]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"index": keys[:, 0, 0].double()}

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        return AlgorithmSpec(tuple(self.representations()))

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        step = layer.step
        out.ids.fill_(-1)
        for batch in range(step.batch):
            slot, length = int(step.slots[batch]), int(step.lengths[batch])
            if slot >= 0 and length and weights is not None:
                self._best(layer, slot, length, q[batch], weights[batch], out.ids[batch])
        return out

    @hookimpl
    def retrieve_prompt(
        self, layer: LayerView, slot: int, start: int, q: Tensor, weights: Tensor, ids: Tensor
    ) -> None:
        ids.fill_(-1)
        for row in range(len(q)):
            one = slice(row, row + 1)
            self._best(layer, slot, start + row + 1, q[one], weights[one], ids[row, 0])

    def _best(
        self, layer: LayerView, slot: int, length: int, q: Tensor, weights: Tensor, ids: Tensor
    ) -> None:
        tokens = torch.arange(length, device=q.device)
        keys = layer.pools["index"][host_ids(layer, slot, tokens)]
        order = index_scores(q, weights, keys)[0].sort(descending=True, stable=True).indices
        best = order[: len(ids)].sort().values
        ids[: len(best)] = best.int()


INDEXED = PluginEntry(
    "indexed",
    "algorithm",
    "topkv_testing.models.indexed:Indexed",
    capabilities=Capabilities(
        units=(1, 1),
        scopes=("shared",),
        attention=("mla",),
        needs_index=True,
        tail="selectable",
        capture=False,
        traits=(
            "attends",
            "nested",
            "scale_free",
            "exact_update",
            "low_ties",
            "incremental",
            "value_free",
        ),
    ),
    defaults={"scope": "shared", "unit": 1},
)
