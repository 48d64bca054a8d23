"""Small, real plugins for tests of the core: a scripted selection and a gathering backend."""

from __future__ import annotations

from collections.abc import Callable

import torch
from attrs import evolve, frozen
from torch import Tensor

from topkv.entries import Capabilities, PluginEntry
from topkv.hooks.algorithm import AlgorithmSetup, AlgorithmSpec, History, RepresentationSpec
from topkv.hooks.backend import BackendSetup
from topkv.ops.chunk_attention import kept
from topkv.parameters import values
from topkv.plugins.discovery import hookimpl
from topkv.plugins.kinds import registering
from topkv.types import LayerView, Plan, Selection, Tables
from topkv_authoring.latent_fp8 import decode_fp8
from topkv_authoring.page_table import adapt_page_table
from topkv_authoring.selectors import KeepsUnits
from topkv_fp8_host_format.entry import topkv_register_host_formats
from topkv_prefixes.entry import topkv_register_keepers
from topkv_testing.models.oracle import attention
from topkv_testing.models.stage_doubles import KEEP, KEEP_KEYS, RERANK, TO_UNITS
from topkv_testing.models.storage_doubles import SHELF


class Scripted(KeepsUnits):
    """Selects the ids that a test puts into ``next_ids``, whatever they are, else nothing.
    A list has those of each call.

    Its representation is the sum of each unit's keys, so that a test can check whether the
    representation of a unit is that of the keys which are there now. ``turns`` counts the
    settles of each request, to show that state keyed by slot follows a fork.
    """

    def __init__(self, setup: AlgorithmSetup) -> None:
        self.model, self.group, self.params = setup.model, setup.group, setup.params
        self.next_ids: dict[int, Tensor | list[Tensor]] = {}

    def representations(self) -> list[RepresentationSpec]:
        shape = (self.model.num_kv_heads, self.model.head_dim)
        return [RepresentationSpec("sums", "unit", shape, torch.float32)]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"sums": torch.where(valid[:, :, None, None], keys, 0).float().sum(1)}

    @hookimpl
    def spec(self) -> AlgorithmSpec:
        turns = RepresentationSpec("turns", "request", (1,), torch.int64)
        return AlgorithmSpec((*self.representations(), turns), **values(self.params))

    @hookimpl
    def settle(
        self, layer: LayerView, slot: int, since: int, length: int, history: History
    ) -> None:
        layer.pools["turns"][slot] += 1

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, out: Selection
    ) -> Selection:
        chosen = self.next_ids.get(layer.layer)
        if chosen is None:
            out.ids.fill_(-1)
        else:
            out.ids.copy_(chosen.pop(0) if isinstance(chosen, list) else chosen)
        return out


class Gather:
    """Attention by gathering the listed tokens, in float64.

    It remembers options that it was asked for, and does nothing else with them.
    """

    def __init__(self, setup: BackendSetup) -> None:
        self.model, self.options = setup.model, setup.options

    @hookimpl
    def adapt_page_table(self, layer: LayerView, plan: Plan, tables: Tables) -> None:
        adapt_page_table(layer, plan, tables, impl="reference")

    @hookimpl
    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Tables,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        unit, lanes = k.shape[2], tables.table.shape[0]
        each = lanes // max(1, len(q))
        queries, outs, sums = (x.unflatten(2, (each, -1)) for x in (q, out, lse))
        for lane in range(lanes):
            length = int(tables.lengths[lane])
            batch, head = divmod(lane, each)
            used = tables.table[lane, : -(-length // unit)].to(k.device).long()
            asked = slice(0, None if tables.queries is None else int(tables.queries[batch]))
            keys, values = (
                pool[used].transpose(1, 2).flatten(0, 1)[:length].to(q.device) for pool in (k, v)
            )
            if self.model.attention == "mla":
                keys = decode_fp8(keys, torch.float64) if keys.dtype == torch.uint8 else keys
                values = keys[..., : self.model.out_dim]
            asking = queries[batch, asked, head]
            # Each query sees the tokens up to its own, the newest ones of the list in order.
            last = length - len(asking) + torch.arange(len(asking), device=q.device)
            mask = torch.arange(length, device=q.device) <= last[:, None]
            result, log = attention(asking, keys, values, self.model.scale, mask)
            outs[batch, :, head], sums[batch, :, head] = 0, -torch.inf
            outs[batch, asked, head], sums[batch, asked, head] = result.to(out.dtype), log.float()

    @hookimpl
    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int, out: Tensor, lse: Tensor
    ) -> None:
        everything = torch.arange(len(k), device=q.device).int().expand(len(q), -1)
        self.prefill_selected(q, k, v, q_start, k_start, everything, out, lse)

    @hookimpl
    def prefill_selected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        ids: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        rows = q_start + torch.arange(q.shape[0], device=q.device)
        columns = k_start + torch.arange(k.shape[0], device=q.device)
        mask = (columns[None, :] <= rows[:, None]) & kept(ids, len(k))
        result, log = attention(q, k, v, self.model.scale, mask)
        out.copy_(result)
        lse.copy_(log)


@frozen
class ScriptedParams:
    """Parameters, those of ``AlgorithmSpec`` of the same names."""

    settle_period: int | None = None
    settle_whole: bool = False
    generated: int | None = None


SCRIPTED = PluginEntry(
    "scripted",
    "algorithm",
    "topkv_testing.models.doubles:Scripted",
    capabilities=Capabilities(scopes=("kv_head", "shared"), queries=None),
    defaults={"scope": "kv_head"},
    parameters=ScriptedParams,
)

COMPETING = evolve(
    SCRIPTED,
    name="competing",
    capabilities=evolve(SCRIPTED.capabilities, tail="selectable"),
)
"""``SCRIPTED``, but the newest token competes."""

GATHER = PluginEntry(
    "gather",
    "backend",
    "topkv_testing.models.doubles:Gather",
    capabilities=Capabilities(
        scopes=("kv_head", "shared"),
        attention=("gqa", "mla"),
        kv_formats=("model", "fp8"),
        host_memory=True,
        queries=None,
    ),
)


LATENT_FP8 = PluginEntry(
    "fp8",
    "kv_format",
    {
        "reference": "topkv_authoring.latent_fp8:LatentFp8",
        "triton": "topkv_authoring.latent_fp8:LatentFp8Kernels",
    },
    capabilities=Capabilities(attention=("mla",)),
)


class Entries:
    """Registers both doubles and further entries as a package would."""

    def __init__(self, *further: PluginEntry) -> None:
        stages = (KEEP, KEEP_KEYS, RERANK, TO_UNITS)
        self.entries = (SCRIPTED, COMPETING, GATHER, *stages, SHELF, LATENT_FP8, *further)
        self.entries += (*topkv_register_keepers(), *topkv_register_host_formats())
        for kind in {entry.kind for entry in self.entries}:
            offered = [entry for entry in self.entries if entry.kind == kind]
            setattr(self, registering(kind), _offering(offered))


def _offering(entries: list[PluginEntry]) -> Callable[[], list[PluginEntry]]:
    """Make the hook by which a package returns its entries of one kind."""

    @hookimpl
    def offer() -> list[PluginEntry]:
        return entries

    return offer
