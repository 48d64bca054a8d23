"""Launches of the Double Sparsity kernels and the workspaces that they share."""

from __future__ import annotations

from typing import Any

import torch
import triton
from torch import Tensor

from topkv.types import GroupShape, LayerView, ModelShape
from topkv_double_sparsity import kernels, label_kernels
from topkv_double_sparsity.parameters import Settings

TILE, TILES, STAGES = 32, 8, 3
"""Tokens of a tile, tiles of one program of the score kernel, loads in flight."""

SPAN = TILE * TILES
"""Tokens whose maximum and exponential sum are kept together."""

TILE_V = 4096
"""Scores, of all heads together, of one program of the averaging kernel."""

COLUMNS, ROW = 16, 256
"""Query heads of one program of the score kernel, as many as a product takes at least; and most
bytes of the labels of a token that it loads at once."""

_BITS = {2: torch.int16, 4: torch.int32}


def _bundle(kv_heads: int, group: int, size: int) -> int:
    """kv-heads of one program: as many as fit, a divisor of all of them.

    Args:
        size: bytes of the label of a token and kv-head.
    """
    fits = [n for n in range(1, kv_heads + 1) if n * group <= COLUMNS and n * size <= ROW]
    return max((n for n in fits if kv_heads % n == 0), default=1)


class Launcher:
    """The kernels of one group, with every constant worked out once.

    Workspaces, fp32: scaled logits ``[max_requests * H, U]``; maximum, exponential sum and, for
    the entropy, moment of each span of tokens ``[max_requests * H, spans]``; scores ``[rows, U]``.
    """

    def __init__(
        self, model: ModelShape, group: GroupShape, settings: Settings, device: torch.device
    ) -> None:
        self.model, self.group, self.settings = model, group, settings
        self.blocks = triton.cdiv(max(group.max_units, 1), SPAN)
        floats: dict[str, Any] = {"dtype": torch.float32, "device": device}
        heads = group.max_requests * model.num_heads
        entropy = settings.flat is not None
        self.raw = torch.empty((heads, group.max_units), **floats)
        self.peak = torch.empty((heads, self.blocks), **floats)
        self.mass = torch.empty((heads, self.blocks), **floats)
        self.moment = torch.empty((heads if entropy else 0, self.blocks), **floats)
        self.scores = torch.empty((group.rows, group.max_units), **floats)
        self.closed = torch.zeros(group.rows, dtype=torch.int32, device=device)
        self.flat = torch.zeros(group.rows, dtype=torch.int32, device=device)
        self._set_constants(device)

    def _set_constants(self, device: torch.device) -> None:
        model, group, settings = self.model, self.group, self.settings
        width = (settings.channels + 1) // 2 if settings.int4 else settings.channels
        item = 1 if settings.int4 else model.dtype.itemsize
        labels = {
            "KV_HEADS": model.num_kv_heads,
            "PAGE": group.page_tokens,
            "R": settings.channels,
            "WIDTH": width,
            "INT4": settings.int4,
        }
        self.as_bits = not settings.int4 or model.dtype is torch.bfloat16
        self.writing = labels | {
            "BLOCK_W": max(2, triton.next_power_of_2(width)),
            "KEY_BF16": model.dtype is torch.bfloat16,
            "num_warps": 4,
        }
        self.bundle = _bundle(model.num_kv_heads, model.group_size, width * item)
        self.scoring = labels | {
            "GROUP": model.group_size,
            "HEADS": self.bundle,
            "TILE": TILE,
            "TILES": TILES,
            "STAGES": STAGES,
            "BLOCK_K": max(16, triton.next_power_of_2(self.bundle * width)),
            "BLOCK_C": max(COLUMNS, triton.next_power_of_2(self.bundle * model.group_size)),
            "ENTROPY": settings.flat is not None,
            "FP32": model.dtype is torch.float32 or device.type == "cpu",
            "num_warps": 1,
        }
        heads = model.num_heads // group.lane_heads
        block_h = triton.next_power_of_2(heads)
        tokens = triton.next_power_of_2(max(group.max_units, 16))
        self.averaging = {
            "LANE_HEADS": group.lane_heads,
            "HEADS": heads,
            "SPAN": SPAN,
            "BLOCK_H": block_h,
            "BLOCK_P": min(64, triton.next_power_of_2(self.blocks)),
            "BLOCK_V": max(16, min(TILE_V // block_h, tokens)),
            "ENTROPY": settings.flat is not None,
            "num_warps": 4,
        }

    def _writable(self, layer: LayerView, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Keys, labels and meta as the writing kernels take them."""
        labels = layer.pools["labels"]
        meta = layer.pools.get("meta", labels)
        if k.stride(-1) != 1:
            k = k.contiguous()
        if self.as_bits:
            k = k.view(_BITS[k.element_size()])
        if not self.settings.int4:
            labels = labels.view(_BITS[labels.element_size()])
        return k, labels, meta

    def construct(
        self, layer: LayerView, channels: Tensor, slot: int, start: int, k: Tensor
    ) -> None:
        """Labels of keys ``[m, Hkv, D]`` from position ``start``."""
        keys, labels, meta = self._writable(layer, k)
        block = 32
        grid = (triton.cdiv(k.shape[0], block), self.group.num_kv_heads)
        label_kernels.construct_kernel[grid](
            *(keys, channels[slot], labels, meta, layer.step.page_table[slot]),
            *(start, k.shape[0], keys.stride(0), keys.stride(1)),
            BLOCK_T=block,
            **self.writing,
        )

    def update(self, layer: LayerView, channels: Tensor, k: Tensor) -> None:
        """Labels of the keys ``[B, Hkv, D]`` that the rows appended."""
        step = layer.step
        keys, labels, meta = self._writable(layer, k)
        block = 4
        grid = (triton.cdiv(step.batch, block), self.group.num_kv_heads)
        label_kernels.update_kernel[grid](
            *(keys, channels, labels, meta, step.page_table),
            *(step.slots, step.lengths, step.appended, step.batch, step.page_table.stride(0)),
            *(keys.stride(0), keys.stride(1), channels.stride(0)),
            BLOCK_T=block,
            **self.writing,
        )

    def score(
        self, layer: LayerView, channels: Tensor, q: Tensor
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Scores ``[N, U]`` of the lanes of queries ``[B, H, D]``, and tokens of lanes ``[N]``.

        Lanes that select K have their tokens in the first count, flat lanes in the second; None
        where head sparsity is off.
        """
        group, step, settings = self.group, layer.step, self.settings
        labels = layer.pools["labels"]
        meta = layer.pools.get("meta", labels)
        tables = (step.slots, step.lengths)
        work = (self.raw, self.peak, self.mass, self.moment)
        bundles = step.batch * (group.num_kv_heads // self.bundle)
        kernels.score_kernel[(bundles, self.blocks)](
            *(q, labels, meta, channels, *tables, step.page_table, *work),
            *(step.page_table.stride(0), group.max_units, self.blocks, self.model.scale),
            *(q.stride(0), q.stride(1), channels.stride(0)),
            **self.scoring,
        )
        lanes = step.batch * group.lane_heads
        grid = (lanes, triton.cdiv(group.max_units, self.averaging["BLOCK_V"]))
        threshold = 2.0 if settings.flat is None else settings.flat
        kernels.average_kernel[grid](
            *(*work, *tables, self.scores, self.closed, self.flat),
            *(group.max_units, self.blocks, settings.sinks, group.select, threshold),
            **self.averaging,
        )
        flat = None if settings.flat is None else self.flat[:lanes]
        return self.scores[:lanes], self.closed[:lanes], flat
