"""Sticky selection: units that are on the device already get a bonus.

Ids near rank K are often interchangeable, and one that has to be fetched costs a load. With a
bonus d, in scores that are logarithms, an absent unit is preferred to a resident one only if it is
worth more than ``e ** d`` times as much. Selections then depend on what was selected before and on
the size of the buffer: they are approximate, and the parameter of algorithms that have it is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.types import LayerView


def resident(layer: LayerView) -> Tensor:
    """Return the units on the device, bool ``[N, group.max_units]``, with N lanes of the step.

    These are units in the LRU buffer of the lane, by ``layer.held``, and units in the ring, by the
    largest length of the request so far. Where a stage turns tokens into units, a token counts by
    its stored unit. Values of units behind the tail and of padded rows mean nothing.
    """
    group, step = layer.group, layer.step
    each, rows = _units_of_stored(layer), step.slots.clamp(min=0).long()
    stored = torch.arange(group.max_units, device=rows.device) // each
    newest = (step.high - 1) // (group.unit * each)
    in_ring = stored > (newest - group.ring_slots // each)[:, None]
    held = layer.held.unflatten(0, (-1, group.lane_heads))[rows] >= 0
    found: Tensor = held[:, :, stored] | in_ring[:, None]
    return found.flatten(0, 1)


def prefer_resident(
    layer: LayerView, scores: Tensor, counts: Tensor, bonus: float, *, impl: str
) -> None:
    """Add ``bonus`` to the scores of selectable units that are ``resident``, in place.

    Comes between scores and top-k; +inf of forced units stays. A bonus of 0 does nothing and
    launches nothing. No host sync, no allocation by the kernel; may be captured in a CUDA graph.

    Args:
        layer: the algorithm's view, as a hook gets it.
        scores: fp32 ``[N, U]`` of the lanes of the step, U at least ``group.max_units``; columns
            adjacent. Log probabilities or logits of units, for the bonus to be what it says.
        counts: int32 ``[N]``: units ``0 .. counts - 1`` of a lane are selectable, none in padded
            rows. Others keep their scores.
        bonus: 0 or more, in the units of the scores.
        impl: ``"reference"`` or ``"triton"``.

    Raises:
        ValueError: shapes, dtypes or strides do not fit, or ``impl`` is unknown.
    """
    if bonus == 0:
        return
    _check(layer, scores, counts, impl)
    if impl == "reference":
        units = layer.group.max_units
        selectable = torch.arange(units, device=scores.device) < counts[:, None]
        scores[:, :units] += bonus * (selectable & resident(layer))
        return
    from topkv_authoring import sticky_kernels

    sticky_kernels.prefer_resident(layer, scores, counts, bonus, _units_of_stored(layer))


def _units_of_stored(layer: LayerView) -> int:
    """Units of the algorithm in a stored one: 1, unless a stage turns tokens into units."""
    return layer.group.max_units // layer.held.shape[1]


def _check(layer: LayerView, scores: Tensor, counts: Tensor, impl: str) -> None:
    group, held = layer.group, layer.held
    lanes, units = layer.step.batch * group.lane_heads, group.max_units
    if impl not in ("reference", "triton"):
        raise ValueError(f"sticky: impl must be 'reference' or 'triton', got {impl!r}")
    if held.dim() != 2 or len(held) != group.max_lanes or not 0 < held.shape[1] <= units:
        raise ValueError(
            f"sticky: layer.held must be [{group.max_lanes}, stored units], got "
            f"{list(held.shape)}; take the view that the hook was given"
        )
    narrow = scores.dim() != 2 or scores.shape[1] < units
    if narrow or len(scores) != lanes or counts.shape != (lanes,):
        raise ValueError(
            f"sticky: expected scores [{lanes}, {units} or more] and counts [{lanes}] of the "
            f"lanes of the step, got {list(scores.shape)} and {list(counts.shape)}"
        )
    dtypes = (scores.dtype, counts.dtype, held.dtype)
    if dtypes != (torch.float32, torch.int32, torch.int32):
        raise ValueError(
            "sticky: scores, counts and held must be of torch.float32, torch.int32 and "
            f"torch.int32, got {', '.join(map(str, dtypes))}"
        )
    if scores.stride(1) != 1 or counts.stride(0) != 1 or held.stride(1) != 1:
        raise ValueError("sticky: the last dimension of every tensor must have stride 1")
