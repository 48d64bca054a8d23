"""Attention mass that a layer finds in the selection of a layer before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topkv.coordinator import SparseCoordinator
from topkv.decode.layers import LayerPath
from topkv_evaluation.eval import recall

TINY = 1e-30
"""Lower bound of a mass that ratios are taken of, so that no ratio is NaN where it vanishes."""


def held_in(coordinator: SparseCoordinator, paths: Sequence[LayerPath], slot: int) -> Tensor:
    """Return each layer's softmax mass in the tokens that each layer attended to, after a step.

    Lane h of one layer uses the tokens of lane h of the other, as where the selection is shared.

    Args:
        coordinator: between two forwards.
        paths: paths of ``recall.watch``, of one group whose layers all select; the step was
            watched.
        slot: slot of the request, the only one of the step.

    Returns:
        fp32 ``[F, S, lanes]``: mass of layer S in the selection of layer F, newest unit included.
    """
    coordinator.flush(slot)
    chosen = torch.stack([recall.chosen_of(path, coordinator, slot, 0) for path in paths])
    mass = torch.stack([recall.mass_of(path, coordinator, slot, 0) for path in paths])
    return torch.einsum("fln,sln->fsl", chosen.float(), mass)


@dataclass(frozen=True)
class Decoded:
    """Measurements of a prompt's queries that count.

    Attributes:
        held: ``held_in`` of each query.
        effects: ``effects.effects_of`` of each query, by sparse layer.
    """

    held: list[Tensor]
    effects: list[list[float]]


@dataclass(frozen=True)
class Shared:
    """Mass that sharing leaves, by the layer F that selects and the layer S that shares.

    Attributes:
        similarity: ``[F, S]``, mass of S in the selection of F over its mass in its own, of the
            query for which that is least; mean over lanes, then over prompts. Above 1 where F
            finds more.
        mass: ``[F, S]``, mass of S in the selection of F, mean over queries, lanes and prompts.
        effect: ``[S]``, how far the attention of S turns the residual stream, mean over queries
            and prompts.
    """

    similarity: Tensor
    mass: Tensor
    effect: Tensor

    @classmethod
    def of(cls, prompts: Sequence[Decoded]) -> Shared:
        """Average over all prompts, each of which has at least one query."""
        held = [torch.stack(prompt.held) for prompt in prompts]  # [queries, F, S, lanes]
        owns = [each.diagonal(dim1=1, dim2=2).mT[:, None] for each in held]
        ratios = [each / own.clamp_min(TINY) for each, own in zip(held, owns, strict=True)]
        least = [ratio.amin(0).mean(-1) for ratio in ratios]
        effects = [torch.tensor(prompt.effects).mean(0) for prompt in prompts]
        mass = [each.mean((0, -1)) for each in held]
        return cls(*(torch.stack(each).mean(0) for each in (least, mass, effects)))

    def losses(self) -> Tensor:
        """Return the mass that S does not find, weighed by its effect, ``[F, S]``."""
        return (1 - self.similarity) * self.effect
