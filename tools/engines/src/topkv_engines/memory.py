"""Check that the device buffers fit before any is allocated, and use what is left for prompts."""

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
        return _needs(evolve(config, max_requests=slots))

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


def with_prompt_buffer(config: LoweredConfig, room: int) -> LoweredConfig:
    """Return the configuration with a prompt buffer of up to the longest request, in half of what
    the device buffers leave: the other half is for blocks of history and whatever else a forward
    takes for a while.

    Args:
        config: of the coordinator.
        room: bytes of the device that it may take.
    """
    few = evolve(config, prefill_buffer_tokens=16)
    none = evolve(config, prefill_buffer_tokens=0)
    least = _needs(none)
    fitting = (room - least) // 2 * 16 // (_needs(few) - least)
    tokens = min(config.max_request_tokens, max(fitting, 0) // 16 * 16)
    return evolve(config, prefill_buffer_tokens=tokens)


def _needs(config: LoweredConfig) -> int:
    return SparseCoordinator.required_bytes(config).device
