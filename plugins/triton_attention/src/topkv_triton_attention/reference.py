"""The formulas in torch: the oracle of the kernels, and what runs on a CPU.

All sums are in fp32, whatever the dtype of the inputs. Memory is bounded: no call holds more
than a few times ``BUDGET`` elements besides fp32 copies of the keys and values that it is given.
"""

from __future__ import annotations

from functools import reduce

import torch
from torch import Tensor

from topkv.errors import CapabilityError
from topkv.types import Tables

BUDGET = 1 << 23
"""Elements of the largest intermediate of one step."""


def check_decode(q: Tensor, k: Tensor, v: Tensor, max_batch: int, max_queries: int = 1) -> None:
    """Refuse what ``attend`` does not offer.

    Raises:
        CapabilityError: more queries of a row than the backend was made for, or mixed dtypes.
        ValueError: more rows than the backend was made for.
    """
    if q.shape[1] > max_queries:
        raise CapabilityError(
            f"triton_attention: attend was made for {max_queries} queries a row",
            [f"got q {list(q.shape)}, [B, Q, H, D]; raise max_queries when you make it"],
        )
    if q.dtype != k.dtype or k.dtype != v.dtype:
        raise CapabilityError(
            "triton_attention: q, k and v must share a dtype",
            [f"got {q.dtype}, {k.dtype} and {v.dtype}; convert q to the dtype of the cache"],
        )
    if q.shape[0] > max_batch:
        raise ValueError(
            f"attend: q has {q.shape[0]} rows, the backend was made for {max_batch}; "
            "raise max_batch when you make it"
        )


