"""The worker of a CPU."""

from __future__ import annotations

from vllm.v1.worker.cpu_worker import CPUWorker

from topkv_vllm.worker import TopkvWorker


class TopkvCPUWorker(TopkvWorker, CPUWorker):
    """See ``TopkvWorker``."""

    def _prepare(self, memory: int) -> None:
        if self._should_warm_up_model():
            self.model_runner.warming_up_model()
