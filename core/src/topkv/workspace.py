"""What a forward works on: the buffers of a group, the path of a layer, the chunks of prompts."""

from __future__ import annotations

from typing import Any

import torch
from attrs import define, frozen
from torch import Tensor

from topkv.config import LoweredGroup
from topkv.config.layers import show_ranges
from topkv.errors import RequestError
from topkv.kv.rows import RowFormat
from topkv.kv.step import StepUploader
from topkv.ops.regranulate import regranulate, workspace
from topkv.types import GroupShape, Index, LayerView, ModelShape, Plan, StepTensors


class TokenSelection:
    """What the algorithm of a group selects, where that is tokens of the group's larger units.

    Attributes (narrowed to the N lanes of the forward):
        ids: int32 ``[N, K]`` tokens; K is the algorithm's.
        extra: int64 ``[N]`` tokens that are attended beyond them, in closed units.
        rows: int64 ``[N]`` rows of the lanes; 0 in padded ones, which have no extra tokens.
    """

    ids: Tensor
    extra: Tensor
    rows: Tensor

    def __init__(
        self, lowered: LoweredGroup, max_batch: int, device: torch.device, impl: str
    ) -> None:
        self.group, self.impl = lowered.shape, impl
        group, select = lowered.shape, lowered.seen.select
        lanes = max_batch * group.lane_heads
        self._ids = torch.zeros((lanes, select), dtype=torch.int32, device=device)
        self._extra = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._rows = torch.zeros(lanes, dtype=torch.int64, device=device)
        self._heads = torch.arange(group.lane_heads, device=device)
        self._work = workspace(lanes, group.max_units, device)

    def begin(self, slots: Tensor) -> None:
        """Narrow to the rows of the forward, int32 ``[B]``, and find theirs in the store."""
        heads = self.group.lane_heads
        lanes = len(slots) * heads
        self.ids, self.extra = self._ids[:lanes], self._extra[:lanes]
        self.rows = self._rows[:lanes]
        first = slots.clamp(min=0)[:, None] * heads
        torch.add(first, self._heads, out=self.rows.view(-1, heads))

    def regranulate(self, closed: Tensor, ids: Tensor) -> None:
        """List the units that hold what was selected. Hot.

        Args:
            closed: int32 ``[B]`` closed units.
            ids: int32 ``[N, K]`` of the group's K.
        """
        out = (ids, self.extra, self._work)
        regranulate(self.ids, closed, *out, unit=self.group.unit, impl=self.impl)

    def count(self, extra: Tensor) -> None:
        """Add the extra tokens of a layer that attends to this selection to its counts. Hot.

        Args:
            extra: int64 ``[R]``.
        """
        extra.index_add_(0, self.rows, self.extra)


