"""Check that the device buffers fit, before any is allocated."""

from __future__ import annotations

from attrs import evolve

from topkv import SparseCoordinator
from topkv.config import LoweredConfig
from topkv.errors import DeviceMemoryError


def check_device(config: LoweredConfig, room: int, requests: str, share: str) -> None:
    """Refuse more request slots than fit.

    Args:
        config: of the coordinator.
        room: bytes of the device that it may take.
        requests, share: names that the engine has for its number of requests, and for the share
            of device memory that it may take.

    Raises:
        DeviceMemoryError: with how many would fit.
    """

    def needs(slots: int) -> int:
        return SparseCoordinator.required_bytes(evolve(config, max_requests=slots)).device

    most = config.max_requests
    if needs(most) <= room:
        return
    fits = 0  # it and fewer fit, and most do not
    while most - fits > 1:
        middle = (fits + most) // 2
        fits, most = (middle, most) if needs(middle) <= room else (fits, middle)
    fix = f"at most {requests} = {fits} would fit" if fits else "not even one request fits"
    taken, left = needs(config.max_requests) / 2**30, room / 2**30
    raise DeviceMemoryError(
        f"the device buffers of {config.max_requests} requests take {taken:.2f} GiB, and "
        f"{left:.2f} GiB are left beside weights and activations; {fix}, or lower buffer, or "
        f"raise {share}"
    )
