"""The transfer engine by kernels: grids, strides and block sizes, one launch a hook.

No hot hook makes a tensor. ``reference.py`` shows what each kernel has to do.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from topkv.hooks.transfer import TransferSetup
from topkv.kv.layout import GroupLayout
from topkv.kv.store import GroupStore
from topkv.ops import pdl
from topkv.plugins.contract import has_hook
from topkv.plugins.discovery import hookimpl
from topkv.transfer import kernels, token_kernels
from topkv.transfer.geometry import ZeroCopyTransfer
from topkv.types import LayerView, Plan, StepTensors

COPY_PROGRAMS = 256
"""Programs that share the misses of one layer-step."""

COPY_BLOCK = 256
"""16-byte words per program and iteration."""

STORE_PROGRAMS = 8
"""Most programs that store a chunk while it attends: with 16 and more a chunk takes longer."""

FETCH_PROGRAMS = 32
"""Most programs that fetch history: it is fetched while prompts are attended, and every program
takes the place of one that attends."""

LINE_BYTES = 128
"""Bytes that the link moves at a time."""

TOKEN_BLOCK = 64
"""Most tokens per program of the prefill kernels."""

TOKEN_ELEMENTS = 8192
"""Most elements of a plane that such a program holds: more would not stay in registers."""


class LayerMemory:
    """Views of one layer, made once: making one costs as much as a launch.

    Attributes:
        unit_slot, slot_unit, order, state, counters, buffer: tensors of the store, without their
            first dimension.
        buffer_words: ``buffer`` as int32; where entries are coded, ``buffer``.
        host, host_words: the host pool from the layer's first entry on, in the group's dtype and
            as int32; where entries are coded, bytes.
    """

    def __init__(self, store: GroupStore, index: int) -> None:
        self.unit_slot = store.unit_slot[index]
        self.slot_unit = store.slot_unit[index]
        self.order, self.state = store.order[index], store.state[index]
        self.counters = store.counters[index]
        self.buffer = store.buffer[index]
        pool = store.pool[store.layout.base + index * store.layout.layer_stride :]
        self.buffer_words, self.host_words = _words(store, self.buffer), _words(store, pool)
        dtype = torch.uint8 if store.group.coded_bytes else store.group.dtype
        self.host = pool[: pool.numel() // dtype.itemsize * dtype.itemsize].view(dtype)


def _words(store: GroupStore, memory: Tensor) -> Tensor:
    """Memory of entries as int32; as it is where they are coded."""
    return memory if store.group.coded_bytes else memory.view(torch.int32)


def strides_of(layout: GroupLayout, size: int) -> dict[str, int]:
    """The strides of the host pool within a layer, in elements of ``size`` bytes."""
    return {
        "s_page": layout.page_stride // size,
        "s_head": layout.head_stride // size,
        "s_unit": layout.unit_stride // size,
    }


def _span(layout: GroupLayout, words: int, size: int) -> int:
    """Places of ``size`` bytes in the lines that an entry of ``words`` may touch."""
    starts = layout.base, layout.layer_stride, *strides_of(layout, 1).values()
    aligned = all(start % LINE_BYTES == 0 for start in starts)
    line = LINE_BYTES // size
    return words if aligned else triton.cdiv(words + line - 1, line) * line


def copies_of(store: GroupStore) -> dict[str, dict[str, Any]]:
    """Choose how entries are copied: those that both tiers hold alike as they are, in words of
    16 bytes; coded ones packed and unpacked row by row.

    Returns:
        arguments of the kernels ``load``, ``offload``, ``store`` and ``fetch``, by these names.
    """
    group, kernels = store.group, store.host.kernels()
    if group.coded_bytes:
        heads, planes, unit, dim = group.entry_shape
        rows = heads * planes * unit
        width = size = min(16, dim & -dim)  # a word is within a row, and taken for as many bytes
    else:
        rows, dim, width, size = group.entry_bytes // 16, 4, 4, 16
    words = rows * dim // width
    reads: dict[str, Any] = {"READ": kernels.read, "DECODE": kernels.decode}
    writes: dict[str, Any] = {"WRITE": kernels.write}
    return {
        "load": {
            **reads,
            "WORDS": words,
            "SPAN": _span(store.layout, words, size),
            "WIDTH": width,
            "D": dim,
        },
        "offload": {
            **writes,
            "ROWS": rows,
            "D": dim,
            "BLOCK": min(kernels.rows, triton.next_power_of_2(rows)),
            "BLOCK_D": triton.next_power_of_2(dim),
            "s_buffer_layer": group.max_lanes * group.slots * rows,
        },
        "store": writes,
        "fetch": {**reads, "num_warps": kernels.warps},
    }


class TritonTransfer(ZeroCopyTransfer):
    """``zero_copy`` by kernels, with every constant worked out once.

    Args:
        setup: see ``topkv.hooks.transfer``, where the contracts of all hooks stand; its eviction
            policy has a ``new_position_kernel``.
    """

    def __init__(self, setup: TransferSetup) -> None:
        super().__init__(setup)
        group, store = self.group, self.store
        device = store.buffer.device
        policy: Any = setup.eviction
        self.new_position = policy.new_position_kernel
        self.new_state = policy.new_state_kernel if has_hook(policy, "new_state") else None
        self.memory = [LayerMemory(store, index) for index in range(len(group.layers))]
        self.block_k = max(16, triton.next_power_of_2(max(group.select, 1)))
        self.block_c = max(16, triton.next_power_of_2(max(group.buffer_slots, 1)))
        self.plan_warps = 4 if self.block_c <= 1024 else 8 if self.block_c <= 8192 else 32
        # Triton's interpreter runs one program after the other.
        self.copy_programs = COPY_PROGRAMS if device.type == "cuda" else 4
        self.store_programs = STORE_PROGRAMS if device.type == "cuda" else 4
        self.fetch_programs = FETCH_PROGRAMS if device.type == "cuda" else 4
        # The copy's programs start while the plan still runs: one launch latency less a step.
        early = pdl.available(device)
        self.early = {"PDL": early, **pdl.options(early)}
        self.word_strides = strides_of(store.layout, 16)
        self.copies = copies_of(store)
        self.all_buffer_words = _words(store, store.buffer)
        block_d = triton.next_power_of_2(group.head_dim)
        self.token_block = max(8, min(TOKEN_BLOCK, TOKEN_ELEMENTS // block_d))
        self.tokens = {
            **strides_of(store.layout, 1 if group.coded_bytes else group.dtype.itemsize),
            "HEADS_PER_LANE": group.heads_per_lane,
            "PLANES": group.planes,
            "UNIT": group.unit,
            "UNITS_PER_PAGE": group.units_per_page,
            "D": group.head_dim,
            "BLOCK_D": block_d,
        }

    @hookimpl
    def append(self, layer: LayerView, k: Tensor, v: Tensor) -> None:
        group, step, memory = self.group, layer.step, self.memory[layer.index]
        token_kernels.append_kernel[(step.batch, group.num_kv_heads, k.shape[1])](
            k,
            v,
            memory.buffer if self.sparse else memory.host,
            step.page_table,
            step.slots,
            step.lengths,
            step.appended,
            s_k=k.stride(0),
            s_k_token=k.stride(1),
            s_k_head=k.stride(2),
            s_v=v.stride(0),
            s_v_token=v.stride(1),
            s_v_head=v.stride(2),
            max_pages=step.page_table.shape[1],
            RING=self.sparse,
            LANE_HEADS=group.lane_heads,
            C=group.buffer_slots,
            T=max(group.ring_slots, 1),
            num_warps=1,
            **self.tokens,
        )

    @hookimpl
    def plan(self, layer: LayerView, ids: Tensor, limit: Tensor, out: Plan) -> None:
        group, step, memory = self.group, layer.step, self.memory[layer.index]
        kernels.plan_kernel[(step.batch * group.lane_heads,)](
            *(ids, limit),
            *(step.slots, step.high, step.resident, step.page_table),
            *(memory.unit_slot, memory.slot_unit, memory.order, memory.state),
            *(self.store.stamp, memory.counters),
            *(out.slots, out.count, out.miss_hosts, out.miss_slots, out.misses),
            step.page_table.shape[1],
            group.max_units,
            NEW_POSITION=self.new_position,
            NEW_STATE=self.new_state,
            LANE_HEADS=group.lane_heads,
            UNIT=group.unit,
            UNITS_PER_PAGE=group.units_per_page,
            K=group.select,
            C=group.buffer_slots,
            T=group.ring_slots,
            BLOCK_K=self.block_k,
            BLOCK_C=self.block_c,
            num_warps=self.plan_warps,
            **self.early,
        )

    @hookimpl
    def load(self, layer: LayerView, plan: Plan) -> None:
        group, step, memory = self.group, layer.step, self.memory[layer.index]
        lanes = step.batch * group.lane_heads
        kernels.load_kernel[(lanes, max(1, self.copy_programs // lanes))](
            memory.host_words,
            memory.buffer_words,
            step.slots,
            *(plan.miss_hosts, plan.miss_slots, plan.misses),
            LANE_HEADS=group.lane_heads,
            UNITS_PER_PAGE=group.units_per_page,
            K=group.select,
            SLOTS=group.slots,
            BLOCK=COPY_BLOCK,
            num_warps=8,
            **self.copies["load"],
            **self.word_strides,
            **self.early,
        )

    @hookimpl
    def offload(self) -> None:
        if self.sparse:
            self._write_back(self.step, force=False)

    @hookimpl
    def flush(self, slot: int, length: int, high: int, resident: bool) -> None:
        if not self.sparse or length == 0:
            return
        # Cold: it uploads a step of one row.
        table = self.step.page_table
        rows = torch.tensor([[slot], [length], [high], [1], [resident]], dtype=torch.int32)
        slots, lengths, highs, appended, residents = rows.to(table.device)
        step = StepTensors(slots, lengths, highs, appended, residents, table)
        self._write_back(step, force=True)

    def _write_back(self, step: StepTensors, force: bool) -> None:
        """Copy what a step filled, or its open units if ``force``, from the ring to the host."""
        group, store = self.group, self.store
        units = 1 if force else 1 + (self.max_queries - 1) // group.unit
        kernels.offload_kernel[(step.batch * group.lane_heads, len(group.layers), units)](
            self.memory[0].host_words,
            self.all_buffer_words,
            *(step.page_table, step.slots, step.lengths, step.high),
            *(step.appended, step.resident),
            *(store.unit_slot, store.slot_unit),
            s_layer=store.layout.layer_stride // 16,
            s_map_layer=group.max_lanes * group.max_units,
            s_slot_layer=group.max_lanes * group.buffer_slots,
            max_pages=step.page_table.shape[1],
            max_units=group.max_units,
            FORCE=force,
            LANE_HEADS=group.lane_heads,
            UNIT=group.unit,
            UNITS_PER_PAGE=group.units_per_page,
            C=group.buffer_slots,
            T=group.ring_slots,
            num_warps=4,
            **self.copies["offload"],
            **self.word_strides,
        )

    @hookimpl
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
        group, memory, tokens = self.group, self.memory[layer.index], k.shape[0]
        tiles = triton.cdiv(tokens, self.token_block) * group.num_kv_heads
        token_kernels.store_kernel[(min(tiles, self.store_programs),)](
            k,
            v,
            memory.host,
            memory.buffer,
            layer.step.page_table[slot],
            memory.unit_slot,
            memory.slot_unit,
            slot * group.lane_heads,
            start,
            tokens,
            self.ring_low(high) if self.sparse else 0,
            group.buffer_slots if self.fits(high, resident) else 0,
            s_k=k.stride(0),
            s_v=v.stride(0),
            max_units=group.max_units,
            SPARSE=self.sparse,
            KV_HEADS=group.num_kv_heads,
            C=max(group.buffer_slots, 1),
            T=max(group.ring_slots, 1),
            BLOCK_T=self.token_block,
            num_warps=4,
            **self.copies["store"],
            **self.tokens,
        )

    @hookimpl
    def fetch(self, layer: LayerView, slot: int, start: int, k: Tensor, v: Tensor) -> None:
        group, tokens = self.group, k.shape[0]
        tiles = triton.cdiv(tokens, self.token_block) * group.num_kv_heads
        token_kernels.fetch_kernel[(min(tiles, self.fetch_programs),)](
            k,
            v,
            self.memory[layer.index].host,
            layer.step.page_table[slot],
            start,
            tokens,
            KV_HEADS=group.num_kv_heads,
            BLOCK_T=self.token_block,
            **self.copies["fetch"],
            **self.tokens,
        )