class LaneBuffers:
    """Selection, plan, page table and LSE of one group, shared by its layers.

    Attributes (narrowed to the B rows of the forward, N = B * lane_heads):
        ids: int32 ``[N, K]`` the selected units.
        tokens: what the algorithm selects instead, where selections are regranulated; else None.
        limit: int32 ``[B]`` selectable units.
        plan: see ``topkv.types.Plan``.
        table: int32 ``[N, W]``; K + 1 columns where the core appends the tail, all pages
            of a request in dense layers.
        lengths: int32 ``[N]`` attended tokens.
        lse: fp32 ``[N, 1, heads_per_lane * G]``.
        packed: ``[B, Hkv, row]`` new rows, where the row format packs them; else None.
        chosen: a layer of this forward has written ``ids``.
    """

    ids: Tensor
    tokens: TokenSelection | None
    limit: Tensor
    plan: Plan
    table: Tensor
    lengths: Tensor
    lse: Tensor
    packed: Tensor | None
    chosen: bool = False

    def __init__(
        self,
        model: ModelShape,
        group: GroupShape,
        step: StepTensors,
        max_batch: int,
        device: torch.device,
        index: int,
        tail: bool,
        tokens: TokenSelection | None = None,
    ) -> None:
        self.group = group
        self.tokens = tokens
        self.step = step
        self.index = index
        self.sparse = group.residency == "sparse"
        lanes = max_batch * group.lane_heads
        width = group.select + int(tail) if self.sparse else step.page_table.shape[1]

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self._ids = ints(lanes, group.select)
        self._plan = Plan(
            ints(lanes, group.select),
            ints(lanes),
            ints(lanes, group.select),
            ints(lanes, group.select),
            ints(lanes),
        )
        self._table = ints(lanes, width)
        self._lengths = ints(lanes)
        heads = group.heads_per_lane * model.group_size
        self._lse = torch.zeros((lanes, 1, heads), dtype=torch.float32, device=device)
        self._packed = None
        if group.dtype is not model.dtype:
            rows = (max_batch, group.num_kv_heads, group.head_dim)
            self._packed = torch.zeros(rows, dtype=group.dtype, device=device)
        self._rows = torch.zeros(max_batch, dtype=torch.int32, device=device)
        self._batch = -1

    def begin(self, uploader: StepUploader) -> None:
        """Narrow the buffers to the forward's rows, and point dense layers at their pages."""
        self.chosen = False
        batch = self.step.batch
        if batch != self._batch:
            self._narrow(batch, uploader)
        if self.tokens:
            self.tokens.begin(self.step.slots)
        if not self.sparse and batch:
            torch.clamp(self.step.slots, min=0, out=self._rows[:batch])
            torch.index_select(self.step.page_table, 0, self._rows[:batch], out=self.table)

    def _narrow(self, batch: int, uploader: StepUploader) -> None:
        lanes = batch * self.group.lane_heads
        self.ids, self.table, self.lse = self._ids[:lanes], self._table[:lanes], self._lse[:lanes]
        self.lengths = self._lengths[:lanes] if self.sparse else self.step.lengths
        self.packed = None if self._packed is None else self._packed[:batch]
        self.limit = uploader.limits[self.index]
        plan = self._plan
        self.plan = Plan(
            plan.slots[:lanes],
            plan.count[:lanes],
            plan.miss_hosts[:lanes],
            plan.miss_slots[:lanes],
            plan.misses[:lanes],
        )
        self._batch = batch

    @property
    def selected(self) -> Tensor:
        """Where the algorithm writes."""
        return self.tokens.ids if self.tokens else self.ids

    def by_lane(self, rows: Tensor) -> Tensor:
        """``[B, H, D]`` as ``[N, 1, heads_per_lane * G, D]``: a view of contiguous rows."""
        batch, heads, dim = rows.shape
        return rows.view(batch * self.group.lane_heads, 1, heads // self.group.lane_heads, dim)


@frozen
class Chunk:
    """One prefill chunk of a forward; ``rows`` are its rows in the packed batch."""

    slot: int
    start: int
    rows: slice


@define
class LayerPath:
    """Everything that one layer's decode calls, bound once when the coordinator is made.

    Attributes:
        view: what transfer and backend see of the layer.
        seen: what the algorithm sees of it: ``view``, or tokens of its units where selections
            are regranulated.
        rows: how keys and values are stored.
        indexed: the algorithm goes by the model's own indexer.
        selects: the layer can select for itself; False where the model has an indexer and the
            layer has none, so that nothing is kept for it.
        extra: int64 ``[R]`` see ``GroupStore.extra``.
    """

    view: LayerView
    seen: LayerView
    algorithm: Any
    transfer: Any
    backend: Any
    lanes: LaneBuffers
    rows: RowFormat
    indexed: bool
    selects: bool
    extra: Tensor
    k_slots: Tensor
    v_slots: Tensor

    @property
    def selects_prompts(self) -> bool:
        """Whether prompt chunks attend to a selection too."""
        return getattr(self.algorithm, "retrieve_prompt", None) is not None

    def asked(
        self, q: Tensor, k: Tensor, index: Index | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Queries ``[B, H, D]``, keys ``[B, Hkv, D]`` and weights that the algorithm is given."""
        if not self.indexed or index is None:
            return q, k, None
        return index.q, index.k.unsqueeze(1), index.weights

    def shares(self, index: Index | None) -> bool:
        """Whether the layer goes by the selection of the one before it.

        Raises:
            RequestError: it was given an index, and the model has none for it.
        """
        if not self.selects and index is not None:
            raise RequestError(
                f"layer {self.view.layer} was given an index, and the model's indexer leaves it "
                "out; add the layer to IndexerShape.layers, or pass None"
            )
        return self.indexed and index is None

    def nothing_to_share(self) -> RequestError:
        """The layer has no index, and no layer before it has selected for its group."""
        return RequestError(
            f"layer {self.view.layer} was given no index, and no layer before it has selected in "
            f"this forward for its group (layers {show_ranges(self.view.group.layers)}); hand "
            "over its index, or put it into the group of the layer whose selection it shares"
        )
