"""Base of the workers that vLLM runs for each rank, whatever the device.

``topkv_vllm.args.WORKERS`` names the workers of each device.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from copy import copy
from typing import Any

import vllm
from attrs import evolve
from vllm.v1.worker.gpu_worker import Worker

from topkv import SparseConfig
from topkv.config import LoweredConfig
from topkv_engines.report import report
from topkv_engines.session import Session
from topkv_prediction import running
from topkv_vllm.backend import TopkvBackend, chosen
from topkv_vllm.geometry import has_other_layers, lowered_for
from topkv_vllm.latent import (
    LatentBackend,
    attend_here,
    without_index_caches,
)
from topkv_vllm.layers import attention_layers, shape_of_layers
from topkv_vllm.metrics import with_counts
from topkv_vllm.mixture import Mixture
from topkv_vllm.placeholders import Placeholders
from topkv_vllm.ranks import host_file
from topkv_vllm.refusals import check, is_ahead
from topkv_vllm.requests import ScheduledRequests


class TopkvWorker(Worker):
    """vLLM's own worker, whose model attends through a coordinator.

    Args:
        vllm_config: vLLM's ``VllmConfig``; ``additional_config["topkv"]`` has the settings.
        more: as vLLM hands them over.

    Raises:
        CapabilityError: it cannot be served; nothing was loaded. With every reason.
    """

    def __init__(self, vllm_config: Any, *more: Any, **others: Any) -> None:
        log_as_vllm_does()
        self.topkv_config = check(vllm_config, vllm.__version__)
        # The connector is the scheduler's. A worker would make another one for its whole process,
        # and other engines in it would find that.
        vllm_config = copy(vllm_config)
        vllm_config.kv_transfer_config = None
        super().__init__(vllm_config, *more, **others)
        self.group, ahead = 0, is_ahead(vllm_config)
        self.session = Session(
            self._row_names, lambda made: ScheduledRequests(made, self.group), ahead
        )

    def _row_names(self) -> Sequence[str]:
        """Request ids of the open step in the order of their rows."""
        return self.model_runner.input_batch.req_ids  # type: ignore[no-any-return]

    def _prepare(self, memory: int) -> None:
        """Do what must be done before memory is taken: compile kernels, say.

        Args:
            memory: bytes that vLLM is to take.
        """

    def load_model(self, **options: Any) -> None:
        """Load the model, whose layers then know the session, and find its geometry."""
        config = self.vllm_config
        latent = config.model_config.use_mla
        with chosen(LatentBackend if latent else TopkvBackend):
            super().load_model(**options)
        if latent:
            without_index_caches(config.compilation_config.static_forward_context)
        alone, lowered = not has_other_layers(config), self.topkv_config
        layers = attention_layers(config, lowered.model.num_layers, alone)
        for number, layer in enumerate(layers):
            layer.impl.session, layer.impl.number = self.session, number
            if layer.impl.sinks is not None:  # loaded by now
                layer.impl.sinks = layer.impl.sinks.detach().float()
            if latent:
                attend_here(layer)
        settings = SparseConfig.load(config.additional_config["topkv"])
        impls = [layer.impl for layer in layers]
        self.sinks = {impl.number: impl.sinks for impl in impls}
        shape = shape_of_layers(impls, lowered.model.dtype)
        self.topkv_config = lowered_for(config, settings, shape)
        names = [layer.layer_name for layer in layers]
        self.blocks: Placeholders | Mixture = (
            Placeholders(self.topkv_config) if alone else Mixture(config, self.topkv_config, names)
        )

    def get_kv_cache_spec(self) -> dict[str, Any]:
        """Return what vLLM allocates for each layer."""
        return self.blocks.specs(super().get_kv_cache_spec())

    def determine_available_memory(self) -> int:
        """Return how many bytes vLLM is to take for its block pool."""
        memory = self.blocks.memory(self.get_kv_cache_spec())
        self._prepare(memory)
        return memory

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the coordinator, then what vLLM keeps.

        Raises:
            CapabilityError, ConfigError: blocks do not fit the host pool.
            HostMemoryError, DeviceMemoryError: a tier is too small; nothing is left allocated.
        """
        self.group = self.blocks.join(kv_cache_config)
        self.allocate(self.topkv_config)
        super().initialize_from_config(kv_cache_config)
        if self.is_driver_worker:
            self._report()

    def _report(self) -> None:
        """Log which requests are dense, and on a GPU how long a step will take."""
        coordinator, model = self.session.coordinator, self.model_config.hf_text_config
        report(coordinator.config)
        # A step reads all weights but those of an embedding that is no head as well.
        tied = getattr(model, "tie_word_embeddings", False)
        named = self.model_runner.get_model().named_parameters()
        weights = sum(each.nbytes for name, each in named if tied or "embed_tokens" not in name)
        device = coordinator.config.device
        running.report(device, lambda: running.predict_running(coordinator, weights))

    def allocate(self, config: LoweredConfig) -> None:
        """Make the coordinator; all ranks do at a time. Raises as above."""
        with host_file(self.vllm_config) as file:
            self.session.allocate(evolve(config, host_file=file))

    def execute_model(self, scheduler_output: Any) -> Any:
        """Run a step, between the begin and the end of the coordinator's forward."""
        return self._counted(self.session.run(scheduler_output, super().execute_model))

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Run the rest of a step."""
        return self._counted(super().sample_tokens(grammar_output))

    def _counted(self, output: Any) -> Any:
        """Return an output with counts; there is none before tokens are sampled."""
        counts = self.session.counts
        return output if counts is None or output is None else with_counts(output, counts.take())

    def shutdown(self) -> None:
        """Give back the host memory too. Idempotent."""
        super().shutdown()
        if hasattr(self, "session"):
            self.session.close()


def log_as_vllm_does() -> None:
    """Let topkv's log go where that of vLLM goes, at its level: how far a large host pool is, say.
    A log that somebody has set up stays as it is."""
    ours, theirs = logging.getLogger("topkv"), logging.getLogger("vllm")
    if not (ours.handlers or ours.level):
        ours.handlers, ours.propagate = [*theirs.handlers], theirs.propagate
        ours.setLevel(theirs.getEffectiveLevel())
