"""Check that the device buffers fit, before any is allocated."""

from __future__ import annotations

from attrs import evolve

from topkv import SparseCoordinator
from topkv.config import LoweredConfig
from topkv.errors import DeviceMemoryError


def check_device(config: LoweredConfig, room: int) -> None:
    """Refuse more request slots than fit.

    Args:
        config: of the coordinator.
        room: bytes of the device that it may take.

    Raises:
        DeviceMemoryError: with how many would fit.
    """

    def needs(requests: int) -> int:
        return SparseCoordinator.required_bytes(evolve(config, max_requests=requests)).device

    most = config.max_requests
    if needs(most) <= room:
        return
    fits = 0  # it and fewer fit, and most do not
    while most - fits > 1:
        middle = (fits + most) // 2
        fits, most = (middle, most) if needs(middle) <= room else (fits, middle)
    fix = f"at most max_num_seqs = {fits} would fit" if fits else "not even one request fits"
    taken, left = needs(config.max_requests) / 2**30, room / 2**30
    raise DeviceMemoryError(
        f"the device buffers of {config.max_requests} requests take {taken:.2f} GiB, and "
        f"{left:.2f} GiB are left beside weights and activations; {fix}, or lower buffer, or "
        "raise gpu_memory_utilization"
    )
