"""Memory that cells need beside the weights, and free memory, before any is taken."""

from __future__ import annotations

import attrs
import torch
from transformers import PreTrainedModel

from topkv_bench.contestants import Expected
from topkv_cli.memory import HostMemory, host_memory


@attrs.frozen
class Room:
    """Memory that is free on a machine.

    Attributes:
        device: where the model is to run.
        host: memory of the host.
        free: bytes of the GPU; None for a CPU, whose caches and weights are in host memory.
    """

    device: torch.device
    host: HostMemory
    free: int | None

    @classmethod
    def of(cls, device: torch.device) -> Room:
        """Measure the room of this machine, now."""
        free = torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else None
        return cls(device, host_memory(), free)

    def lack(self, weights: int, caches: Expected) -> str | None:
        """Return why weights and caches do not fit; None if they do. Forwards need more on top.

        Args:
            weights: bytes of the weights.
            caches: bytes of the caches of a cell; zeros for the weights alone.
        """
        here = weights + caches.device
        if self.free is None:
            wanted, there, whose = here + caches.host, self.host.available, self.host.whose
        elif here > self.free:
            wanted, there, whose = here, self.free, f"of {self.device}"
        else:
            weights, wanted = 0, caches.host
            there, whose = self.host.available, self.host.whose
        if wanted <= there:
            return None
        return (
            f"it needs at least {_gib(wanted)} (weights {_gib(weights)}, caches "
            f"{_gib(wanted - weights)}), and {_gib(there)} of memory {whose} are free"
        )


def weights_of(skeleton: PreTrainedModel) -> int:
    """Return bytes of a model's parameters and buffers, which need not be allocated yet."""
    held = (*skeleton.parameters(), *skeleton.buffers())
    return sum(tensor.nbytes for tensor in held)


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f} GiB"
