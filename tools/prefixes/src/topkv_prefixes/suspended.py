"""Requests that are taken out of a coordinator, and put into another one.

``suspend`` gives the numbers and the tensors of a request, block by block, in the form that any
storage takes: names and tensors on a CPU. ``resume`` makes a request of them that goes on as the
first one would have, to the bit. That the right bytes come back is the storage's business.

Device buffers are not among the tensors: they are filled from the host pool again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from attrs import asdict, define, field
from torch import Tensor

from topkv.coordinator import SparseCoordinator
from topkv.errors import CapabilityError
from topkv_prefixes.places import layout_of

Tensors = Mapping[str, Tensor]

BLOCK_BYTES = 128 << 20
"""Most bytes of a block, unless a single page has more."""


@define
class Suspended:
    """The numbers of a request, all of them fit for JSON.

    Attributes:
        layout: all that another coordinator must have in common with the first one, see
            ``topkv_prefixes.places.layout_of``.
        length: tokens.
        prompt, fresh, settled, dropped, firm: see ``topkv.requests.requests.Requests``.
    """

    layout: dict[str, Any]
    length: int
    prompt: int
    fresh: bool
    settled: list[int] = field(factory=list)
    dropped: int = 0
    firm: int = 0

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def suspend(
    coordinator: SparseCoordinator, slot: int
) -> tuple[Suspended, Iterator[dict[str, Tensor]]]:
    """Return everything that a request consists of. It stays, and must not change meanwhile.

    Returns:
        Its numbers; and its tensors, copies on a CPU: a block of tensors keyed by slot, and then
        blocks of pages in order.

    Raises:
        RequestError: the slot holds no request, or a forward is open.
    """
    coordinator.flush(slot)
    requests = coordinator.requests
    state = Suspended(
        layout=layout_of(coordinator.config, coordinator.manager),
        length=int(requests.length[slot]),
        prompt=int(requests.prompt[slot]),
        fresh=bool(requests.fresh[slot]),
        settled=requests.settled[:, slot].tolist(),
        dropped=int(requests.dropped[slot]),
        firm=int(requests.firm[slot]),
    )
    coordinator.manager.synchronize()
    return state, _blocks(coordinator, slot)


def resume(coordinator: SparseCoordinator, state: Suspended, blocks: Iterable[Tensors]) -> int:
    """Begin a request that goes on where the suspended one stopped.

    Args:
        state, blocks: as ``suspend`` gave them; a block is let go of before the next is asked for.

    Returns:
        Its slot.

    Raises:
        CapabilityError: this coordinator lays out requests in another way, or tensors are missing
            or have other shapes; nothing has changed.
        DeviceMemoryError, HostMemoryError: no room; nothing has changed.
    """
    check_layout(coordinator, state)
    slot = coordinator.request_begin()
    try:
        coordinator.reserve(slot, state.length)
        coordinator.manager.synchronize()
        expected = _places(coordinator, slot)
        for number, block in enumerate(blocks):
            _write(next(expected, {}), block, number)
        left = sum(1 for _ in expected)
        if left:
            raise CapabilityError("the request cannot be resumed", [f"{left} blocks are missing"])
        requests = coordinator.requests
        requests.length[slot], requests.prompt[slot] = state.length, state.prompt
        requests.fresh[slot], requests.settled[:, slot] = state.fresh, state.settled
        requests.dropped[slot], requests.firm[slot] = state.dropped, state.firm
        requests.restore(slot)
    except BaseException:
        coordinator.request_end(slot)
        raise
    return slot


def check_layout(coordinator: SparseCoordinator, state: Suspended) -> None:
    """Refuse a request of another layout.

    Raises:
        CapabilityError: with everything that differs.
    """
    ours: dict[str, Any] = layout_of(coordinator.config, coordinator.manager)
    reasons = []
    for name in sorted({*ours, *state.layout}):
        one, other = state.layout.get(name), ours.get(name)
        if one != other:
            reasons.append(f"{name}: it was suspended with {one}, this model has {other}")
    if len(state.settled) != len(coordinator.config.groups):
        reasons.append(f"settled: expected a number for each group, got {state.settled}")
    if reasons:
        raise CapabilityError("the request cannot be resumed", reasons)


def _blocks(coordinator: SparseCoordinator, slot: int) -> Iterator[dict[str, Tensor]]:
    for places in _places(coordinator, slot):
        yield {name: tensor[at].cpu() for name, (tensor, at) in places.items()}


def _places(coordinator: SparseCoordinator, slot: int) -> Iterator[dict[str, tuple[Tensor, Any]]]:
    """Yield the places of each block's tensors: a tensor, and the part of it."""
    manager = coordinator.manager
    first: dict[str, tuple[Tensor, Any]] = {}
    for layer, path in zip(coordinator.model.layers, coordinator.layers, strict=True):
        for name, rows in (path.selector.kept() if path.selector else {}).items():
            first[f"{layer}.{name}"] = rows, slot
    paged: dict[str, tuple[Tensor, bool]] = {}
    for index, (store, pools) in enumerate(
        zip(manager.stores, manager.representations, strict=True)
    ):
        paged[f"group{index}"] = store.entries, False
        for spec in pools.specs:
            name = f"group{index}.{spec.name}"
            if spec.grain == "request":
                first[name] = pools.pools[spec.name], (slice(None), slot)
            else:
                paged[name] = pools.pages(spec), True  # the layers come first
    yield first
    pages = coordinator.requests.pages.of(slot)
    each = sum(
        tensor[:, 0].nbytes if behind else tensor[0].nbytes for tensor, behind in paged.values()
    )
    count = max(1, BLOCK_BYTES // max(1, each))
    for start in range(0, len(pages), count):
        some = torch.tensor(pages[start : start + count])
        yield {
            name: (
                tensor,
                (slice(None), some.to(tensor.device)) if behind else some.to(tensor.device),
            )
            for name, (tensor, behind) in paged.items()
        }


def _write(places: Mapping[str, tuple[Tensor, Any]], block: Tensors, number: int) -> None:
    """Put a block where it belongs, if all of it fits."""
    reasons = []
    for name in sorted({*places, *block}):
        if name not in places or name not in block:
            what = "missing" if name in places else "unknown"
            reasons.append(f"block {number}: tensor {name} is {what}")
            continue
        tensor, at = places[name]
        expected, got = tensor[at], block[name]
        if expected.shape != got.shape or expected.dtype != got.dtype:
            reasons.append(
                f"block {number}: tensor {name} must be {list(expected.shape)} of "
                f"{expected.dtype}, got {list(got.shape)} of {got.dtype}"
            )
    if reasons:
        raise CapabilityError("the request cannot be resumed", reasons)
    for name, (tensor, at) in places.items():
        tensor[at] = block[name].to(tensor.device)
