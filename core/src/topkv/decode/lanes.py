"""The buffers of a group that its layers share: selection, plan, page table and LSE of a step."""

from __future__ import annotations

import torch
from attrs import astuple
from torch import Tensor

from topkv.config import LoweredConfig
from topkv.decode.streams import SideStream
from topkv.kv.step import StepUploader
from topkv.ops.chunk_attention import Chosen
from topkv.types import Plan, Selection, Tables


class LaneBuffers:
    """Selection, plan, page table and LSE of one group, shared by its layers.

    Attributes (narrowed to the B rows of the forward, N = B * lane_heads):
        room: memory for a selection.
        selection: of the layer that selected last.
        limit: int32 ``[B]`` selectable units.
        plans: of the layers whose loads are on their way at once: a layer that selects for
            itself has one, and so has each that shares with it.
        side: the stream that loads ahead, see ``topkv.decode.loads``.
        tables: page table and lengths, see ``topkv.types.Tables``.
        lse: fp32 ``[B, 1, H]``.
        packed: of each plane ``[B, Hkv, dim]`` new tokens, where the KV format packs or rounds
            them; else None.
        prompts: by slot the selection of its prompt chunk's rows, from the layer that selected
            last; None where they attend to all.
    """

    def __init__(
        self, config: LoweredConfig, index: int, uploader: StepUploader, device: torch.device
    ) -> None:
        lowered, model, max_batch = config.groups[index], config.model, config.max_requests
        self.group = group = lowered.shape
        self.index, self.uploader, self.step = index, uploader, uploader.step
        self.sparse = group.residency == "sparse"
        self.prompts: dict[int, Chosen | None] = {}
        lanes = max_batch * group.lane_heads
        width = self.step.page_table.shape[1]
        if self.sparse:
            width = group.select + int(lowered.tail == "forced")

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        units = (lanes, group.select)
        self._ids, self.side = ints(*units), SideStream(device)
        self._plans = [
            Plan(ints(*units), ints(lanes), ints(*units), ints(*units), ints(lanes))
            for _ in range(max(map(len, lowered.turns), default=0))
        ]
        self._table = ints(lanes, width)
        self._lengths = ints(lanes)
        lse = (max_batch, 1, model.num_heads)
        self._lse = torch.zeros(lse, dtype=torch.float32, device=device)
        self._packed: Tensor | None = None
        if group.dtype is not model.dtype or group.coded_bytes:
            rows = (group.planes, max_batch, group.num_kv_heads, group.head_dim)
            self._packed = torch.zeros(rows, dtype=group.dtype, device=device)
        self._batch = -1

    def begin(self) -> None:
        """Narrow the buffers to the forward's rows, and point dense layers at their pages."""
        batch = self.step.batch
        if batch != self._batch:
            self._narrow(batch)
        if not self.sparse and batch:
            rows, table = self.uploader.table_rows, self.step.page_table
            torch.index_select(table, 0, rows, out=self.tables.table)

    def _narrow(self, batch: int) -> None:
        lanes = batch * self.group.lane_heads
        self.room = self.selection = Selection(self._ids[:lanes])
        self.lse = self._lse[:batch]
        lengths = self._lengths[:lanes] if self.sparse else self.step.lengths
        self.tables = Tables(self._table[:lanes], lengths)
        self.packed = None if self._packed is None else self._packed[:, :batch].unbind()
        self.limit = self.uploader.limits[self.index]
        self.plans = [
            Plan(*(each[:lanes] for each in astuple(plan, recurse=False))) for plan in self._plans
        ]
        self._batch = batch
