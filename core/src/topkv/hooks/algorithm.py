"""Hook specs of a selection algorithm.

The core makes one instance per group: ``factory(model, group, params, impl, device)`` with a
``ModelShape``, the ``GroupShape``, the lowered parameters (a dict with every parameter
of the entry), ``"reference"`` or ``"triton"``, and a ``torch.device``. An instance keeps no
state of a request: all of that lives in the representation pools of ``spec``, which the
core allocates and passes as ``layer.pools``.

Of a model with an indexer (``capabilities.needs_index``, ``ModelShape.indexer``) keys are index
keys ``[.., 1, D^I]``, queries index queries ``[.., H^I, D^I]``, and ``native`` the weights of the
index heads, see ``topkv.types.Index``.

``update`` and ``retrieve_topk`` are hot: no host sync, no allocation that a CUDA graph cannot
replay, no shape that depends on data, no Python per request. They run on the current stream.
Padded rows (slot -1) read and write nothing but their own rows of ``ids``.
"""

from __future__ import annotations

from torch import Tensor

from topkv.hooks.registry import hookspec, optional
from topkv.types import AlgorithmSpec, LayerView


@hookspec(firstresult=True)
def spec() -> AlgorithmSpec:  # type: ignore[empty-body]
    """Representations, tail rule and settle period. Cold, before any allocation."""


@hookspec(firstresult=True)
def construct(layer: LayerView, slot: int, start: int, k: Tensor, q: Tensor, lse: Tensor) -> None:
    """Write the representations of the units that a prefill chunk touched. Cold.

    Args:
        layer: the layer.
        slot: request slot (host int). Host ids follow from ``layer.step.page_table[slot]``.
        start: position of the first key, on a unit boundary.
        k: ``[m, Hkv, D]`` post-RoPE keys of positions ``start .. start + m``: the chunk and,
            before it, what the open unit already held. The last unit may be partial.
        q: ``[c, H, D]`` post-RoPE queries of the chunk (the last c positions).
        lse: fp32 ``[c, H]`` natural log-sum-exp of their attention; empty for an algorithm that
            has ``retrieve_prompt``, which is asked before attention.

    Recomputes every touched unit from ``k``, never accumulates, so that a unit that was
    rolled back and written again keeps nothing of what was rejected.
    """


@hookspec(firstresult=True)
def settle(layer: LayerView, slot: int, since: int, length: int, history: object) -> None:
    """Close a prefill or a period. Cold, outside graphs.

    Args:
        layer: the layer.
        slot: request slot.
        since: first position that is new since the last settle.
        length: tokens of the request.
        history: iterable of ``(start, k [m, Hkv, D], v [m, Hkv, D])`` blocks from position
            ``since`` rounded down to a unit, or from 0 where the spec says ``settle_whole``;
            reading it streams them from the host.
    """


@hookspec(firstresult=True)
def update(layer: LayerView, k: Tensor) -> None:
    """Follow the token that each decode row appended. Hot.

    Args:
        layer: the layer; the open unit of a row is ring position
            ``((length - 1) // unit) % T`` and holds ``(length - 1) % unit + 1`` tokens, the
            new one included. Rows with ``appended == 0`` change nothing.
        k: ``[B, Hkv, D]`` post-RoPE keys of the new tokens.

    Recomputes the open unit from the ring. An algorithm that takes units of one token alone has
    it in ``k``, and no ring where the core regranulates its selections: its ``layer.group`` is
    then in tokens, whatever the units are that are stored and attended.
    """


@hookspec(firstresult=True)
def retrieve_topk(layer: LayerView, q: Tensor, native: Tensor | None, ids: Tensor) -> None:
    """Select. Hot.

    Args:
        layer: the layer. Selectable are closed units ``0 .. (length - 1) // unit - 1`` of each
            row (``0 .. length - 1`` where the tail is selectable).
        q: ``[B, Q, H, D]`` post-RoPE queries.
        native: fp32 ``[B, H^I]`` of a model with an indexer, else None.
        ids: int32 ``[N, K]``, owned by the core, every element to be written: logical unit ids,
            unique in a row, -1 anywhere, all -1 in padded rows. Lane ``b * lane_heads + head``.
    """


@optional
@hookspec(firstresult=True)
def retrieve_prompt(
    layer: LayerView, slot: int, start: int, q: Tensor, native: Tensor, ids: Tensor
) -> None:
    """Select for the rows of a prompt chunk, where the model itself is sparse there too. Cold.

    Called after ``construct`` of the chunk, and only where a row can reach more than K tokens.

    Args:
        layer: the layer; its unit is 1.
        slot: request slot.
        start: position of the first row.
        q: ``[m, H^I, D^I]`` index queries of positions ``start ..``.
        native: fp32 ``[m, H^I]``.
        ids: int32 ``[m, K]``, owned by the core, every element to be written: of row i unique
            tokens of ``0 .. start + i``, -1 anywhere.
    """
