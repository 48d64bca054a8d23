"""FlashInfer as it is documented, in float64 and one query at a time, for machines without it.

The code around the library is tested against this stand-in: it takes the library's arguments,
keeps the documented conditions on them, and its log-sum-exps are to the base of 2. Only what the
backend calls is here. That the library itself is as documented is for ``test_gpu`` to show.
"""

from __future__ import annotations

import math

import torch

from topkv.hooks.backend import BackendSetup
from topkv_flashinfer.backend import FlashInfer
from topkv_flashinfer.providers import Library


def rows_attention(q, k, v, scale, cap=None):
    """q ``[H, D]`` over k and v ``[n, Hkv, D]``: out ``[H, Dv]`` and base-2 lse ``[H]``."""
    if not len(k):
        return q.new_zeros(len(q), v.shape[-1]), torch.full((len(q),), -torch.inf)
    group = len(q) // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, 1) for x in (k, v))
    logits = torch.einsum("hd,nhd->hn", q.double(), keys) * scale
    logits = logits if cap is None else cap * torch.tanh(logits / cap)
    weights = logits.softmax(-1)
    out = torch.einsum("hn,nhd->hd", weights, values)
    return out.to(q.dtype), (logits.logsumexp(-1) / math.log(2)).float()


class DecodeWrapper:
    """``BatchDecodeWithPagedKVCacheWrapper`` with fixed buffers."""

    def __init__(
        self,
        float_workspace,
        layout,
        *,
        use_cuda_graph,
        use_tensor_cores,
        paged_kv_indptr_buffer,
        paged_kv_indices_buffer,
        paged_kv_last_page_len_buffer,
        backend,
    ):
        assert (layout, use_cuda_graph, use_tensor_cores, backend) == ("HND", True, True, "fa2")
        self.indptr, self.indices = paged_kv_indptr_buffer, paged_kv_indices_buffer
        self.last, self.planned = paged_kv_last_page_len_buffer, None
        assert len(self.indptr) == len(self.last) + 1

    def workspace_size(self, indptr, indices, last, *shape, **types):
        return 1024 * len(last), 64 * len(last)

    def reset_workspace_buffer(self, float_workspace, int_workspace):
        assert len(float_workspace) >= 1024 * len(self.last)
        assert len(int_workspace) >= 64 * len(self.last)

    def plan(
        self,
        indptr,
        indices,
        last,
        heads,
        kv_heads,
        dim,
        page,
        *,
        sm_scale,
        logits_soft_cap,
        **types,
    ):
        assert indptr.device.type == last.device.type == "cpu"
        assert len(last) == len(self.last)
        assert len(indices) == indptr[-1] <= len(self.indices)
        self.pages = (indptr[1:] - indptr[:-1]).tolist()
        self.planned = (heads, kv_heads, dim, page, sm_scale, types["q_data_type"])
        self.cap = logits_soft_cap
        self.indptr.copy_(indptr)
        self.last.copy_(last)
        self.indices[: len(indices)].copy_(indices)

    def run(self, q, kv, *, out, lse, return_lse, enable_pdl):
        assert return_lse
        assert enable_pdl is False
        heads, kv_heads, dim, page, scale, dtype = self.planned
        k, v = kv
        assert q.shape == (len(self.last), heads, dim)
        assert k.shape[1:] == (kv_heads, page, dim)
        assert (q.dtype, k.dtype, out.dtype, lse.dtype) == (dtype, dtype, dtype, torch.float32)
        assert out.is_contiguous()
        assert lse.is_contiguous()
        for lane in range(len(q)):
            mine = self.indices[self.indptr[lane] : self.indptr[lane + 1]].long()
            assert len(mine) == self.pages[lane], "another count of pages than was planned"
            keys, values = (x[mine].transpose(1, 2).flatten(0, 1) for x in (k, v))
            length = (len(mine) - 1) * page + int(self.last[lane])
            assert 0 <= length <= len(mine) * page
            mine = (q[lane], keys[:length], values[:length], scale, self.cap)
            out[lane], lse[lane] = rows_attention(*mine)
        return out, lse


def single_prefill(
    q, k, v, *, packed_custom_mask, causal, sm_scale, logits_soft_cap, backend, return_lse
):  # fmt: skip
    """``single_prefill_with_kv_cache``: causal masks end at the last query and key."""
    assert backend == "fa2"
    assert return_lse
    m, n = len(q), len(k)
    assert m
    assert n
    if packed_custom_mask is not None:
        bits = [(byte >> bit) & 1 for byte in packed_custom_mask.tolist() for bit in range(8)]
        seen = torch.tensor(bits[: m * n], dtype=torch.bool).view(m, n)
        assert len(bits) - m * n < 8
    elif causal:
        assert n >= m, "the library's causal mask has no queries before the first key"
        seen = torch.ones(m, n, dtype=torch.bool).tril(n - m)
    else:
        seen = torch.ones(m, n, dtype=torch.bool)
    given = (sm_scale, logits_soft_cap)
    pairs = [rows_attention(q[i], k[seen[i]], v[seen[i]], *given) for i in range(m)]
    return torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])


class MLAPlanMetadata:
    """Rows of queries and pages, compressed."""

    def __init__(self, *fields):
        self.fields = fields

    @classmethod
    def csr(cls, qo_indptr, kv_indptr, kv_indices, kv_len_arr):
        return cls(qo_indptr, kv_indptr, kv_indices, kv_len_arr)


