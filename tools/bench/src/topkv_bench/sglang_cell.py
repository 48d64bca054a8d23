"""One cell through SGLang, in its own process: ``python -m topkv_bench.sglang_cell ASKED FILE``.

SGLang's scheduler runs in this very process, in its own loop and overlapped where it is so by
default, and is handed requests as if clients had sent them: so topkv's counts can be read.
``ASKED`` is what ``topkv_bench.engine_bench`` hands over; the row is written to ``FILE``.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Sequence
from itertools import count
from time import perf_counter
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"

import attrs
import torch
from sglang.srt.arg_groups.model_override_base import model_config_of, resolving_view
from sglang.srt.entrypoints.engine import _set_envs_and_config
from sglang.srt.managers.io_struct import TokenizedGenerateReqInput
from sglang.srt.managers.scheduler import Scheduler, configure_scheduler_process
from sglang.srt.plugins import load_plugins
from sglang.srt.runtime_context import SpawnRanks, publish
from sglang.srt.sampling.sampling_params import SamplingParams
from sglang.srt.server_args import PortArgs, ServerArgs
from sglang.version import __version__

from topkv import SparseCoordinator
from topkv_bench.clock import Clock
from topkv_bench.engine_cell import drifts, write
from topkv_bench.rows import OVER, Row, link
from topkv_sglang import engine_args
from topkv_sglang.geometry import shape_of_config
from topkv_sglang.refusals import check

PAGE = 64
"""Tokens of a page of stock SGLang, as topkv has by default."""


def arguments_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Make SGLang's arguments; prompts share nothing. An attention backend among further ones is
    that of stock SGLang."""
    common = {
        "model_path": asked["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": asked["dtype"],
        "device": asked["device"],
        "chunked_prefill_size": asked["chunk"],
        "disable_radix_cache": True,
        "log_level": "warning",
        **({"disable_cuda_graph": True} if asked["device"] == "cpu" else {}),
        **asked["engine_args"],
    }
    if asked["contestant"] != "dense":
        common.pop("attention_backend", None)
        return engine_args(asked["settings"], **common)
    return {
        "page_size": PAGE,
        "max_running_requests": asked["requests"],
        "context_length": asked["tokens"],
        "max_total_tokens": asked["requests"] * (-(-asked["tokens"] // PAGE) + 1) * PAGE,
        **common,
    }


def expected_bytes(arguments: Any, model: Any, contestant: str) -> int:
    """Return the bytes that a cell will hold on the device, before weights are there.

    Raises:
        CapabilityError: topkv refuses the model or its settings.
    """
    if contestant == "dense":
        return int(arguments.max_total_tokens) * token_bytes(arguments, model)
    return SparseCoordinator.required_bytes(check(arguments, model, __version__)).device


def token_bytes(arguments: Any, model: Any) -> int:
    """Return the bytes of a token in all layers of stock SGLang: keys and values, or a row of
    latent attention and keys of indexers in 8 bits, both with a scale for 128 elements."""
    shape = shape_of_config(model)
    if shape.attention != "mla":
        row = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
        return int(shape.num_layers * row)
    row = shape.head_dim * shape.dtype.itemsize
    if arguments.kv_cache_dtype == "fp8_e4m3":
        turned = model.qk_rope_head_dim * shape.dtype.itemsize
        row = model.kv_lora_rank + model.kv_lora_rank // 128 * 4 + turned
    if shape.indexer is None:
        return int(shape.num_layers * row)
    size, indexers = shape.indexer.head_dim, sum(map(shape.indexer.selects_for, shape.layers))
    return int(shape.num_layers * row + indexers * (size + size // 128 * 4))


def resolved(asked: dict[str, Any]) -> ServerArgs:
    """Return SGLang's arguments, once it has checked and completed them, in this process.

    Raises:
        CapabilityError, ConfigError: topkv refuses them.
    """
    load_plugins()
    given = ServerArgs(**arguments_of(asked))
    given.resolve_once()
    _set_envs_and_config(given)
    given.check_server_args()
    return given


def row_of(asked: dict[str, Any]) -> Row:
    """Return the row of a cell: measured, or over the limit."""
    given = resolved(asked)
    expected = expected_bytes(resolving_view(given), model_config_of(given), asked["contestant"])
    limit = asked["kv_limit"]
    if limit is not None and expected > limit:
        reason = f"it would hold {expected} bytes on the device, and --kv-limit is {limit}"
        return {"status": OVER, "reason": reason}
    with drifts(asked) as made:
        row = _measured(asked, given, made)
    if asked["contestant"] == "dense":
        row["bytes"] = {"cache": expected, "device": expected, "host": 0}
    return row


class Engine:
    """A scheduler of SGLang and its model, without the processes that a server has around them.

    Args:
        given: SGLang's arguments, resolved.

    Attributes:
        coordinator: of topkv; None in stock SGLang.
    """

    def __init__(self, given: ServerArgs) -> None:
        publish(given, role="scheduler", ranks=SpawnRanks(world_rank=0, gpu_id=0))
        configure_scheduler_process(given, 0)
        self.scheduler = Scheduler(given, PortArgs.init_new(given))
        self.scheduler.ingest_requests = self._ingest
        runner = self.scheduler.tp_worker.model_runner
        session = getattr(runner, "topkv_session", None)
        self.coordinator: SparseCoordinator | None = session and session.coordinator
        self._words, self._names = runner.model_config.vocab_size, map(str, count())
        self._sent: list[TokenizedGenerateReqInput] = []
        self._process = self.scheduler.process_batch_result

    def send(self, prompt: Sequence[int], most: int) -> str:
        """Hand over a request when a loop begins; return its name.

        Args:
            prompt: token ids.
            most: tokens that it generates.
        """
        request = self._request(prompt, most)
        self._sent.append(request)
        return str(request.rid)

    def loop(self, look: Callable[[Any], None]) -> None:
        """Run what was sent to its end, or until ``scheduler.gracefully_exit`` is set.

        Args:
            look: is given SGLang's ``ScheduleBatch`` of each step whose tokens are on the host.
        """

        def process(batch: Any, result: Any) -> None:
            self._process(batch, result)
            look(batch)

        self.scheduler.process_batch_result = process
        self.scheduler.gracefully_exit = False
        self.scheduler.run_event_loop()

    def run(self, requests: int, tokens: int, most: int, clock: Clock | None = None) -> None:
        """Run random prompts to their end, or until a clock has its steps.

        Args:
            requests: that arrive at once.
            tokens: of each prompt.
            most: tokens that each may generate.
            clock: ticks once all have a token, and then with every step.

        Raises:
            RuntimeError: a request had no token in a step.
        """
        for _ in range(requests):
            self.send(torch.randint(self._words, (tokens,)).tolist(), most)
        begun = set[str]()

        def look(batch: Any) -> None:
            if clock is None:
                return
            names = {each.rid for each in batch.reqs if len(each.output_ids)}
            if len(begun) < requests:
                begun.update(names)
                if len(begun) == requests:
                    clock.put(None)
            elif len(names) != requests:
                raise RuntimeError(
                    "a request had no token in a step; this is a bug of topkv-bench"
                )
            else:
                clock.put(None)
            self.scheduler.gracefully_exit = clock.done

        if clock is not None:
            clock.start()
            clock.put(None)  # the prompts
        self.loop(look)

    def _ingest(self, stop_at_pause: bool = False) -> list[Any]:
        """Hand over what was sent; end the loop where nothing is left to do."""
        sent, self._sent = self._sent, []
        if sent:
            self.scheduler.process_input_requests(sent)
        elif self.scheduler.is_fully_idle():
            self.scheduler.gracefully_exit = True
        return sent

    def _request(self, prompt: Sequence[int], most: int) -> TokenizedGenerateReqInput:
        how = SamplingParams(max_new_tokens=most, temperature=0, ignore_eos=True)
        how.normalize(None)
        return TokenizedGenerateReqInput(
            rid=next(self._names),
            input_text=None,
            input_ids=array("q", prompt),
            input_embeds=None,
            mm_inputs=None,
            token_type_ids=None,
            sampling_params=how,
            return_logprob=False,
            logprob_start_len=-1,
            top_logprobs_num=0,
            token_ids_logprob=None,
            stream=False,
        )


def _measured(asked: dict[str, Any], given: ServerArgs, made: list[Any]) -> Row:
    """Run prompts, then steps in which every request decodes, timed from result to result."""
    began = perf_counter()
    engine = Engine(given)
    row: Row = {"attach_seconds": perf_counter() - began}
    requests, context = asked["requests"], asked["context"]
    # Compiling and loading at first is not measured; further prompts compile nothing new.
    engine.run(min(requests, 2), min(context, 2 * asked["chunk"]), 3)
    coordinator, moved = engine.coordinator, list[Any]()

    def look() -> None:
        moved.append(None if coordinator is None else coordinator.transfers_of())

    warmup, steps = asked["warmup"], asked["steps"]
    clock = Clock(warmup, steps, {warmup: look, warmup + steps: look})
    engine.run(requests, context, asked["tokens"] - context, clock)
    times = clock.milliseconds()
    row |= {
        "step_ms": times,
        "tokens_per_second": 1e3 * requests / times["median"],
        "first_token_seconds": clock.first,
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        **link(moved, steps),
    }
    if coordinator is not None:
        report = coordinator.memory()
        row["bytes"] = attrs.asdict(report) | {"device": report.device}
        row["settings"] = {each.name: each.value for each in coordinator.config.settings}
    if made and made[0].layers:
        row["drift"] = attrs.asdict(made[0])
    return row


if __name__ == "__main__":
    write(row_of)
