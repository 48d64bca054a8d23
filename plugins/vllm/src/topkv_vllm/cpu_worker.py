"""The worker of a CPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from vllm.v1.attention.backends.registry import AttentionBackendEnum, register_backend
from vllm.v1.worker.cpu_worker import CPUWorker

from topkv_vllm.entry import BACKEND
from topkv_vllm.worker import TopkvWorker


class TopkvCPUWorker(TopkvWorker, CPUWorker):
    """See ``TopkvWorker``; on a CPU vLLM knows no backend but its own."""

    def load_model(self, **options: Any) -> None:
        """Load the model, see ``TopkvWorker``."""
        with _cpu_backend():
            super().load_model(**options)

    def _prepare(self) -> None:
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()


@contextmanager
def _cpu_backend() -> Iterator[None]:
    """Put our backend in the place of vLLM's own, the only one on a CPU, while layers are made."""
    overridden = AttentionBackendEnum.CPU_ATTN.is_overridden()
    before = AttentionBackendEnum.CPU_ATTN.get_path()
    register_backend(AttentionBackendEnum.CPU_ATTN, BACKEND)
    try:
        yield
    finally:
        AttentionBackendEnum.CPU_ATTN.clear_override()
        if overridden:
            register_backend(AttentionBackendEnum.CPU_ATTN, before)
