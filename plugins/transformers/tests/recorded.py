"""A recorder for machines without CUDA graphs: what a body launches, on the tensors it had."""

from __future__ import annotations

from contextlib import contextmanager
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from topkv import SparseCoordinator
from topkv_transformers import compiled


class OpRecorder(TorchDispatchMode):
    """Keeps the operators of a body with their tensors, and calls of the coordinator.

    A replay runs no Python of the model: a length, position or address that the body read as a
    number is frozen in, as it would be in a CUDA graph. Calls of the coordinator are not run when
    they are recorded, and run when they are replayed. What waits for the device is refused.
    """

    def __init__(self):
        super().__init__()
        self.launches = []

    @classmethod
    def ignore_compile_internals(cls):
        """What was compiled before is run, and not skipped."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func is torch.ops.topkv.attend.default:
            with self:  # no launch itself: what it calls is
                return compiled.attend._init_fn(*args)
        out = func(*args, **(kwargs or {}))
        self.launches.append((lambda: func(*args, **(kwargs or {})), out))
        return out

    @contextmanager
    def coordinator_recorded(self):
        attention, offload = SparseCoordinator.attention, SparseCoordinator.offload

        def recorded_attention(coordinator, layer, q, k, v, index=None, **more):
            with _off():
                out = torch.full_like(q[..., : coordinator.model.out_dim], float("nan"))
            self.launches.append(
                (lambda: attention(coordinator, layer, q, k, v, index, **more), out)
            )
            return out

        def recorded_offload(coordinator):
            self.launches.append((lambda: offload(coordinator), None))

        with (
            patch.object(SparseCoordinator, "attention", recorded_attention),
            patch.object(SparseCoordinator, "offload", recorded_offload),
        ):
            yield

    def replay(self):
        for launch, kept in self.launches:
            made = launch()
            for new, old in zip(tree_leaves(made), tree_leaves(kept), strict=True):
                if isinstance(old, torch.Tensor) and new.data_ptr() != old.data_ptr():
                    old.copy_(new)


@contextmanager
def _off():
    with torch.utils._python_dispatch._disable_current_modes():
        yield


class Recorder:
    """In place of ``topkv_transformers.capture.CudaRecorder``."""

    def __call__(self, body):
        recorder = OpRecorder()
        with recorder.coordinator_recorded(), recorder:
            body()
        return recorder.replay
