"""The buffers of a group that its layers share: selection, plan, page table and LSE of a step."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.config import LoweredConfig, LoweredGroup
from topkv.kv.step import StepUploader
from topkv.ops.regranulate import regranulate, workspace
from topkv.types import Plan, Tables


class TokenSelection:
    """What the algorithm of a group selects, where that is tokens of the group's larger units.

    Attributes (narrowed to the N lanes of the forward):
        ids: int32 ``[N, K']`` tokens; K' is the algorithm's.
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
        regranulate(
            self.ids, closed, ids, self.extra, self._work, unit=self.group.unit, impl=self.impl
        )

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
        tables: page table and lengths, see ``topkv.types.Tables``.
        lse: fp32 ``[B, 1, H]``.
        packed: ``[B, Hkv, row]`` new rows, where the row format packs them; else None.
        prompts: by slot int32 ``[m, K]``, what the rows of its prompt chunk have selected in the
            layer that selected last; None where they see everything.
    """

    ids: Tensor
    tokens: TokenSelection | None
    limit: Tensor
    plan: Plan
    tables: Tables
    lse: Tensor
    packed: Tensor | None

    def __init__(
        self,
        config: LoweredConfig,
        index: int,
        uploader: StepUploader,
        device: torch.device,
    ) -> None:
        lowered, model, max_batch = config.groups[index], config.model, config.max_requests
        self.group = group = lowered.shape
        self.index, self.uploader, self.step = index, uploader, uploader.step
        self.sparse = group.residency == "sparse"
        self.prompts: dict[int, Tensor | None] = {}
        lanes = max_batch * group.lane_heads
        width = self.step.page_table.shape[1]
        if self.sparse:
            width = group.select + int(lowered.tail == "forced")

        def ints(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.int32, device=device)

        self.tokens = None
        if lowered.regranulated:
            self.tokens = TokenSelection(lowered, max_batch, device, config.impl)
        self._ids = ints(lanes, group.select)
        self._plan = Plan(
            slots=ints(lanes, group.select),
            count=ints(lanes),
            miss_hosts=ints(lanes, group.select),
            miss_slots=ints(lanes, group.select),
            misses=ints(lanes),
        )
        self._table = ints(lanes, width)
        self._lengths = ints(lanes)
        self._lse = torch.zeros((max_batch, 1, model.num_heads), device=device)
        self._packed = None
        if group.dtype is not model.dtype:
            rows = (max_batch, group.num_kv_heads, group.head_dim)
            self._packed = torch.zeros(rows, dtype=group.dtype, device=device)
        self._slots = ints(max_batch)
        self._batch = -1

    def begin(self) -> None:
        """Narrow the buffers to the forward's rows, and point dense layers at their pages."""
        batch = self.step.batch
        if batch != self._batch:
            self._narrow(batch)
        if self.tokens:
            self.tokens.begin(self.step.slots)
        if not self.sparse and batch:
            torch.clamp(self.step.slots, min=0, out=self._slots[:batch])
            table = self.step.page_table
            torch.index_select(table, 0, self._slots[:batch], out=self.tables.table)

    def _narrow(self, batch: int) -> None:
        lanes, plan = batch * self.group.lane_heads, self._plan
        self.ids, self.lse = self._ids[:lanes], self._lse[:batch]
        lengths = self._lengths[:lanes] if self.sparse else self.step.lengths
        self.tables = Tables(self._table[:lanes], lengths)
        self.packed = None if self._packed is None else self._packed[:batch]
        self.limit = self.uploader.limits[self.index]
        self.plan = Plan(
            slots=plan.slots[:lanes],
            count=plan.count[:lanes],
            miss_hosts=plan.miss_hosts[:lanes],
            miss_slots=plan.miss_slots[:lanes],
            misses=plan.misses[:lanes],
        )
        self._batch = batch

    @property
    def selected(self) -> Tensor:
        """int32 ``[N, K']`` ids that ``retrieve_topk`` writes: units, or tokens of larger ones."""
        return self.tokens.ids if self.tokens else self.ids
