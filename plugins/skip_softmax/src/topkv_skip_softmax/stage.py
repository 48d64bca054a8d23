"""Skip Softmax as a stage, which a user asks for; the backend's attention carries it out.

Yuan et al., "BLASST: Dynamic Blocked Attention Sparsity via Softmax Thresholding", 2025,
arXiv 2512.12087. Differences from it are in the README.
"""

from __future__ import annotations

from topkv import hookimpl
from topkv.hooks.stage import StageSetup, StageSpec


class SkipSoftmax:
    """The option ``skip_softmax`` of attention, with the parameter ``factor``.

    A backend that has it goes through the keys of a lane in blocks, in the order of its table.
    With m the largest logit of a query head so far, the block included, and L the length of the
    row's request in tokens, it leaves a block out of softmax and sum iff the largest logit of the
    block is less than ``m + ln(min(1, factor / L))`` for every query head of the kv-head. The
    values of such a block have no influence, and the log-sum-exp is that of the blocks that are
    left. The blocks, and parts that are gone through side by side, are the backend's own.
    """

    def __init__(self, setup: StageSetup) -> None:
        """There is nothing to do: the core hands the parameters to the backend."""

    @hookimpl
    def spec(self) -> StageSpec:
        return StageSpec()
