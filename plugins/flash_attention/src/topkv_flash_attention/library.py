"""Interface of the backend to a FlashAttention, whichever generation it is.

All of them read keys and values as pages ``[pages, page, Hkv, D]`` of any strides but the last,
so a unit is a page.
"""

from __future__ import annotations

from typing import Protocol

from attrs import frozen
from torch import Tensor

from topkv.types import GroupShape, ModelShape

LATENT, ROPE = 512, 64
"""Elements of a latent row: first the latent part, then the rotated one."""
Result = tuple[Tensor, Tensor]
Capability = tuple[int, int]


@frozen
class Query:
    """Queries: ``main`` meets the keys; of latent attention ``latent`` meets the values too."""

    main: Tensor
    latent: Tensor | None = None


class Library(Protocol):
    """Interface of a FlashAttention library, as the backend calls it.

    Attributes:
        name: where it comes from, and its version where that is known.
        smallest_unit: units are multiples of it.
    """

    @property
    def name(self) -> str: ...

    @property
    def smallest_unit(self) -> int: ...

    def refusals(
        self, model: ModelShape, group: GroupShape, capability: Capability | None
    ) -> list[str]:
        """Reasons why the library cannot serve a group.

        Args:
            model, group: shapes.
            capability: of the device, where there is one.
        """

    def attend(
        self,
        q: Query,
        k: Tensor,
        v: Tensor,
        table: Tensor,
        lengths: Tensor,
        scale: float,
        softcap: float,
        splits: int,
        zeros: Tensor,
        out: Tensor,
    ) -> Result:
        """Decode attention: keys, values and tables as in the hook.

        Args:
            q: parts of ``[N, 1, heads of a lane, D]``, lanes at any stride.
            softcap: see ``ModelShape.softcap``; 0 for plain logits, as in ``chunk``.
            splits: most parts that the tokens of a lane are cut into; 0 leaves it to the library.
            zeros: int32 ``[N]`` of 0.
            out: ``[N, 1, heads, Dv]`` to write to, where the library can; at any stride too.

        Returns:
            ``[N, 1, heads, Dv]``, ``out`` itself where it can, and the fp32 ``[N, heads]``
            natural log-sum-exp. Of lanes without tokens both are anything.
        """

    def chunk(
        self, q: Query, k: Tensor, v: Tensor, scale: float, softcap: float, causal: bool
    ) -> Result:
        """Attention of ``[m, H, D]`` over ``[n, Hkv, D]``; causal: the last row sees all.

        Returns:
            ``[m, H, Dv]`` in the dtype of q, and the fp32 ``[m, H]`` natural log-sum-exp.
        """


def by_pages(rows: Tensor) -> Tensor:
    """``[slots, heads, unit, D]`` as ``[pages, page, heads, D]``."""
    return rows.transpose(1, 2)


def shown(capability: Capability) -> str:
    """Return a compute capability as NVIDIA writes it."""
    return f"{capability[0]}.{capability[1]}"


def head_refusals(model: ModelShape, most: int) -> list[str]:
    """Reasons why the head dim of grouped-query attention cannot be served."""
    if model.head_dim % 8 == 0 and model.head_dim <= most:
        return []
    return [f"head dims are multiples of 8 up to {most}, got {model.head_dim}"]
