"""KeyDiff as a stage: a long answer keeps the pages whose keys differ most from the others.

KeyDiff (Park et al., arXiv 2504.15364), whole pages at a time. Differences from the paper are in
the README.
"""

from __future__ import annotations

from torch import Tensor

from topkv.errors import ConfigError
from topkv.hooks.algorithm import RepresentationSpec
from topkv.hooks.stage import StageSetup
from topkv.parameters import values
from topkv.types import LayerView
from topkv_authoring.selectors import KeepsUnits, key_refusals
from topkv_dropping.dropping import Keeping
from topkv_dropping.stage import ScoresPages
from topkv_keydiff import reference


class KeyDiff(KeepsUnits, ScoresPages):
    """Says what pages are worth by how little their keys are like the mean of all.

    Of every unit and kv-head it keeps the mean direction of the keys, in the dtype of the model:
    a function of the keys of the unit alone. A page is worth the mean of ``-cos(k, a)`` over its
    tokens, with a the sum of the directions of all keys in full pages: see ``reference``.

    It selects nothing and corrects nothing, and goes with any algorithm that keeps nothing else
    of a request than what stands in its pages.

    Attributes:
        keeping: what stays, by the parameters.
    """

    def __init__(self, setup: StageSetup) -> None:
        """Raise ConfigError with all reasons."""
        self.model, self.group = setup.model, setup.group
        reasons = key_refusals(self.model, self.group, "directions are")
        if reasons:
            raise ConfigError(type(self).__name__, reasons)
        self.keeping = Keeping(**values(setup.params))

    def representations(self) -> list[RepresentationSpec]:
        shape = (self.model.num_kv_heads, self.model.head_dim)
        return [RepresentationSpec("directions", "unit", shape, self.model.dtype)]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        return {"directions": reference.directions(keys, valid)}

    def keep(
        self, layer: LayerView, slot: int, length: int, position: int, scores: Tensor
    ) -> None:
        group, pages = self.group, scores.shape[1]
        rows = layer.step.page_table[slot, :pages].long()
        pool = layer.pools["directions"]
        # Page by page, [pages, units of a page, Hkv, D].
        kept = pool.unflatten(0, (-1, group.units_per_page))[rows].float().mean(1)
        scores.copy_(reference.difference(kept.unflatten(1, (group.lane_heads, -1))))
