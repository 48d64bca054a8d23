"""Tensors and shapes that core and plugins hand each other.

Letters: B rows of the padded decode batch, Q most queries of a row, L layers, H q-heads, Hkv
kv-heads, D head dim, N = B * lane_heads lanes, K selected units, C buffer slots, T ring slots.

Three index spaces, never mixed and named apart everywhere:

* a *logical* id is the position of a unit in its sequence,
* a *host* id is its place in the host pool: ``page * units_per_page + unit_in_page``,
* a *slot* id is its place in the device buffer of its lane: ``0 <= slot < C`` for the LRU
  buffer, ``C <= slot < C + T`` for the ring; ``lane row * (C + T) + slot`` is global in a layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from attrs import define, field, frozen
from torch import Tensor

MAX_COLUMNS = 1 << 20
"""Most units of a request that an algorithm can rank, and most scores of a row of a top-k."""


@frozen
class IndexerShape:
    """The indexer of a model that selects for itself: index heads H^I, their dim D^I.

    There is one index key a token, shared by the index heads (DeepSeek-V3.2, section 2.1).

    Attributes:
        num_heads, head_dim: H^I and D^I.
        layers: layers that have an indexer; None for all. The others share the selection of the
            layer before them, and nothing is kept to select for them.
    """

    num_heads: int
    head_dim: int
    layers: tuple[int, ...] | None = None

    def selects_for(self, layer: int) -> bool:
        """Return True if a layer has an indexer of its own."""
        return self.layers is None or layer in self.layers


@frozen
class Index:
    """Index queries, keys and weights of the rows of a forward, from the indexer of a layer.

    The score of token s for row t is ``sum_j weights[t, j] * relu(q[t, j] . k[s])``, in fp32; of
    an indexer without weights each head scores for itself, ``q[t, j] . k[s]``.

    Attributes:
        q: ``[rows, H^I, D^I]`` index queries, after RoPE.
        k: ``[rows, D^I]`` index keys, after norm and RoPE.
        weights: fp32 ``[rows, H^I]``, every scale factor in them, or None.
    """

    q: Tensor
    k: Tensor
    weights: Tensor | None = None

    def rows(self, rows: slice | Tensor) -> Index:
        """The index of some of the rows, by a slice or by their numbers."""
        weights = None if self.weights is None else self.weights[rows]
        return Index(self.q[rows], self.k[rows], weights)


@frozen
class ModelShape:
    """Geometry of the attention layers of a model (all alike).

    With latent attention (``"mla"``) keys and values of a token are one row, ``[latent | rope]``,
    that all heads share: ``num_kv_heads`` is 1, queries are those that were absorbed into the
    latent space, and the value of a token is the first ``value_dim`` elements of its row
    (DeepSeek-V2, section 2.1.2).

    Attributes:
        num_layers: attention layers.
        num_heads: query heads H.
        num_kv_heads: kv-heads Hkv; H is a multiple of it.
        head_dim: D, of queries and keys.
        dtype: dtype of keys and values as the model makes them.
        scale: factor of the attention logits, ``D ** -0.5`` as a rule.
        attention: ``"gqa"`` or ``"mla"``.
        value_dim: of values and outputs; None for D.
        indexer: of a model that selects for itself, else None.
        softcap: attention logits s become ``softcap * tanh(s / softcap)``; None for plain ones.
        first_layer: number of the first one, where a process holds only a part of the model.
            Layer numbers are the model's everywhere.
        total_layers: layers of the whole model, by which a configuration counts; None where the
            last one here is the model's last.
    """

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scale: float
    attention: str = "gqa"
    value_dim: int | None = None
    indexer: IndexerShape | None = None
    softcap: float | None = None
    first_layer: int = 0
    total_layers: int | None = None

    @property
    def layers(self) -> range:
        """Numbers of the attention layers that are here."""
        return range(self.first_layer, self.first_layer + self.num_layers)

    @property
    def out_dim(self) -> int:
        """Elements of a head's output."""
        return self.value_dim or self.head_dim

    @property
    def group_size(self) -> int:
        """Query heads per kv-head."""
        return self.num_heads // self.num_kv_heads


