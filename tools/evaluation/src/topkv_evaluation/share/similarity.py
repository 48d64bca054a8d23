"""What a layer finds of its attention mass in the selection of a layer before it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from topkv.coordinator import SparseCoordinator
from topkv.layers import LayerPath
from topkv_evaluation.eval import recall

TINY = 1e-30
"""Of a mass that has vanished nothing can be found, and no ratio is NaN."""


def held_in(coordinator: SparseCoordinator, paths: Sequence[LayerPath], slot: int) -> Tensor:
    """Softmax mass of each layer in the tokens that each layer attended to, after a step.

    Lane h of one layer goes by lane h of the other, as where the selection is shared.

    Args:
        coordinator: between two forwards.
        paths: of ``recall.watch``, of one group whose layers all select; the step was watched.
        slot: of the request, the only one of the step.

    Returns:
        fp32 ``[F, S, lanes]``: of layer S in the selection of layer F, its newest unit included.
    """
    coordinator.flush(slot)
    chosen = torch.stack([recall.chosen_of(path, coordinator, slot, 0) for path in paths])
    mass = torch.stack([recall.mass_of(path, coordinator, slot, 0) for path in paths])
    return torch.einsum("fln,sln->fsl", chosen.float(), mass)


@dataclass(frozen=True)
class Decoded:
    """What was seen of the queries of a prompt that count.

    Attributes:
        held: of each ``held_in``.
        effects: of each ``effects.effects_of``, by layer that is sparse.
    """

    held: list[Tensor]
    effects: list[list[float]]


@dataclass(frozen=True)
class Shared:
    """What sharing leaves, by the layer F that selects and the layer S that shares.

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
        """From all prompts, each of which has at least one query."""
        held = [torch.stack(prompt.held) for prompt in prompts]  # [queries, F, S, lanes]
        owns = [each.diagonal(dim1=1, dim2=2).mT[:, None] for each in held]
        ratios = [each / own.clamp_min(TINY) for each, own in zip(held, owns, strict=True)]
        least = [ratio.amin(0).mean(-1) for ratio in ratios]
        effects = [torch.tensor(prompt.effects).mean(0) for prompt in prompts]
        mass = [each.mean((0, -1)) for each in held]
        return cls(*(torch.stack(each).mean(0) for each in (least, mass, effects)))

    def losses(self) -> Tensor:
        """``[F, S]``: what S does not find, weighed by its effect."""
        return (1 - self.similarity) * self.effect
