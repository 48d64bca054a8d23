"""Launches of the transfer kernels: grids, strides and block sizes. No tensor is made here."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from topkv.kv.store import GroupStore
from topkv.ops import early
from topkv.transfer import kernels, token_kernels
from topkv.transfer.reference import fits, ring_low
from topkv.types import LayerView, Plan, StepTensors

COPY_PROGRAMS = 256
"""Programs that share the misses of one layer-step."""

COPY_BLOCK = 256
"""16-byte words per program and iteration."""

TOKEN_BLOCK = 64
"""Tokens per program of the prefill kernels."""


class Launcher:
    """The kernels of one group, with every constant worked out once."""

    def __init__(self, store: GroupStore, eviction: Any) -> None:
        group, layout = store.group, store.layout
        self.store = store
        self.group = group
        self.new_position = eviction.new_position_kernel
        self.words = group.entry_bytes // 16
        size = group.dtype.itemsize
        self.pool_words = store.pool.view(torch.int32)
        self.pool_elements = store.pool[: store.pool.numel() // size * size].view(group.dtype)
        self.buffer_words = store.buffer.view(torch.int32)
        self.word_strides = [
            stride // 16
            for stride in (
                layout.page_stride,
                layout.layer_stride,
                layout.head_stride,
                layout.unit_stride,
            )
        ]
        self.element_strides = [
            stride // size
            for stride in (layout.page_stride, layout.head_stride, layout.unit_stride)
        ]
        count = range(len(group.layers))
        # Views of one layer, made once: making one costs as much as a launch.
        self.maps = [
            (store.unit_slot[i], store.slot_unit[i], store.order[i], store.counters[i])
            for i in count
        ]
        self.buffers = [store.buffer[i] for i in count]
        self.buffer_layer_words = [buffer.view(torch.int32) for buffer in self.buffers]
        self.host_words = [self._from_layer(self.pool_words, i, 4) for i in count]
        self.host_elements = [self._from_layer(self.pool_elements, i, size) for i in count]
        self.block_k = max(16, triton.next_power_of_2(max(group.select, 1)))
        self.block_c = max(16, triton.next_power_of_2(max(group.buffer_slots, 1)))
        self.plan_warps = 4 if self.block_c <= 1024 else 8 if self.block_c <= 8192 else 32
        self.block_d = triton.next_power_of_2(group.head_dim)
        # The copy's programs start while the plan still runs: one launch latency less a step.
        # Triton's interpreter runs one program after the other.
        self.copy_programs = COPY_PROGRAMS if store.buffer.device.type == "cuda" else 4
        self.pdl = early.available(store.buffer.device)
        self.geometry = {
            "HEADS_PER_LANE": group.heads_per_lane,
            "PLANES": group.planes,
            "UNIT": group.unit,
            "UNITS_PER_PAGE": group.units_per_page,
            "D": group.head_dim,
            "BLOCK_D": self.block_d,
        }

    def _from_layer(self, pool: Tensor, index: int, size: int) -> Tensor:
        layout = self.store.layout
        return pool[(layout.base + index * layout.layer_stride) // size :]

    def append(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        group, step = self.group, layer.step
        ring = group.residency == "sparse"
        target = self.buffers[layer.index] if ring else self.host_elements[layer.index]
        token_kernels.append_kernel[(step.batch, group.num_kv_heads)](
            k,
            v,
            target,
            step.page_table,
            step.slots,
            step.lengths,
            step.appended,
            *k.stride()[:2],
            *v.stride()[:2],
            *self.element_strides,
            step.page_table.shape[1],
            RING=ring,
            LANE_HEADS=group.lane_heads,
            C=group.buffer_slots,
            T=max(group.ring_slots, 1),
            num_warps=1,
            **self.geometry,
        )

    def plan(self, layer: LayerView, ids: Tensor, limit: Tensor, out: Plan) -> None:
        group, step = self.group, layer.step
        unit_slot, slot_unit, order, counters = self.maps[layer.index]
        kernels.plan_kernel[(step.batch * group.lane_heads,)](
            ids,
            limit,
            step.slots,
            step.high,
            step.resident,
            step.page_table,
            unit_slot,
            slot_unit,
            order,
            self.store.stamp,
            counters,
            out.slots,
            out.count,
            out.miss_hosts,
            out.miss_slots,
            out.misses,
            step.page_table.shape[1],
            group.max_units,
            NEW_POSITION=self.new_position,
            LANE_HEADS=group.lane_heads,
            UNIT=group.unit,
            UNITS_PER_PAGE=group.units_per_page,
            K=group.select,
            C=group.buffer_slots,
            T=group.ring_slots,
            BLOCK_K=self.block_k,
            BLOCK_C=self.block_c,
            PDL=self.pdl,
            num_warps=self.plan_warps,
            **early.options(self.pdl),
        )

    def load(self, layer: LayerView, plan: Plan) -> None:
        group, step = self.group, layer.step
        lanes = step.batch * group.lane_heads
        s_page, _, s_head, s_unit = self.word_strides
        kernels.load_kernel[(lanes, max(1, self.copy_programs // lanes))](
            self.host_words[layer.index],
            self.buffer_layer_words[layer.index],
            step.slots,
            plan.miss_hosts,
            plan.miss_slots,
            plan.misses,
            s_page,
            s_head,
            s_unit,
            LANE_HEADS=group.lane_heads,
            UNITS_PER_PAGE=group.units_per_page,
            K=group.select,
            SLOTS=group.slots,
            WORDS=self.words,
            BLOCK=COPY_BLOCK,
            PDL=self.pdl,
            num_warps=8,
            **early.options(self.pdl),
        )

    def offload(self, step: StepTensors) -> None:
        self._offload(step, force=False)

    def flush(self, slot: int, length: int, high: int, resident: bool, page_table: Tensor) -> None:
        """``offload`` of the open unit of one request. Cold: it uploads a step of one row."""
        rows = torch.tensor([[slot], [length], [high], [1], [resident]], dtype=torch.int32)
        slots, lengths, highs, appended, residents = rows.to(page_table.device)
        self._offload(
            StepTensors(slots, lengths, highs, appended, residents, page_table), force=True
        )

    def _offload(self, step: StepTensors, force: bool) -> None:
        group, store = self.group, self.store
        kernels.offload_kernel[(step.batch * group.lane_heads, len(group.layers))](
            self.host_words[0],
            self.buffer_words,
            step.page_table,
            step.slots,
            step.lengths,
            step.high,
            step.appended,
            step.resident,
            store.unit_slot,
            store.slot_unit,
            *self.word_strides,
            group.rows * group.slots * self.words,
            group.rows * group.max_units,
            group.rows * group.buffer_slots,
            step.page_table.shape[1],
            group.max_units,
            FORCE=force,
            LANE_HEADS=group.lane_heads,
            UNIT=group.unit,
            UNITS_PER_PAGE=group.units_per_page,
            C=group.buffer_slots,
            T=group.ring_slots,
            WORDS=self.words,
            BLOCK=min(512, triton.next_power_of_2(self.words)),
            num_warps=4,
        )

    def store_chunk(
        self,
        layer: LayerView,
        slot: int,
        start: int,
        k: Tensor,
        v: Tensor,
        high: int,
        resident: bool,
    ) -> None:
        group = self.group
        sparse = group.residency == "sparse"
        tokens = k.shape[0]
        unit_slot, slot_unit, _, _ = self.maps[layer.index]
        token_kernels.store_kernel[(triton.cdiv(tokens, TOKEN_BLOCK), group.num_kv_heads)](
            k,
            v,
            self.host_elements[layer.index],
            self.buffers[layer.index],
            layer.step.page_table[slot],
            unit_slot,
            slot_unit,
            slot * group.lane_heads,
            start,
            tokens,
            ring_low(group, high) if sparse else 0,
            group.buffer_slots if fits(group, high, resident) else 0,
            k.stride(0),
            v.stride(0),
            *self.element_strides,
            group.max_units,
            SPARSE=sparse,
            C=max(group.buffer_slots, 1),
            T=max(group.ring_slots, 1),
            BLOCK_T=TOKEN_BLOCK,
            num_warps=4,
            **self.geometry,
        )

    def fetch(self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        group = self.group
        tokens = k.shape[0]
        token_kernels.fetch_kernel[(triton.cdiv(tokens, TOKEN_BLOCK), group.num_kv_heads)](
            k,
            v,
            self.host_elements[layer.index],
            layer.step.page_table[slot],
            start,
            tokens,
            *self.element_strides,
            KV_HEADS=group.num_kv_heads,
            BLOCK_T=TOKEN_BLOCK,
            num_warps=4,
            **self.geometry,
        )
