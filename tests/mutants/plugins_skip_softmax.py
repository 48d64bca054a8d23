"""Skip Softmax with one bug each: of the stage, of the backend's reference, and of its kernel."""

from __future__ import annotations

import math

import torch
from attrs import evolve

from topkv import hookimpl
from topkv.hooks.stage import StageSpec
from topkv_authoring.page_table import adapt_page_table
from topkv_skip_softmax.stage import SkipSoftmax
from topkv_triton_attention.backend import TritonAttention
from topkv_triton_attention.launch import SkippingDecoder
from topkv_triton_attention.reference import Attend, seen_by
from topkv_triton_attention.skip_reference import SkippingAttend


class StandsBehind(SkipSoftmax):
    """The stage refines, and so is called in every step."""

    @hookimpl
    def spec(self):
        return StageSpec()

    @hookimpl
    def refine(self, layer, q, candidates, out):
        out.ids.copy_(candidates.ids)
        return out


class LooksAhead(SkippingAttend):
    """A block is compared with the largest of a lane's whole run, later blocks included."""

    def skips(self, q, k, tables):
        lanes = len(tables.table)
        queries = q.float().mul(self.scale).transpose(1, 2)
        queries = queries.reshape(lanes, k.shape[1], -1, q.shape[-1])
        seen = tables.lengths[:, None, None]
        if tables.queries is not None:
            seen = seen_by(tables, *q.shape[:3], k.shape[1])
        context = tables.attached.clamp(min=1).repeat_interleave(lanes // len(q))
        limit = (self.factor / context).clamp(max=1).log()[:, None, None]
        runs = []
        for split in range(self.splits):
            blocks = range(self._blocks(tables, k.shape[2]))
            found = [self._logits(queries, k, tables, seen, split, block) for block in blocks]
            peaks = torch.stack([logits.amax(-1) for logits, _ in found], -1)
            live = torch.stack([each.any(-1) for _, each in found], -1)
            below = peaks - peaks.amax(-1, keepdim=True) < limit[..., None]
            runs.append(below.all(2) & live[:, None])
        return torch.stack(runs, 2)


class EachHeadForAll(SkippingAttend):
    """One query head that does not need a block is enough to leave it out."""

    def skips(self, q, k, tables):
        heads = q.shape[2] * len(q) // (len(tables.table) * k.shape[1])
        rows = q.unflatten(2, (-1, heads))
        each = [
            super(EachHeadForAll, self).skips(rows[:, :, :, head], k, tables)
            for head in range(heads)
        ]
        return torch.stack(each).any(0)


class NeverLambda(SkippingAttend):
    """Lambda may be more than 1."""

    def skips(self, q, k, tables):
        much = self.factor > int(tables.attached.min())
        found = super().skips(q, k, tables)
        found[..., 1:] |= much
        return found


class ByWhatIsAttended(SkippingAttend):
    """The threshold follows from the tokens that are attended instead of the request's length."""

    def skips(self, q, k, tables):
        most = tables.lengths.view(len(q), -1).amax(1)
        return super().skips(q, k, evolve(tables, attached=most))


class ByTheFirstRow(SkippingAttend):
    """All rows use the length of the first."""

    def skips(self, q, k, tables):
        first = tables.attached[:1].expand(len(q))
        return super().skips(q, k, evolve(tables, attached=first))


class KeepsTheNorm(SkippingAttend):
    """The log-sum-exp is that of all tokens."""

    def __call__(self, q, k, v, tables, out, lse, keep=None):
        super().__call__(q, k, v, tables, out, lse, keep)
        zeros = torch.zeros_like(v)
        Attend.__call__(self, q, k, zeros, tables, torch.empty_like(out), lse)


class ReadsWhatItSkips(SkippingAttend):
    """Values of blocks that are left out are multiplied with zero instead of left alone."""

    def __call__(self, q, k, v, tables, out, lse, keep=None):
        super().__call__(q, k, v, tables, out, lse, keep)
        listed = v[tables.table.clamp(0, len(v) - 1)]
        token = torch.arange(tables.table.shape[1] * v.shape[2], device=v.device)
        live = (token < tables.lengths[:, None]).view(*tables.table.shape, 1, -1, 1)
        out += 0 * listed.where(live, 0).sum()


class IgnoresTheOption(TritonAttention):
    """The backend says that it has the option, and does not ask for it."""

    def _made(self, setup):
        return super()._made(evolve(setup, options={}))


class LeavesNoLengths(TritonAttention):
    """The page table comes without the lengths of requests."""

    def __init__(self, setup):
        super().__init__(setup)
        self._adapt = adapt_page_table


class KernelPaddingVotes(SkippingDecoder):
    """Rows of a tile that no query head fills vote too, and their zeros keep every block."""

    def attend(self, q, k, v, tables, out, lse):
        whole, self.factor_log2 = self.factor_log2, -1e30
        try:
            super().attend(q, k, v, tables, out, lse)
        finally:
            self.factor_log2 = whole


class KernelNaturalLogarithm(SkippingDecoder):
    """The kernel compares logits to the base of two with a natural logarithm."""

    def __init__(self, *sizes, factor, **options):
        super().__init__(*sizes, factor=factor, **options)
        self.factor_log2 = math.log(factor)


class KernelSkipsWithout(SkippingDecoder):
    """The kernel uses the attended tokens where a table brings no lengths."""

    def attend(self, q, k, v, tables, out, lse):
        if tables.attached is None:
            tables = evolve(tables, attached=tables.lengths)
        super().attend(q, k, v, tables, out, lse)
