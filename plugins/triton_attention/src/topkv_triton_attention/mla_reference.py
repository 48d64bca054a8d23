"""Latent attention over scattered rows in torch: the oracle of the kernel, and what runs on a CPU.

Sums are in fp32, whatever the rows are stored as.
"""

from __future__ import annotations

from functools import reduce

import torch
from attrs import frozen
from torch import Tensor

from topkv.errors import CapabilityError
from topkv.types import GroupShape, ModelShape, Tables
from topkv_authoring.latent_fp8 import LATENT, ROPE, ROW_BYTES, TILE, decode_fp8
from topkv_triton_attention import reference


@frozen
class LatentShape:
    """Sizes and format of a stored row ``[latent | rope]``.

    Attributes:
        latent: elements of a value.
        rope: further elements of a key; 0 for none.
        kv_format: ``"model"``, rows in the dtype of q, or ``"fp8"``, see
            ``topkv_authoring.latent_fp8``.
    """

    latent: int
    rope: int
    kv_format: str = "model"

    @classmethod
    def of(cls, model: ModelShape, group: GroupShape) -> LatentShape:
        """The rows of a group."""
        packed = group.dtype == torch.uint8
        latent = model.out_dim
        return cls(latent, model.head_dim - latent, "fp8" if packed else "model")

    @property
    def packed(self) -> bool:
        return self.kv_format == "fp8"

    @property
    def row(self) -> int:
        """Elements of a stored row."""
        return ROW_BYTES if self.packed else self.latent + self.rope

    @property
    def tiles(self) -> int:
        """Scales of a stored row."""
        return LATENT // TILE if self.packed else 0


def latent_refusals(model: ModelShape, group: GroupShape) -> list[str]:
    """Return the reasons why rows of a group cannot be read, besides its unit and dtype."""
    shape = LatentShape.of(model, group)
    reasons = []
    if not (1 <= shape.latent <= 512 and 0 <= shape.rope <= 128):
        reasons.append(
            f"latent rows: expected 1 to 512 latents and 0 to 128 rope elements, got "
            f"{shape.latent} and {shape.rope}; use another backend"
        )
    if shape.packed and (shape.latent, shape.rope) != (LATENT, ROPE):
        reasons.append(
            f"fp8 rows: expected {LATENT} latents and {ROPE} rope elements, got {shape.latent} "
            f"and {shape.rope}; set kv_format to 'model'"
        )
    if not shape.packed and group.dtype != model.dtype:
        reasons.append(
            f"row dtype: expected uint8 or that of the model, {model.dtype}, got {group.dtype}; "
            "set kv_format to 'model' or 'fp8'"
        )
    if group.head_dim != shape.row:
        reasons.append(
            f"row: expected {shape.row} elements of {group.dtype}, got {group.head_dim}; "
            "set kv_format to 'model' or 'fp8'"
        )
    if group.num_kv_heads != 1:
        reasons.append(
            f"latent rows are shared by all heads: expected one kv-head, got {group.num_kv_heads}"
        )
    return reasons


def check_latent(
    q: Tensor, k: Tensor, shape: LatentShape, max_batch: int, max_queries: int
) -> None:
    """Refuse what ``attend`` does not offer.

    Raises:
        CapabilityError: more queries of a row than the backend was made for, or rows of another
            dtype.
        ValueError: more rows than the backend was made for.
    """
    if shape.packed and k.dtype != torch.uint8:
        raise CapabilityError(
            "triton_attention: fp8 rows must come as bytes",
            [f"expected rows of uint8, got {k.dtype}; view them as uint8"],
        )
    rows = q if shape.packed else k
    reference.check_decode(q, rows, rows, max_batch, max_queries)


class Attend:
    """``attend`` of the hook specs for latent rows: gather, decode, plain softmax attention.

    Args:
        shape: of the rows.
        scale: factor of the logits.
        max_batch: most rows of one call.
        max_queries: most queries of a row.
    """

    def __init__(
        self, shape: LatentShape, scale: float, max_batch: int, max_queries: int = 1
    ) -> None:
        self.shape = shape
        self.scale = scale
        self.max_batch, self.max_queries = max_batch, max_queries

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        check_latent(q, k, self.shape, self.max_batch, self.max_queries)
        table, lengths = tables.table, tables.lengths
        lanes, each, heads, dim = q.shape  # all heads share a selection: a row is a lane
        if not lanes:
            return
        seen = lengths[:, None]
        if tables.queries is not None:
            seen = reference.seen_by(tables, lanes, each, heads, 1)[:, 0]
        queries = q.transpose(1, 2).reshape(lanes, heads * each, dim)
        result = torch.empty(
            (lanes, heads * each, self.shape.latent), dtype=out.dtype, device=out.device
        )
        norm = torch.empty((lanes, heads * each), device=lse.device)
        unit, width = k.shape[2], table.shape[1]
        if lengths.device.type == "cpu":
            # Only here is the longest lane free to know: no device waits for the answer.
            width = min(width, -(-int(lengths.max()) // unit))
        size = unit * max(dim, heads * each)
        columns = max(1, min(width, reference.BUDGET // size))  # of one step
        step = max(1, reference.BUDGET // (size * columns))
        for first in range(0, lanes, step):
            some = slice(first, first + step)
            scaled = queries[some].float() * self.scale
            parts = (
                self._part(
                    *(scaled, k, table[some, column : column + columns]),
                    *(lengths[some] - column * unit, seen[some] - column * unit),
                )
                for column in range(0, max(width, 1), columns)
            )
            result[some], norm[some] = reduce(lambda a, b: reference.merge(*a, *b), parts)
        out.copy_(result.view(lanes, heads, each, -1).transpose(1, 2))
        lse.copy_(norm.view(lanes, heads, each).transpose(1, 2))

    def _part(
        self, q: Tensor, k: Tensor, table: Tensor, lengths: Tensor, seen: Tensor
    ) -> tuple[Tensor, Tensor]:
        """Scaled q ``[n, H, D]`` fp32 over the units of ``table`` ``[n, w]``; lengths and ``seen
        [n, 1 or H]`` count from its first column. Returns out ``[n, H, latent]`` and lse
        ``[n, H]`` in fp32."""
        unit, columns = k.shape[2], torch.arange(table.shape[1], device=table.device)
        # Columns behind the used ones may hold anything: read unit 0 there, and ignore it below.
        ids = table.where(columns * unit < lengths[:, None], 0)
        # Streamed layers may keep their rows in host memory.
        rows = k[ids.to(k.device), 0].flatten(1, 2).to(q.device)
        token = torch.arange(rows.shape[1], device=q.device)
        live = (token < lengths[:, None])[..., None]
        rows = decode_fp8(rows, torch.float32) if self.shape.packed else rows.float()
        rows = rows.masked_fill(~live, 0)
        logits = (q @ rows.mT).masked_fill(token >= seen[..., None], -torch.inf)
        return reference.softmax_times(logits, rows[..., : self.shape.latent])
