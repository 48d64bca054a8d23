"""Time that attaching a model would take here, measured with a part of a host pool."""

from __future__ import annotations

import mmap
import time
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from topkv.errors import HostMemoryError
from topkv_cli import probes

if TYPE_CHECKING:
    import torch

_PROBE = 1 << 30
"""Most bytes that are measured; less where an eighth of the free memory is less."""

_GIB = 1 << 30


def attaching(pool: int | None = None) -> dict[str, Any]:
    """Measure the seconds to touch and register a GiB of host memory, and say what decides them.

    Args:
        pool: bytes of a host pool whose seconds are asked for.
    """
    import torch

    from topkv.kv.host_mapping import cpus_near, threads_of

    available = probes.host_memory()["available_bytes"]
    size = max(min(_PROBE, available // 8) // mmap.PAGESIZE, 1) * mmap.PAGESIZE
    gpu = torch.cuda.is_available()
    device = torch.device("cuda", torch.cuda.current_device()) if gpu else torch.device("cpu")
    cpus = cpus_near(device)
    huge, small = (measure(size, device, cpus, huge) for huge in (True, False))
    seconds = huge["touch"] + (huge["register"] or 0)
    report = {
        "cores": len(cpus),
        "threads": threads_of(cpus),
        "probe_bytes": size,
        "probe_numa_nodes": ", ".join(map(str, huge["nodes"])) or None,
        "touch_seconds_per_gib": round(huge["touch"], 3),
        "touch_seconds_per_gib_without_huge_pages": round(small["touch"], 3),
        "register_seconds_per_gib": round(huge["register"], 3) if gpu else "no CUDA device",
        "seconds_per_gib": round(seconds, 3),
    }
    if pool is not None:
        report |= {"pool_bytes": pool, "pool_seconds": round(seconds * pool / _GIB, 1)}
    return report | {"why": _why(pool, available, gpu)}


def measure(size: int, device: torch.device, cpus: set[int], huge: bool) -> dict[str, Any]:
    """Make ``size`` bytes of host memory as a host pool is made, and let them go.

    Returns:
        seconds per GiB to ``map``, ``touch`` and ``register`` (None where ``device`` is no GPU),
        and ``nodes``, the NUMA nodes that chunks are on.
    """
    import torch

    from topkv.kv.host_mapping import HostMapping, chunks

    if device.type == "cuda":
        torch.cuda.synchronize(device)  # a first call makes a context, which takes long
    times = [time.perf_counter()]
    mapping = HostMapping.of(size)
    try:
        mapping.advise(huge)
        times.append(time.perf_counter())
        mapping.touch(cpus)
        times.append(time.perf_counter())
        code = mapping.register() if device.type == "cuda" else None
        times.append(time.perf_counter())
        address = torch.frombuffer(mapping, dtype=torch.uint8).data_ptr()
        nodes = {probes.numa_node_of(address + first) for first, _ in chunks(address, size)}
    finally:
        mapping.discard()
    if code:
        raise HostMemoryError(f"cudaHostRegister of {size} bytes failed with code {code}")
    mapped, touched, registered = ((end - begin) * _GIB / size for begin, end in pairwise(times))
    return {
        "map": mapped,
        "touch": touched,
        "register": None if code is None else registered,
        "nodes": sorted(node for node in nodes if node is not None),
    }


def _why(pool: int | None, available: int, gpu: bool) -> list[str]:
    """Return a sentence for each thing that decides the time, or makes it longer."""
    from topkv.kv.host_mapping import MOST_THREADS

    near = "near the GPU " if gpu else ""
    reported = [
        f"one thread touches for each core {near}that this process may use, up to {MOST_THREADS}"
    ]
    state = probes.huge_pages()["enabled"]
    if state is None:
        reported.append("this system has no transparent huge pages")
    elif state == "never":
        reported.append(
            "transparent huge pages are off: write madvise to "
            "/sys/kernel/mm/transparent_hugepage/enabled to have them"
        )
    else:
        reported.append("transparent huge pages are given where they are asked for")
    if not gpu:
        reported.append(
            "without a GPU nothing is touched before it is used, and nothing registered"
        )
    if pool is not None and pool > available:
        reported.append(f"the pool does not fit: {available / _GIB:.2f} GiB are available")
    limit = probes.pinned_limit()["limit_bytes"]
    if limit is not None and limit < (pool or _PROBE):
        reported.append(
            f"the limit of locked memory is {limit} bytes (ulimit -l): registering more may be "
            "refused"
        )
    return reported
