"""The buffers of a group that its layers share: selection, plan, page table and LSE of a step."""

from __future__ import annotations

import torch
from attrs import astuple
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.decode.streams import SideStream
from topkv.kv.step import StepRows
from topkv.ops.chunk_attention import Chosen
from topkv.types import Plan, Selection, Tables, newest_units


class LaneBuffers:
    """Selection, plan, page table and LSE of one group, shared by its layers.

    Args:
        config: sizes.
        index: number of the group.
        rows: the step tensors of the queries that are served.
        queries: most of them that a row has.
        device: where the buffers are.

    Attributes (narrowed to the B rows of the forward and their Q queries, N = B * lane_heads):
        queries: Q, the most queries of a row.
        room: memory for a selection.
        selection: of the layer that selected last.
        limit: int32 ``[B]`` selectable units.
        plans: of the layers whose loads are on their way at once: a layer that selects for
            itself has one, and so has each that shares with it.
        side: the stream that loads ahead, see ``topkv.decode.loads``.
        tables: page table and lengths, see ``topkv.types.Tables``.
        lse: fp32 ``[B, Q, H]``.
        packed: of each plane ``[B * Q, Hkv, dim]`` new tokens, where the KV format packs or rounds
            them; else None.
        singles: buffers of query 0, 1, .. of each row alone, where each selects for itself.
        prompts: by slot the selection of its prompt chunk's rows, from the layer that selected
            last; None where they attend to all.
    """

    def __init__(
        self, config: LoweredConfig, index: int, rows: StepRows, queries: int, device: torch.device
    ) -> None:
        lowered, model, max_batch = config.groups[index], config.model, config.max_requests
        self.group = group = lowered.shape
        self.index, self.rows, self.step = index, rows, rows.step
        self.sparse = group.residency == "sparse"
        self.prompts: dict[int, Chosen | None] = {}
        self.heads, self.forced = model.num_heads, lowered.tail == "forced"
        lanes, most = max_batch * group.lane_heads, max_batch * queries

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        units = (lanes, group.select)
        self._ids, self.side = ints(*units), SideStream(device)
        self._plans = [
            Plan(ints(*units), ints(lanes), ints(*units), ints(*units), ints(lanes))
            for _ in range(max(map(len, lowered.turns), default=0))
        ]
        self._table = ints(lanes * self._width(queries))
        self._lengths = ints(lanes)
        self._lse = torch.zeros(most * self.heads, dtype=torch.float32, device=device)
        self._packed: Tensor | None = None
        if group.dtype is not model.dtype or group.coded_bytes:
            shape = (group.planes, most, group.num_kv_heads, group.head_dim)
            self._packed = torch.zeros(shape, dtype=group.dtype, device=device)
        self._batch, self.queries = -1, 1
        self.singles: list[LaneBuffers] = []

    def _width(self, queries: int) -> int:
        """Columns of the page table, see ``topkv.types.Tables``."""
        if not self.sparse:
            return self.step.page_table.shape[1]
        behind = newest_units(queries, self.group.unit) if self.forced or queries > 1 else 0
        return self.group.select + behind

    def begin(self, queries: int) -> None:
        """Narrow the buffers to the forward's rows, and point dense layers at their pages."""
        batch = self.step.batch
        if (batch, queries) != (self._batch, self.queries):
            self._narrow(batch, queries)
        if not self.sparse and batch:
            rows, table = self.rows.table_rows, self.step.page_table
            torch.index_select(table, 0, rows, out=self.tables.table)
        if queries > 1:
            for each in self.singles[:queries]:
                each.begin(1)

    def _narrow(self, batch: int, queries: int) -> None:
        lanes, rows, width = batch * self.group.lane_heads, batch * queries, self._width(queries)
        self.room = self.selection = Selection(self._ids[:lanes])
        self.lse = self._lse[: rows * self.heads].view(batch, queries, self.heads)
        lengths = self._lengths[:lanes] if self.sparse else self.step.lengths
        own = self.rows.queries if queries > 1 else None
        table = self._table[: lanes * width].view(lanes, width)
        self.tables = Tables(table, lengths, queries=own)
        self.packed = None if self._packed is None else self._packed[:, :rows].unbind()
        self.limit = self.rows.limits[self.index]
        self.plans = [
            Plan(*(each[:lanes] for each in astuple(plan, recurse=False))) for plan in self._plans
        ]
        self._batch, self.queries = batch, queries
