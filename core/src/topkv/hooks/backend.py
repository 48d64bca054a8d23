"""Hook specs of an attention backend.

The core makes one instance per group: ``factory(setup)`` with a ``BackendSetup``; an entry names a
factory for each implementation. It may allocate scratch for at most ``max_batch`` decode rows
when it is made, not later.

K and V come as strided views ``[slots, heads_per_lane, unit, D]`` of the pool that holds them,
the device buffer or, for streamed layers, mapped host memory; only the last dimension is
certain to be contiguous. The byte offset of an element may exceed 2**31.

Of latent attention (``ModelShape.attention == "mla"``) queries have ``head_dim`` elements and
outputs ``out_dim``. ``attend`` gets the stored rows, ``[slots, 1, unit, group.head_dim]`` of
``group.dtype``, as ``k`` and as ``v``; ``prefill`` gets decoded ones, ``v`` a view of ``k``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import torch
from attrs import field, frozen
from torch import Tensor

from topkv.plugins.discovery import hookspec, optional
from topkv.types import GroupShape, LayerView, ModelShape, Plan, Tables


@frozen
class BackendSetup:
    """The argument of a backend's factory.

    Attributes:
        model: geometry of the attention layers.
        group: the group.
        device: where it will run.
        max_batch: most decode rows of a step.
        max_queries: most queries Q of a row.
        group_size: query heads per kv-head that ``attend`` is called with: those of the model, and
            further ones that a stage of the group adds.
        options: options of decode attention that stages of the group ask for, by name, each with
            the parameters of its stage (``StageSetup.params``): no name but of
            ``Capabilities.options`` of the entry. The package of the stage says what a name means.
            Dense groups have none.
    """

    model: ModelShape
    group: GroupShape
    device: torch.device
    max_batch: int
    group_size: int
    options: Mapping[str, Any] = field(factory=dict)
    max_queries: int = 1


class Backend(Protocol):
    """An attention backend of one group."""

    @hookspec
    def adapt_page_table(self, layer: LayerView, plan: Plan, tables: Tables) -> None:
        """Turn a plan into the table that ``attend`` reads. Hot.

        For lane n of slot s and head h, with ``lane_row = s * lane_heads + h``:
        ``table[n, i] = lane_row * (C + T) + plan.slots[n, i]`` for ``i < count``, where only
        ``count`` says which slots are used. Behind them stand the units that the newest tokens of
        the row are in, one for each of its ``queries`` (1 where ``tables.queries`` is None):
        ``u = (length - queries) // unit .. (length - 1) // unit``, in order, as
        ``lane_row * (C + T) + C + u % T``; mostly the tail unit alone. With the first of them
        ``lengths[n] = count * unit + length - first * unit``. Padded rows get length 0. Where
        the tail is selectable and Q is 1 (``table`` has K columns) nothing is appended.

        Args:
            layer: the layer.
            plan: the plan; ``plan.slots`` is compacted.
            tables: to be filled: ``table`` int32 ``[N, W]``, see ``topkv.types.Tables``, where
                columns behind the last used one become 0, and ``lengths`` int32 ``[N]``. Both are
                the core's, and ``queries`` is only read. What the backend's library wants along
                with them it may leave in ``attached``, for ``attend`` of the same step.
        """

    @hookspec
    def attend(
        self, q: Tensor, k: Tensor, v: Tensor, tables: Tables, out: Tensor, lse: Tensor
    ) -> None:
        """Decode attention over the listed units, in place: no gather copy. Hot.

        Args:
            q: ``[B, Q, H, D]`` queries, rows at any stride. Lane ``b * lane_heads + h`` has the
                heads ``h * (H / lane_heads) ..``; those of one kv-head are adjacent. Where Q is
                larger than 1, query i of row b sees the first
                ``lengths[n] - (tables.queries[b] - 1 - i)`` tokens of its lane's list, and queries
                from ``tables.queries[b]`` on are padding, of any bits.
            k, v: ``[slots, heads_per_lane, unit, D]`` strided views.
            tables: ``table`` int32 ``[N, W]`` indices into the first dimension of ``k`` and ``v``;
                ``lengths`` int32 ``[N]``: the first ``lengths[n]`` tokens of the units in table
                order are attended, and all units but the last are full. ``attached`` is what
                ``adapt_page_table`` has left there, and None in dense layers.
            out: ``[B, Q, H, Dv]`` in the dtype of q, rows at any stride, owned by the caller.
            lse: fp32 ``[B, Q, H]``, contiguous: natural log-sum-exp of the scaled logits.

        A lane of length 0 gives ``out`` 0 and ``lse`` -inf, and so does a query that is padding.
        Every element is written. What the
        buffers hold behind ``lengths`` (NaN, say) has no influence.
        """

    @hookspec
    def prefill(
        self, q: Tensor, k: Tensor, v: Tensor, q_start: int, k_start: int, out: Tensor, lse: Tensor
    ) -> None:
        """Causal attention of a prefill chunk over one contiguous block of keys. Cold.

        Args:
            q: ``[m, H, D]`` queries of positions ``q_start ..``.
            k, v: ``[n, Hkv, D]`` keys and values of positions ``k_start ..``; only the last
                dimension is certain to be contiguous.
            q_start, k_start: host ints. Query i sees key j iff ``k_start + j <= q_start + i``.
            out: ``[m, H, Dv]``, fp32 or in the dtype of q, rows at any stride, owned by the
                caller.
            lse: fp32 ``[m, H]``, contiguous: natural log-sum-exp; -inf, out 0, if no key is seen.

        The core streams history block by block, the chunk's own keys behind the last of them, and
        merges the results by their LSE. Of a single block it takes the result as it is.
        """

    @optional
    @hookspec
    def prefill_selected(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        q_start: int,
        k_start: int,
        ids: Tensor,
        out: Tensor,
        lse: Tensor,
    ) -> None:
        """Attend as ``prefill``, but a query sees only the keys that it has selected. Cold.

        Args:
            q, k, v, q_start, k_start, out, lse: as in ``prefill``.
            ids: int32 ``[m, W]`` columns of k, each once, -1 anywhere, contiguous; what causality
                forbids stays forbidden. ``topkv.ops.chunk_attention.kept`` makes a mask of them.
        """
