"""Prompts: a chunk of queries over one contiguous block of keys. Cold, so plans may be made here.

Keys and values go through FlashInfer's single prefill (``fa2``, which takes custom masks too).
The library aligns a causal mask to the last query and key, so a chunk falls into queries that see
nothing, some that see a triangle, and some that see all. Latent rows go through its MLA kernel
with each query as a lane, because its own causal mask refuses some counts of heads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.types import ModelShape
from topkv_flashinfer import latent, plans, reference
from topkv_flashinfer.providers import Library

NEAR = 2**31
"""Elements up to which the library's offsets within keys and values, 32 bits wide, are certain."""

ROWS = 2048
"""Queries over latent rows in one call; the library's plans hold 16384 works."""

PAGE = 64
"""Latent rows on a page of a dense prompt."""


class Prompts:
    """``prefill`` and ``prefill_selected`` of grouped queries.

    Args:
        library: part ``gqa``.
        model: whose logits are scaled and capped.
    """

    def __init__(self, library: Library, model: ModelShape) -> None:
        self._prefill, self._model = library["single_prefill_with_kv_cache"], model

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        keep: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See ``topkv.hooks.backend``; ``keep`` is bool ``[m, n]``, None where causality alone
        decides."""
        k, v = near(k), near(v)
        blind, whole = regions(len(q), len(k), q_start - k_start)
        out[:blind] = 0.0
        lse[:blind] = -torch.inf
        if blind == len(q):
            return
        if keep is not None:
            rows = q_start + torch.arange(blind, len(q), device=q.device)
            columns = k_start + torch.arange(len(k), device=q.device)
            seen = keep[blind:] & (columns <= rows[:, None])
            self._run(q[blind:], k, v, out[blind:], lse[blind:], mask=seen)
            return
        if whole > blind:
            # The last of these queries sees the key ``whole - 1 + q_start - k_start``.
            count = whole + q_start - k_start
            triangle = slice(blind, whole)
            self._run(q[triangle], k[:count], v[:count], out[triangle], lse[triangle], causal=True)
        if whole < len(q):
            self._run(q[whole:], k, v, out[whole:], lse[whole:])

    def _run(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        out: Tensor,
        lse: Tensor,
        *,
        causal: bool = False,
        mask: Tensor | None = None,
    ) -> None:
        result, log = self._prefill(
            *(q, k, v),
            packed_custom_mask=None if mask is None else reference.packed(mask),
            causal=causal,
            sm_scale=self._model.scale,
            logits_soft_cap=self._model.softcap,
            backend="fa2",
            return_lse=True,
        )
        log = log * plans.LN2
        if mask is not None:
            any_key = mask.any(1)[:, None]
            result = torch.where(any_key[..., None], result, 0.0)
            log = torch.where(any_key, log, -torch.inf)
        out.copy_(result)
        lse.copy_(log)


class LatentPrompts:
    """``prefill`` and ``prefill_selected`` over latent rows.

    Args:
        library: part ``mla``.
        model: geometry.
        device: of the tensors.
        scratch: ``latent.workspace``, which may be shared on one stream.
    """

    def __init__(
        self, library: Library, model: ModelShape, device: torch.device, scratch: Tensor
    ) -> None:
        self._library, self._model, self._device = library, model, device
        self._wrapper = library["BatchMLAPagedAttentionWrapper"](scratch, backend="fa3")

    def __call__(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        keep: Tensor | None,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """See ``Prompts``; ``k`` are rows ``[n, 1, 576]`` whose beginnings are ``v``."""
        rows = k[:, 0]
        for first in range(0, len(q), ROWS):
            part = slice(first, first + ROWS)
            start = q_start + first
            mine = (q[part], out[part], lse[part])
            if keep is None:
                self._dense(*mine, rows, start - k_start)
            else:
                self._selected(*mine, rows, start - k_start, keep[part])

    def _dense(self, q: Tensor, out: Tensor, lse: Tensor, rows: Tensor, ahead: int) -> None:
        """Attend where query i sees ``i + ahead + 1`` rows: its pages are the first ones."""
        seen = (torch.arange(len(q)) + ahead + 1).clamp(0, len(rows))
        pages = -(-seen // PAGE)
        indptr = torch.nn.functional.pad(pages.cumsum(0), (1, 0))
        indices = torch.arange(int(indptr[-1])) - indptr[:-1].repeat_interleave(pages)
        padded = torch.nn.functional.pad(rows, (0, 0, 0, -len(rows) % PAGE))
        self._run(q, out, lse, padded.reshape(-1, PAGE, rows.shape[1]), indptr, indices, seen)

    def _selected(
        self, q: Tensor, out: Tensor, lse: Tensor, rows: Tensor, ahead: int, keep: Tensor
    ) -> None:
        """Attend where each query has a list of rows, a page of one row each."""
        last = torch.arange(len(q), device=q.device) + ahead
        mask = keep & (torch.arange(len(rows), device=q.device) <= last[:, None])
        seen = mask.sum(1).cpu()
        indptr = torch.nn.functional.pad(seen.cumsum(0), (1, 0))
        self._run(q, out, lse, rows.contiguous()[:, None], indptr, mask.nonzero()[:, 1], seen)

    def _run(
        self,
        q: Tensor,
        out: Tensor,
        lse: Tensor,
        pages: Tensor,
        indptr: Tensor,
        indices: Tensor,
        seen: Tensor,
    ) -> None:
        """Attend with one query a lane over ``pages`` ``[P, unit, 576]``."""
        if not len(indices):
            out.zero_()
            lse.fill_(-torch.inf)
            return
        queries = plans.ramp(len(q), 1)
        lists = (queries, indptr.int(), indices.int().to(self._device), seen.int())
        latent.plan(
            *(self._library, self._model, self._wrapper, *lists, pages.shape[1], q.shape[1])
        )
        result, log = self._wrapper.run(
            query=(q[..., : latent.LATENT], q[..., latent.LATENT :]),
            kv_cache=(pages[..., : latent.LATENT], pages[..., latent.LATENT :]),
            return_lse=True,
        )
        out.copy_(result)
        lse.copy_(log * plans.LN2)


def regions(queries: int, keys: int, ahead: int) -> tuple[int, int]:
    """Divide a causal chunk: ``blind`` queries see nothing, queries from ``whole`` on see all.

    Args:
        queries, keys: m and n.
        ahead: ``q_start - k_start``; query i sees the first ``i + ahead + 1`` keys.

    Returns:
        ``blind <= whole``; the queries between them see at least one key, and the last of them
        sees ``whole + ahead``, at most all. Without keys every query is blind.
    """
    if keys == 0:
        return queries, queries
    blind = min(max(-ahead, 0), queries)
    return blind, min(max(keys - ahead, blind), queries)


def near(x: Tensor) -> Tensor:
    """Return ``x`` itself, or a contiguous copy where 32-bit offsets do not reach all of it."""
    reach = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.contiguous() if reach >= NEAR else x