class Attend:
    """``attend`` of the hook specs: gather the listed units, then plain softmax attention.

    Args:
        scale: factor of the logits.
        max_batch: most rows of one call.
        softcap: of the logits, see ``topkv.types.ModelShape``.
        max_queries: most queries of a row.
    """

    def __init__(
        self, scale: float, max_batch: int, softcap: float | None = None, max_queries: int = 1
    ) -> None:
        self.scale, self.softcap = scale, softcap
        self.max_batch, self.max_queries = max_batch, max_queries

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        tables: Tables,
        out: Tensor,
        lse: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        """Attend as the hook does, but only to the listed tokens that ``keep`` has: bool
        ``[N, heads_per_lane, W * unit]``, all if None."""
        check_decode(q, k, v, self.max_batch, self.max_queries)
        if not len(q):
            return
        table, lengths = tables.table, tables.lengths
        kv_heads, unit, dim = k.shape[1:]
        lanes, width = table.shape
        seen = None if tables.queries is None else seen_by(tables, *q.shape[:3], kv_heads)
        # [B, Q, H, D] as the heads of each lane with their queries, [N, hpl, G * Q, D].
        queries = q.transpose(1, 2).reshape(lanes, kv_heads, -1, dim)
        result = torch.empty_like(queries, memory_format=torch.contiguous_format)
        norm = torch.empty(queries.shape[:3], dtype=torch.float32, device=q.device)
        if lengths.device.type == "cpu":
            # Only here is the longest lane free to know: no device waits for the answer.
            width = min(width, -(-int(lengths.max()) // unit))
        columns = max(1, min(width, BUDGET // (kv_heads * unit * dim)))
        step = max(1, BUDGET // (kv_heads * unit * dim * columns))
        for first in range(0, lanes, step):
            some = slice(first, first + step)
            grouped = queries[some].float() * self.scale
            parts = (
                _attend_units(
                    grouped,
                    k,
                    v,
                    table[some, column : column + columns],
                    lengths[some] - column * unit,
                    self.softcap,
                    None if keep is None else keep[some, :, column * unit :],
                    None if seen is None else seen[some] - column * unit,
                )
                for column in range(0, max(width, 1), columns)
            )
            result[some], norm[some] = reduce(lambda one, more: merge(*one, *more), parts)
        rows, each, heads = q.shape[:3]
        out.copy_(result.view(rows, heads, each, -1).transpose(1, 2))
        lse.copy_(norm.view(rows, heads, each).transpose(1, 2))


def seen_by(tables: Tables, rows: int, each: int, heads: int, kv_heads: int) -> Tensor:
    """Tokens of a lane's list that each of its query heads sees, int32 ``[N, hpl, G * Q]``."""
    assert tables.queries is not None
    behind = tables.queries[:, None] - 1 - torch.arange(each, device=tables.queries.device)
    lengths = tables.lengths.view(rows, -1)
    seen = (lengths[:, :, None] - behind[:, None]).masked_fill(behind[:, None] < 0, 0)
    seen = seen.repeat_interleave(heads // lengths.shape[1], 1)  # of each query head
    return seen.reshape(len(tables.table), kv_heads, -1)


def _attend_units(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    table: Tensor,
    lengths: Tensor,
    softcap: float | None,
    keep: Tensor | None,
    seen: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Scaled q ``[n, hpl, G, D]`` fp32 over the units of ``table`` ``[n, w]``; lengths, ``keep``
    ``[n, hpl, tokens]`` and ``seen [n, hpl, G]`` count from its first column. Returns out
    ``[n, hpl, G, D]`` and lse ``[n, hpl, G]`` in fp32."""
    lanes, kv_heads, _, dim = q.shape
    unit = k.shape[2]
    column = torch.arange(table.shape[1], device=table.device)
    token = torch.arange(table.shape[1] * unit, device=table.device)
    # Columns behind the used ones may hold anything: read unit 0 there, and ignore it below.
    ids = table.where(column * unit < lengths[:, None], 0)[:, None, :]
    head = torch.arange(kv_heads, device=k.device)[:, None]
    live = (token < lengths[:, None])[:, None, :, None]
    if keep is not None:
        live = live & keep[:, :, : len(token), None]
    # Streamed layers may keep k and v in host memory.
    ids = ids.to(k.device)
    keys = k[ids, head].to(q).view(lanes, kv_heads, -1, dim)
    values = v[ids, head].to(q).view(lanes, kv_heads, -1, dim).masked_fill(~live, 0)
    logits = capped(q @ keys.mT, softcap).masked_fill(~live.mT, -torch.inf)
    if seen is not None:
        logits.masked_fill_(token >= seen[..., None], -torch.inf)
    return softmax_times(logits, values)


def capped(logits: Tensor, softcap: float | None) -> Tensor:
    """``softcap * tanh(logits / softcap)``, in place; the logits where there is no cap."""
    return logits if softcap is None else logits.div_(softcap).tanh_().mul_(softcap)


def softmax_times(logits: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
    """``softmax(logits) @ values`` and the log-sum-exp; 0 and -inf where all logits are -inf.

    Args:
        logits: fp32 ``[..., m, n]``; overwritten.
        values: fp32 ``[..., n, D]``, finite.

    Returns:
        ``[..., m, D]`` and ``[..., m]``, fp32.
    """
    if not logits.shape[-1]:
        return logits @ values, logits.new_full(logits.shape[:-1], -torch.inf)
    top = logits.amax(-1, keepdim=True)
    top.masked_fill_(top == -torch.inf, 0)
    weights = logits.sub_(top).exp_()
    total = weights.sum(-1, keepdim=True)
    out = (weights @ values) / total.masked_fill(total == 0, 1)
    return out, (top + total.log()).squeeze(-1)


def merge(out_a: Tensor, lse_a: Tensor, out_b: Tensor, lse_b: Tensor) -> tuple[Tensor, Tensor]:
    """Attention over two disjoint sets of keys from the attention over each.

    Args:
        out_a, out_b: ``[..., D]``.
        lse_a, lse_b: ``[...]`` natural log; -inf for an empty set.
    """
    lse = torch.logaddexp(lse_a, lse_b)
    floor = lse.masked_fill(lse == -torch.inf, 0)
    weight_a = (lse_a - floor).exp()[..., None]
    weight_b = (lse_b - floor).exp()[..., None]
    return out_a * weight_a + out_b * weight_b, lse


class Prefill:
    """``prefill`` and ``prefill_selected`` of the hook specs, in blocks of queries. Values may
    have fewer elements than keys, as those of latent attention have.

    Args:
        scale: factor of the logits.
        softcap: of the logits, see ``topkv.types.ModelShape``.
    """

    def __init__(self, scale: float, softcap: float | None = None) -> None:
        self.scale, self.softcap = scale, softcap

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        out: Tensor,
        lse: Tensor,
        keep: Tensor | None = None,
    ) -> None:
        rows, heads, dim = q.shape
        kv_heads = k.shape[1]
        group = heads // kv_heads
        # Key j is seen by query i iff j <= i + offset.
        offset = q_start - k_start
        seen = min(k.shape[0], max(0, rows + offset))
        keys = k[:seen].float().permute(1, 2, 0).contiguous()
        values = v[:seen].float().transpose(0, 1).contiguous()
        step = max(1, min(128, BUDGET // (heads * max(1, seen))))
        for first in range(0, rows, step):
            last = min(first + step, rows)
            end = min(seen, max(0, last + offset))
            block = q[first:last].float().mul(self.scale).reshape(-1, kv_heads, group, dim)
            block = block.permute(1, 2, 0, 3).reshape(kv_heads, -1, dim)
            logits = capped(block @ keys[:, :, :end], self.softcap)
            # Up to here every query of the block sees every key.
            shared = min(end, max(0, first + offset + 1))
            i = torch.arange(first, last, device=q.device)[:, None]
            j = torch.arange(shared, end, device=q.device)
            edge = logits.view(kv_heads, group, last - first, end)[..., shared:]
            edge.masked_fill_(j > i + offset, -torch.inf)
            if keep is not None:
                each = logits.view(kv_heads, group, last - first, end)
                each.masked_fill_(~keep[first:last, :end], -torch.inf)
            result, norm = softmax_times(logits, values[:, :end])
            out[first:last] = result.view(heads, last - first, -1).transpose(0, 1)
            lse[first:last] = norm.view(heads, last - first).mT
