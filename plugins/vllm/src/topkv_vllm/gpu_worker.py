"""The worker of a GPU, with vLLM's model runner V2, eager or with CUDA graphs.

A graph of vLLM's holds the layers of a decode step of some number of rows, from the embedding to
the last layer, whose units it offloads too. What changes from step to step is uploaded before,
when metadata are built. Prompts attend in Python, so a step that has any must not be replayed as a
whole: vLLM keeps apart what has more than one token a request, and this worker the prompts of one
token. Rows that decode in such a step have graphs of their own, one a layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from copy import copy
from typing import Any

import torch
from triton import knobs
from vllm.config import set_current_vllm_config
from vllm.v1.worker.gpu.model_runner import sort_batch_req_ids
from vllm.v1.worker.gpu.spec_decode.speculator import DraftModelSpeculator

from topkv_engines.memory import check_device, with_prompt_buffer
from topkv_engines.session import Session
from topkv_vllm.worker import TopkvWorker


class TopkvGPUWorker(TopkvWorker):
    """See ``TopkvWorker``."""

    def _row_names(self) -> Sequence[str]:
        requests: Any = self.session.requests
        return sort_batch_req_ids(  # type: ignore[no-any-return]
            requests.tokens, requests.drafted, self.model_runner.decode_query_len
        )

    def _prepare(self, memory: int) -> None:
        """Run a step without attention, which takes the memory that activations need, and see
        whether the device buffers fit beside it; of what is left, the prompt buffer gets half.

        Raises:
            DeviceMemoryError: they do not; nothing was allocated.
        """
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        with set_current_vllm_config(self.vllm_config), torch.inference_mode():
            self.model_runner.profile_run()
        peak = torch.cuda.max_memory_allocated() - before
        torch.cuda.empty_cache()
        share = self.requested_memory - self.model_runner.model_memory_usage
        room = min(share, torch.cuda.mem_get_info()[0]) - peak - memory
        check_device(self.topkv_config, int(room), "max_num_seqs", "gpu_memory_utilization")
        chunked = self.scheduler_config.max_num_batched_tokens < self.model_config.max_model_len
        if chunked and self.topkv_config.prefill_buffer_tokens is None:
            self.topkv_config = with_prompt_buffer(self.topkv_config, int(room))

    def load_model(self, **options: Any) -> None:
        """Load the model, see ``TopkvWorker``."""
        _watch_no_kernels()  # another engine of this process may have begun to
        if isinstance(self.model_runner.speculator, DraftModelSpeculator):
            _give_own_backend(self.model_runner.speculator)
        super().load_model(**options)

    def compile_or_warm_up_model(self) -> Any:
        """Record the graphs, and compile what vLLM compiles and what topkv launches."""
        self.session.warm_up()
        done = super().compile_or_warm_up_model()
        if self.compilation_config.cudagraph_mode.has_full_cudagraphs():
            self.session.record(self.sinks)
        _watch_no_kernels()
        return done

    def initialize_from_config(self, kv_cache_config: Any) -> None:
        """Make the coordinator and what vLLM keeps, see ``TopkvWorker``."""
        super().initialize_from_config(kv_cache_config)
        _guard(self.model_runner.cudagraph_manager, self.session)


def _watch_no_kernels() -> None:
    """Take vLLM's hook on compilations away, which warns of those that come late: Triton 3.6 fails
    to describe a kernel to any hook if an argument is a function, as the codec of ours is."""
    hook = knobs.runtime.jit_post_compile_hook
    if getattr(hook, "__module__", "").startswith("vllm."):
        knobs.runtime.jit_post_compile_hook = None


def _give_own_backend(speculator: DraftModelSpeculator) -> None:
    """Have the layers of a drafter ask for its own attention backend, not for the model's."""
    config = copy(speculator.vllm_config)
    config.attention_config = copy(config.attention_config)
    config.attention_config.backend = speculator.speculative_config.attention_backend
    speculator.vllm_config = config


def _guard(manager: Any, session: Session) -> None:
    """Let no step with a prompt be replayed, whatever its tokens."""
    dispatch = manager.dispatch

    def guarded(reqs: int, tokens: int, uniform: int | None, *more: Any, **named: Any) -> Any:
        return dispatch(reqs, tokens, None if session.prompts() else uniform, *more, **named)

    manager.dispatch = guarded