@frozen
class GroupShape:
    """The layers with equal unit, scope, token format, algorithm and parameters.

    Dense layers form groups too: there ``unit == page_tokens``, one lane per request, and no
    LRU buffer or ring.

    Attributes:
        layers: model layer numbers, ascending.
        unit: tokens per unit.
        lane_heads: lanes per request: Hkv when each kv-head selects for itself, else 1.
        heads_per_lane: kv-heads in one entry: Hkv / lane_heads.
        head_dim: stored elements of a token: D, or bytes where the token format packs them.
        dtype: of stored rows: that of keys and values, or uint8.
        page_tokens: tokens per page, a multiple of ``unit``.
        max_requests: request slots.
        max_units: units that one request can reach.
        select: K, width of a selection in units.
        buffer_slots: C.
        ring_slots: T.
        residency: ``"sparse"``; of dense layers ``"resident"`` on the device, or ``"streamed"``
            from mapped host memory.
        planes: 2, keys and values, or 1, rows that are both.
        coded_bytes: of one entry in the host pool where a host format codes it there
            (``topkv.hooks.host_format``); 0 where it is as on the device.
    """

    layers: tuple[int, ...]
    unit: int
    lane_heads: int
    heads_per_lane: int
    head_dim: int
    dtype: torch.dtype
    page_tokens: int
    max_requests: int
    max_units: int
    select: int
    buffer_slots: int
    ring_slots: int
    residency: str = "sparse"
    planes: int = 2
    coded_bytes: int = 0

    @property
    def num_kv_heads(self) -> int:
        return self.lane_heads * self.heads_per_lane

    @property
    def max_lanes(self) -> int:
        """Lanes of all request slots; the row of a lane is ``slot * lane_heads + head``."""
        return self.max_requests * self.lane_heads

    @property
    def slots(self) -> int:
        """Device slots per lane, LRU buffer and ring together."""
        return self.buffer_slots + self.ring_slots

    @property
    def units_per_page(self) -> int:
        return self.page_tokens // self.unit

    @property
    def entry_shape(self) -> tuple[int, int, int, int]:
        """``[heads_per_lane, planes, unit, head_dim]``, on the host too if not coded there."""
        return (self.heads_per_lane, self.planes, self.unit, self.head_dim)

    @property
    def entry_bytes(self) -> int:
        """Bytes of one entry on the device."""
        heads, planes, unit, dim = self.entry_shape
        return heads * planes * unit * dim * self.dtype.itemsize

    @property
    def host_entry_bytes(self) -> int:
        """Bytes of one entry in the host pool."""
        return self.coded_bytes or self.entry_bytes


@define
class StepTensors:
    """Slots, lengths and pages of a step, the same for all layers. int32, on the device, at fixed
    addresses, uploaded by ``forward_begin`` and owned by the core.

    The tensors are narrowed to the B decode rows of the current forward. A padded row has
    slot -1 and length 0.

    Attributes:
        slots: ``[B]`` request slot of each row.
        lengths: ``[B]`` tokens of the request, those appended in this step included.
        high: ``[B]`` the largest length that the ring has seen. Units
            ``max(0, (high - 1) // unit - T + 1) .. (length - 1) // unit`` are in the ring.
        appended: ``[B]`` tokens that the row appends in this step, 0 to Q: those at positions
            ``lengths - appended ..``. A row has ``max(appended, 1)`` queries, of its newest
            positions in order; those behind them are padding, of any bits.
        resident: ``[B]`` 1 where LRU slot u holds unit u for every closed unit below
            C, as long as ``(high - 1) // unit <= C``.
        page_table: ``[max_requests, max_pages]`` host page of each page of a request; 0,
            a page that is never leased, where there is none.
    """

    slots: Tensor
    lengths: Tensor
    high: Tensor
    appended: Tensor
    resident: Tensor
    page_table: Tensor

    @property
    def batch(self) -> int:
        return self.slots.shape[0]