LIMIT = 7
COLUMNS = (3, 11, 13, 14)
"""Tokens of a work; places of first page, length, first token and the one behind the last."""


class Schedule:
    """Plan as the library keeps one under CUDA graphs: spans of ``LIMIT`` tokens as works.

    Plan info and workspace are laid out as ``MLAPlan`` of ``scheduler.cuh`` lays them out.
    """

    def __init__(self, pages, lengths):
        spans = [
            (int(pages[lane]), length, first, min(first + LIMIT, length))
            for lane, length in enumerate(lengths.tolist())
            for first in range(0, length, LIMIT)
        ][::-1]
        words, self._plan_info, self.count = [0, 1, len(spans)], [0] * 18, len(spans)
        self._plan_info[1], self._plan_info[15] = 2, 0
        for column, place in enumerate(COLUMNS):
            self._plan_info[place] = 4 * len(words)
            words += [span[column] for span in spans]
        self._int_workspace_buffer = torch.tensor(words, dtype=torch.int32).view(torch.uint8)

    def works(self):
        """First page, length, first token and the one behind the last of each work, now."""
        words = self._int_workspace_buffer.view(torch.int32)
        starts = [self._plan_info[place] // 4 for place in COLUMNS]
        return zip(*(words[start : start + self.count].tolist() for start in starts), strict=True)


class MLAWrapper:
    """``BatchMLAPagedAttentionWrapper``, with fixed buffers or without."""

    def __init__(self, float_workspace, *, backend, use_cuda_graph=False, **buffers):
        assert backend == "fa3"
        self.fixed, self.buffers = use_cuda_graph, buffers

    def plan(self, *, metadata, num_heads, head_dim_ckv, head_dim_kpe, page_size, **options):
        queries, pages, indices, lengths = metadata.fields
        assert {each.dtype for each in metadata.fields} == {torch.int32}
        assert (head_dim_ckv, head_dim_kpe) == (512, 64)
        assert options["causal"] is False
        assert options["lse_mode"] == "base2"
        assert torch.equal(pages[1:] - pages[:-1], -(-lengths // page_size))
        assert len(indices) >= pages[-1]
        assert queries.tolist() == list(range(len(lengths) + 1))
        self.lists, self.page, self.scale = metadata.fields, page_size, options["sm_scale"]
        if self.fixed:
            assert all(len(self.buffers[name]) == len(lengths) for name in ("kv_len_arr",))
            assert len(self.buffers["kv_indices"]) >= len(indices)
            self.buffers["kv_indices"][: len(indices)].copy_(indices)
            self._planned_backend = Schedule(pages, lengths)

    def run(self, *, query, kv_cache, return_lse, out=None, lse=None):
        assert return_lse
        q, rows = torch.cat(query, -1), torch.cat(kv_cache, -1)
        assert rows.shape[1] == self.page
        return self._scheduled(q, rows, out, lse) if self.fixed else self._listed(q, rows)

    def _scheduled(self, q, rows, out, lse):
        """Work by work, merged by their base-2 log-sum-exps."""
        width = int(self.lists[1][1])
        parts = [[] for _ in q]
        for page, length, first, behind in self._planned_backend.works():
            assert 0 <= first <= behind <= length <= width * self.page
            tokens = torch.arange(first, behind)
            mine = self.buffers["kv_indices"][page + tokens // self.page].long()
            row = rows[mine, tokens % self.page][:, None]
            lane = page // width
            parts[lane].append(rows_attention(q[lane], row, row[..., :512], self.scale))
        for lane, found in enumerate(parts):
            outs = torch.stack([part for part, _ in found]).double()
            logs = torch.stack([log for _, log in found]).double() * math.log(2)
            whole = logs.logsumexp(0)
            weights = (logs - whole.nan_to_num(neginf=0.0)).exp()
            out[lane] = (weights[..., None] * outs).sum(0)
            lse[lane] = whole / math.log(2)
        return out, lse

    def _listed(self, q, rows):
        _, pages, indices, lengths = self.lists
        pairs = []
        for lane, length in enumerate(lengths.tolist()):
            mine = rows[indices[pages[lane] : pages[lane + 1]].long()].flatten(0, 1)[:length, None]
            pairs.append(rows_attention(q[lane], mine, mine[..., :512], self.scale))
        return torch.stack([out for out, _ in pairs]), torch.stack([lse for _, lse in pairs])


GQA = Library(
    "documented",
    {
        "BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper,
        "single_prefill_with_kv_cache": single_prefill,
    },
)
MLA = Library(
    "documented",
    {"BatchMLAPagedAttentionWrapper": MLAWrapper, "MLAPlanMetadata": MLAPlanMetadata},
)


class Documented(FlashInfer):
    """The backend around the documented library, on the CPU."""

    def __init__(self, setup):
        self.latent = setup.model.attention == "mla"
        self._serve(MLA if self.latent else GQA, setup)


def documented(model, group, device, max_batch, max_queries=1):
    """Make the backend around the documented library for shapes."""
    sizes = (torch.device(device), max_batch, model.group_size)
    return Documented(BackendSetup(model, group, *sizes, max_queries=max_queries))
