"""ParisKV's codes: the signs of a rotated key say which way it points, a number how far.

ParisKV rotates keys at random and keeps the signs of the coordinates, from which candidates are
found without training and without clusters. Here these signs are scored as RaBitQ does (Gao and
Long, SIGMOD 2024, arXiv 2405.12497), and the best tokens are the selection: see the README for
what is the paper's, and what is not.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from topkv.hooks.algorithm import AlgorithmSetup, RepresentationSpec
from topkv_authoring import outliers
from topkv_authoring.selectors import ScoredUnits
from topkv_pariskv import reference
from topkv_pariskv.entry import ParisParams


class ParisKV(ScoredUnits):
    """Selects the tokens of the highest mean softmaxed estimate of q·k, kept as its logarithm.

    Of a key the few pairs of channels that outweigh all others, if it has such, are kept by
    themselves (``topkv_authoring.outliers``), o, and of the rest r one bit for each coordinate of
    the rotated rest z, its sign, and the factor ``|r|^2 / |z|_1``. A query head estimates q·k by
    q·o and factor times ``sum_i sign(z_i) rotate(q)_i``, which is exact for a query parallel
    to r. What is made of the estimates of a lane's query heads is said in
    ``ScoredUnits.combine``.

    Codes are a function of the key alone: token by token or at once, the bits are the same. Of
    equal scores the lower token wins. Keys are finite, and below 2**60 in magnitude.

    Attributes:
        signs: of the rotation, fp32 ``[P]`` on the device.
    """

    params: ParisParams

    def __init__(self, setup: AlgorithmSetup) -> None:
        super().__init__(setup)
        self.signs = reference.flips(self.group.head_dim).to(setup.device)

    def refusals(self) -> list[str]:
        return outliers.refusals(self.model.head_dim)

    def representations(self) -> list[RepresentationSpec]:
        heads, wide = self.group.num_kv_heads, reference.width(self.group.head_dim)
        return [
            RepresentationSpec("codes", "unit", (heads, wide // reference.BITS), torch.int16),
            RepresentationSpec("factor", "unit", (heads,), torch.bfloat16),
            RepresentationSpec("outliers", "unit", (heads, self.params.outliers), torch.int32),
        ]

    def represent(self, keys: Tensor, valid: Tensor) -> dict[str, Tensor]:
        keys = keys[:, 0]  # the only key of a unit is valid
        made = reference.encode(keys, self.signs, self.params.outliers)
        return dict(zip(("codes", "factor", "outliers"), made, strict=True))

    def score(self, q: Tensor, kept: Mapping[str, Tensor]) -> Tensor:
        codes, factor, words = (kept[spec.name] for spec in self.representations())
        return reference.head_scores(q, codes, factor, words, self.signs) * self.model.scale