@define
class LayerView:
    """Everything that a hook may see of one layer, at fixed addresses.

    Attributes:
        layer: model layer number.
        index: position of the layer in its group.
        group: its group.
        step: the step tensors.
        ring_k, ring_v: ``[max_requests, lane_heads, T, heads_per_lane, unit, D]`` strided
            views of the ring; unit u of a lane is at ring position ``u % T``. Read only. The
            same rows, as they are stored, where a group has one plane. Of 0 positions where
            a stage regrains: the ring has other units than the algorithm selects.
        pools: representation pools of this layer by name (``RepresentationSpec``): grain unit
            ``[num_host_units, *shape]`` indexed by host id, grain token
            ``[num_host_units * unit, *shape]``, grain request ``[max_requests, *shape]``
            indexed by slot.
        held: int32 ``[max_requests * lane_heads, stored units]`` LRU slot of each stored unit,
            -1 where absent. Read only; ``topkv_authoring.sticky`` adds those that are in the ring.
    """

    layer: int
    index: int
    group: GroupShape
    step: StepTensors
    ring_k: Tensor
    ring_v: Tensor
    pools: Mapping[str, Tensor] = field(factory=dict)
    held: Tensor = field(factory=lambda: torch.empty((0, 0), dtype=torch.int32))


@define
class Selection:
    """Units that each lane attends to, and what they are worth where somebody reads that.

    Attributes:
        ids: int32 ``[N, K]`` logical units, unique in a row, -1 anywhere, all -1 in padded rows.
            Lane ``b * lane_heads + head``.
        scores: fp32 ``[N, K]``, in the algorithm's own scale: of two units of a row the one of
            the higher score is worth more. +inf for forced units, -inf where the id is -1. None
            where nobody reads them.
    """

    ids: Tensor
    scores: Tensor | None = None


@define
class Plan:
    """Result of one ``plan``. Owned by the core, and reused: a group has one for each layer whose
    loads are on their way at once.

    Attributes:
        slots: int32 ``[N, K]`` slot ids of the distinct valid units in selection order,
            compacted to the left, -1 behind ``count``.
        count: int32 ``[N]``.
        miss_hosts: int32 ``[N, K]`` host ids that ``load`` has to fetch, -1 behind ``misses``.
        miss_slots: int32 ``[N, K]`` the slots that they go to, -1 behind ``misses``.
        misses: int32 ``[N]``.
    """

    slots: Tensor
    count: Tensor
    miss_hosts: Tensor
    miss_slots: Tensor
    misses: Tensor


def newest_units(queries: int, unit: int) -> int:
    """Count the units of ``unit`` tokens that the newest ``queries`` tokens can be in, at most."""
    return 1 - (1 - queries) // unit


@define
class Tables:
    """Page table and lengths of a step. Owned by the core, one per group, reused by its layers.

    Attributes:
        table: int32 ``[N, W]``; all pages of a request in dense layers. Else K columns, and one
            for each unit that the newest tokens of a row can be in: 1 where Q is 1, none where
            the newest token competes then, and ``1 + ceil((Q - 1) / unit)`` of several queries.
        lengths: int32 ``[N]`` attended tokens.
        queries: int32 ``[B]`` queries of each row, 1 to Q; None where Q is 1. Of a row's list of
            ``lengths[n]`` tokens its query i sees all but the newest ``queries - 1 - i``.
        attached: an object that ``adapt_page_table`` leaves for ``attend`` to read; None in dense
            layers, whose table the core fills.
    """

    table: Tensor
    lengths: Tensor
    attached: Any = None
    queries: Tensor | None = None
