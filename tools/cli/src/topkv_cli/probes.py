"""Probes of ``topkv doctor``. Each stands alone: one that fails says so in its place."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import resource
from collections.abc import Callable
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from topkv_cli import memory

_SYS = Path("/sys")
_PROC = Path("/proc")

_MOVE_PAGES = {"x86_64": 279, "aarch64": 239}
"""Number of the ``move_pages`` system call by machine."""


def attempt(probe: Callable[[], Any]) -> Any:
    """Return the result of a probe, or why it has none."""
    try:
        return probe()
    except (Exception, SystemExit) as error:
        return {"problem": f"{type(error).__name__}: {error}"}


def _version(module: str) -> str:
    return str(import_module(module).__version__)


def host_memory() -> dict[str, Any]:
    """Return the memory that can be taken, and the control group that limits it, if any."""
    found = memory.host_memory(_PROC, _SYS / "fs/cgroup")
    sizes = {"total_bytes": found.total, "available_bytes": found.available}
    return sizes if found.limit is None else sizes | {"limit_bytes": found.limit}


def numa_nodes() -> list[dict[str, Any]]:
    """Return the memory of each NUMA node."""
    nodes = []
    for path in sorted((_SYS / "devices/system/node").glob("node[0-9]*")):
        sizes = memory.meminfo(path / "meminfo")
        node = int(path.name.removeprefix("node"))
        nodes.append(
            {"node": node, "total_bytes": sizes["MemTotal"], "free_bytes": sizes["MemFree"]}
        )
    return nodes


def pinned_limit() -> dict[str, Any]:
    """Return ``ulimit -l``; unlimited is None."""
    soft, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    unlimited = soft == resource.RLIM_INFINITY
    return {"unlimited": unlimited, "limit_bytes": None if unlimited else soft}


def huge_pages() -> dict[str, Any]:
    """Return who gets transparent huge pages: always, madvise or never; None without any."""
    folder = _SYS / "kernel/mm/transparent_hugepage"
    if not folder.exists():
        return {"enabled": None, "page_bytes": None}
    _, _, rest = (folder / "enabled").read_text().partition("[")
    size = int((folder / "hpage_pmd_size").read_text())
    return {"enabled": rest.partition("]")[0], "page_bytes": size}


def numa_node_of_pci(domain: int, bus: int, device: int) -> int | None:
    """Return a PCI device's NUMA node; None if the system knows none (-1) or has no file."""
    address = f"{domain:04x}:{bus:02x}:{device:02x}.0"
    path = _SYS / "bus/pci/devices" / address / "numa_node"
    node = int(path.read_text()) if path.exists() else -1
    return node if node >= 0 else None


def numa_node_of(address: int) -> int | None:
    """NUMA node that holds the page at ``address``, by the ``move_pages`` system call."""
    number = _MOVE_PAGES.get(platform.machine())
    if number is None:
        return None
    libc = ctypes.CDLL(None, use_errno=True)
    page = ctypes.c_void_p(address & ~(mmap.PAGESIZE - 1))
    status = ctypes.c_int(-1)
    done = libc.syscall(number, 0, 1, ctypes.byref(page), None, ctypes.byref(status), 0)
    return status.value if done == 0 and status.value >= 0 else None


def _numa_node_of(about: Any) -> int | None:
    return numa_node_of_pci(about.pci_domain_id, about.pci_bus_id, about.pci_device_id)


def devices() -> list[dict[str, Any]]:
    """Return the CUDA devices; an empty list on a machine without any."""
    import torch

    found = []
    for index in range(torch.cuda.device_count() if torch.cuda.is_available() else 0):
        about: Any = torch.cuda.get_device_properties(index)
        free, total = torch.cuda.mem_get_info(index)
        found.append(
            {
                "index": index,
                "name": about.name,
                "capability": f"{about.major}.{about.minor}",
                "total_bytes": total,
                "free_bytes": free,
                "numa_node": attempt(partial(_numa_node_of, about)),
            }
        )
    return found


def triton_state() -> dict[str, Any]:
    """Report on Triton, which kernels need and references do not."""
    if find_spec("triton") is None:
        return {
            "version": "not installed; kernels need it (pip install triton), references do not"
        }
    interpret = os.environ.get("TRITON_INTERPRET")
    return {"version": _version("triton"), "TRITON_INTERPRET": interpret or "not set"}


def host_register() -> dict[str, Any]:
    """Register a mebibyte of host memory with CUDA, as the host pool does, and let it go."""
    import torch

    if not torch.cuda.is_available():
        return {"works": None, "reason": "no CUDA device"}
    from topkv.errors import HostMemoryError
    from topkv.kv.host_memory import HostMemory

    try:
        memory = HostMemory(2**20, torch.device("cuda", torch.cuda.current_device()))
    except HostMemoryError as error:
        return {"works": False, "reason": str(error)}
    node = numa_node_of(memory.bytes.data_ptr())
    memory.close()
    return {"works": True, "reason": None, "numa_node_of_test": node}


def read_rates() -> dict[str, Any]:
    """Measure the GB/s at which kernels of the GPU read its memory and the host's."""
    import torch

    if not torch.cuda.is_available():
        return {"device_memory": None, "host_memory": None, "reason": "no CUDA device"}
    from topkv_prediction.probe import rates

    memory, link = rates(torch.device("cuda", torch.cuda.current_device()))
    return {"device_memory": round(memory, 1), "host_memory": round(link, 1), "reason": None}


PROBES: dict[str, Callable[[], Any]] = {
    "topkv": lambda: _version("topkv"),
    "python": platform.python_version,
    "platform": platform.platform,
    "torch": lambda: _version("torch"),
    "triton": triton_state,
    "devices": devices,
    "host_memory": host_memory,
    "numa_nodes": numa_nodes,
    "huge_pages": huge_pages,
    "pinned_memory_limit": pinned_limit,
    "cuda_host_register": host_register,
    "read_gb_per_s": read_rates,
}
