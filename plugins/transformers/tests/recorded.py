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
    they are recorded, and run when they are replayed; what others wrote over is put back. What
    waits for the device is refused.
    """

    def __init__(self):
        super().__init__()
        self.launches, self.before = [], []
        self.made = set()

    @classmethod
    def ignore_compile_internals(cls):
        """Return True, so that code that was compiled before is run, and not skipped."""
        return True

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func is torch.ops.aten._local_scalar_dense.default:
            raise RuntimeError("operation not permitted when stream is capturing")
        if func is torch.ops.topkv.attend.default:
            with self:  # no launch itself: what it calls is
                return compiled.attend._init_fn(*args)
        self._remember(func, args)
        out = func(*args, **(kwargs or {}))
        self.launches.append((lambda: func(*args, **(kwargs or {})), out))
        self.made |= {_place(each) for each in tree_leaves(out) if isinstance(each, torch.Tensor)}
        return out

    def _remember(self, func, args):
        """Keep tensors of before the recording that an operator is going to write over."""
        writes = [each.alias_info and each.alias_info.is_write for each in func._schema.arguments]
        for each in tree_leaves([arg for arg, write in zip(args, writes, strict=False) if write]):
            if isinstance(each, torch.Tensor) and _place(each) not in self.made:
                self.before.append((each, each.clone()))

    def restore(self):
        """Leave what is written over as it was: a recording runs nothing."""
        with _off():
            for each, before in reversed(self.before):
                each.copy_(before)

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


def _place(tensor):
    return tensor.untyped_storage().data_ptr()


@contextmanager
def _off():
    with torch.utils._python_dispatch._disable_current_modes():
        yield


class Recorder:
    """Recorder in place of ``topkv_transformers.capture.CudaRecorder``."""

    def __call__(self, body):
        recorder = OpRecorder()
        with recorder.coordinator_recorded(), recorder:
            body()
        recorder.restore()
        return recorder.replay
