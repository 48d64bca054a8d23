"""Head sparsity: lanes whose scores are flat select fewer tokens. Off unless asked for.

Our reading of the "H-sparsity" that descriptions of SGLang's backend mention; neither paper nor
code of Double Sparsity has it.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv import hookimpl
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.ops.topk import topk
from topkv.types import LayerView
from topkv_double_sparsity import reference
from topkv_double_sparsity.algorithm import DoubleSparsity


def flatness(logits: Tensor, closed: Tensor, lane_heads: int) -> Tensor:
    """How flat the scores of each lane are, fp32 ``[n * lane_heads]``, at most 1.

    The mean over the query heads of a lane of the entropy of their softmax over the sample
    (``reference.sampled``), over the log of the size of the sample, its maximum.

    Args:
        logits: fp32 ``[n, H, U]``, scaled; what stands behind ``closed`` has no influence.
        closed: ``[n]`` selectable tokens.
        lane_heads: lanes of a row.
    """
    sample = reference.sampled(closed, logits.shape[-1])
    seen = logits.masked_fill(~sample[:, None], float("-inf"))
    entropy = torch.special.entr(seen.softmax(-1)).sum(-1).unflatten(1, (lane_heads, -1)).mean(2)
    return (entropy / sample.sum(-1).clamp(min=2).float().log()[:, None]).flatten()


def join(ids: Tensor, few: Tensor) -> None:
    """Selections ``[N, K]`` with those of flat lanes: of each row one of the two is empty."""
    head = ids[:, : few.shape[1]]
    torch.maximum(head, few, out=head)


class HeadSparsity(DoubleSparsity):
    """Double Sparsity whose flat lanes select ``head_budget`` of K.

    A lane is flat if its ``flatness`` exceeds ``head_sparsity`` and K does not cover its tokens.
    The ids behind its selection are -1.
    """

    @hookimpl
    def retrieve_topk(
        self, layer: LayerView, q: Tensor, weights: Tensor | None, ids: Tensor
    ) -> None:
        queries = self._queries(q)
        scores, closed = self.score(layer, queries)
        # A lane has tokens in one of the two counts, so one of the two selections is empty.
        closed, flat = self._parted(layer, queries, closed)
        topk(scores, closed, ids, impl="reference")
        few = ids.new_empty(len(ids), self.settings.flat_select)
        topk(scores, flat, few, impl="reference")
        join(ids, few)

    def _parted(self, layer: LayerView, q: Tensor, closed: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens of lanes that select K, and of flat lanes, int32 ``[N]`` each."""
        logits, tokens = self._logits(layer, q)
        flat = flatness(logits, tokens, self.group.lane_heads) > self.settings.flat
        flat &= closed > self.group.select
        return torch.where(flat, 0, closed), torch.where(flat, closed, 0)


def make(setup: AlgorithmSetup) -> DoubleSparsity:
    """The reference: with head sparsity where the parameters ask for it."""
    asked = setup.params.get("head_sparsity") is not None
    return (HeadSparsity if asked else DoubleSparsity)(setup)
