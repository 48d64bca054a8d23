"""One cell through vLLM, in a process of its own: ``python -m topkv_bench.vllm_cell ASKED FILE``.

The engine core runs in this very process, so that a step is a call, and topkv's counts can be
read. ``ASKED`` is what ``topkv_bench.engine_bench`` hands over; the row is written to ``FILE``.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from time import perf_counter
from typing import Any

os.environ |= {
    "HF_HUB_OFFLINE": "1",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
os.environ.pop("VLLM_CPU_KVCACHE_SPACE", None)  # it would beat the sizes of a cell

import attrs
import torch
import vllm
from vllm import LLM, EngineArgs, SamplingParams

from topkv import SparseCoordinator
from topkv.errors import ConfigError
from topkv_bench.clock import Clock
from topkv_bench.engine_cell import drifts, write
from topkv_bench.rows import OVER, link
from topkv_vllm import engine_args
from topkv_vllm.args import CONNECTOR
from topkv_vllm.connector import TopkvConnector
from topkv_vllm.geometry import WINDOW, layer_types, shape_of_config
from topkv_vllm.refusals import check

Row = dict[str, Any]

FP8_ROW = 656
"""Bytes of a latent row that vLLM keeps in fp8."""


def arguments_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Make vLLM's arguments; prompts share nothing, and nothing is compiled on a CPU."""
    common = {
        "model": asked["model"],
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": asked["dtype"],
        # A chunk of a prompt beside all rows that decode.
        "max_num_batched_tokens": asked["chunk"] + asked["requests"] * (asked["queries"] or 1),
        "enable_prefix_caching": False,
        "disable_log_stats": True,
    }
    if asked["fill"] == "pool":
        common["kv_transfer_config"] = dict(CONNECTOR)
    if (asked["queries"] or 1) > 1:
        common["speculative_config"] = _drafts(asked["queries"] - 1, asked["accept"])
    if asked["device"] == "cpu":
        common |= {"enforce_eager": True, "kv_cache_memory_bytes": 2**24}
    common |= asked["engine_args"]
    if asked["contestant"] == "dense":
        return common | {"max_num_seqs": asked["requests"], "max_model_len": asked["tokens"]}
    return engine_args(asked["settings"], **common)


def _drafts(drafts: int, accept: float) -> dict[str, Any]:
    """Make vLLM draft tokens and accept a share of them, whatever they are."""
    return {
        "method": "ngram",
        "num_speculative_tokens": drafts,
        "prompt_lookup_max": 2,
        "prompt_lookup_min": 1,
        "rejection_sample_method": "synthetic",
        "synthetic_acceptance_length": 1 + accept * drafts,
    }


def expected_bytes(config: Any, asked: dict[str, Any]) -> int:
    """Return the bytes that a cell will hold on the device, before weights are there.

    Raises:
        CapabilityError: topkv refuses the model or its settings.
    """
    if asked["contestant"] == "dense":
        blocks = asked["requests"] * (
            -(-asked["tokens"] // config.cache_config.block_size) + _window_blocks(config)
        )
        return (blocks + 1) * _block_bytes(config)
    return SparseCoordinator.required_bytes(check(config, vllm.__version__)).device


def _block_bytes(config: Any) -> int:
    """Return the bytes of a block of stock vLLM in all layers: of keys and values, or of latent
    rows and the keys of an indexer, which are fp8 with a scale for each 128 elements."""
    shape = shape_of_config(config)
    if shape.indexer is None:
        row = 2 * shape.num_kv_heads * shape.head_dim * shape.dtype.itemsize
    else:
        fp8 = config.cache_config.cache_dtype.startswith("fp8")
        key = shape.indexer.head_dim + shape.indexer.head_dim // 128 * 4
        row = key + (FP8_ROW if fp8 else shape.head_dim * shape.dtype.itemsize)
    return int(shape.num_layers * config.cache_config.block_size * row)


def _window_blocks(config: Any) -> int:
    """Return the blocks that a request takes of stock vLLM's pool for layers with windows, which
    share blocks with the same number of other layers."""
    window, types = config.model_config.get_sliding_window(), layer_types(config.model_config)
    if WINDOW not in types:
        return 0
    others = len(types) - types.count(WINDOW)
    groups = -(-types.count(WINDOW) // others)
    most = window - 1 + config.scheduler_config.max_num_batched_tokens
    return groups * (-(-most // config.cache_config.block_size) + 1)


def row_of(asked: dict[str, Any]) -> Row:
    """Return the row of a cell: measured, or over the limit."""
    arguments = arguments_of(asked)
    config = EngineArgs(**arguments).create_engine_config()
    device = config.device_config.device_type
    if device != asked["device"]:
        reason = f"this vLLM runs on {device}, and {asked['device']} was asked for; say --device"
        raise ConfigError("the device cannot be used", [reason])
    expected, limit = expected_bytes(config, asked), asked["kv_limit"]
    if limit is not None and expected > limit:
        reason = f"it would hold {expected} bytes on the device, and --kv-limit is {limit}"
        return {"status": OVER, "reason": reason}
    if asked["contestant"] == "dense":
        arguments["kv_cache_memory_bytes"] = expected
    with filled(asked), drifts(asked) as made:
        return _measured(asked, arguments, made)


@contextmanager
def filled(asked: dict[str, Any]) -> Iterator[None]:
    """Have a connector say that it brings whatever stands before the last page of a prompt, if
    caches are to be filled without reading it. They hold what their memory held, mostly zeros."""
    stock = TopkvConnector.get_num_new_matched_tokens

    def brought(connector: TopkvConnector, request: Any, found: int) -> tuple[int, bool]:
        page: int = connector._page
        return (request.num_prompt_tokens - 1) // page * page - found, False

    if asked["fill"] == "pool":
        TopkvConnector.get_num_new_matched_tokens = brought  # type: ignore[method-assign]
    try:
        yield
    finally:
        TopkvConnector.get_num_new_matched_tokens = stock  # type: ignore[method-assign]


class Engine:
    """A running engine.

    Args:
        arguments: arguments of ``vllm.LLM``.

    Attributes:
        llm: the ``vllm.LLM``.
        coordinator: coordinator of its worker; None in stock vLLM.
        generated: tokens of each request so far.
        found: tokens of the prompt of each that were not read.
    """

    def __init__(self, arguments: dict[str, Any]) -> None:
        self.llm, self.generated = LLM(**arguments), dict[str, int]()
        self.found: dict[str, int] = {}
        self.engine, self._names = self.llm.llm_engine, map(str, count())
        (session,) = self.llm.collective_rpc(lambda worker: getattr(worker, "session", None))
        self.coordinator: SparseCoordinator | None = session and session.coordinator
        self._words = self.engine.model_config.get_vocab_size()

    def add(self, requests: int, tokens: int, most: int) -> set[str]:
        """Hand over random prompts; return their names."""
        how = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, detokenize=False)
        names = {next(self._names) for _ in range(requests)}
        for name in names:
            prompt = torch.randint(self._words, (tokens,)).tolist()
            self.engine.add_request(name, {"prompt_token_ids": prompt}, how)
        return names

    def step(self) -> set[str]:
        """Run a step; return the names of the requests that it gave tokens."""
        reported = set()
        for output in self.engine.step():
            reported.add(output.request_id)
            self.generated[output.request_id] = len(output.outputs[0].token_ids)
            self.found[output.request_id] = output.num_cached_tokens or 0
        return reported

    def run_out(self) -> None:
        """Run steps until nothing is left and the worker knows that."""
        while self.engine.has_unfinished_requests():
            self.step()
        self.step()


def _measured(asked: dict[str, Any], arguments: dict[str, Any], made: list[Any]) -> Row:
    began = perf_counter()
    engine = Engine(arguments)
    try:
        row: Row = {"attach_seconds": perf_counter() - began}
        engine.add(asked["requests"], min(asked["context"], 2 * asked["chunk"]), 3)
        engine.run_out()  # compiling and loading at first is not measured
        row |= _generated(engine, asked)
        if made and made[0].layers:
            row["drift"] = attrs.asdict(made[0])
        return row
    finally:
        engine.engine.engine_core.shutdown()


def _generated(engine: Engine, asked: dict[str, Any]) -> Row:
    """Run prompts, then steps in which every request decodes, timed from output to output."""
    coordinator, requests = engine.coordinator, asked["requests"]
    moved: list[Any] = []
    counted: list[int] = []

    def look() -> None:
        moved.append(None if coordinator is None else coordinator.transfers_of())
        counted.append(sum(engine.generated.values()))

    warmup, steps = asked["warmup"], asked["steps"]
    clock = Clock(warmup, steps, {warmup: look, warmup + steps: look})
    clock.start()
    names = engine.add(requests, asked["context"], asked["tokens"] - asked["context"])
    clock.put(None)  # the prompts
    begun = set[str]()
    while begun != names:
        begun |= engine.step()
    clock.put(None)
    if asked["fill"] == "pool" and not all(engine.found[name] for name in names):
        raise RuntimeError("a prompt was read that was to be filled; this is a bug of topkv-bench")
    while len(clock.seconds) < steps:
        reported = engine.step()
        if not reported:
            continue  # steps are scheduled ahead, and this call brought none to its end
        if reported != names:
            raise RuntimeError("a request had no token in a step; this is a bug of topkv-bench")
        clock.put(None)
    kept = (counted[1] - counted[0]) / steps / requests
    row: Row = {
        "step_ms": clock.milliseconds(),
        "tokens_per_second": 1e3 * requests * kept / clock.milliseconds()["median"],
        "first_token_seconds": clock.first if asked["fill"] == "prompt" else None,
        "bytes": _held(engine),
        "peak_bytes": torch.cuda.max_memory_allocated() if torch.cuda.is_available() else None,
        **link(moved, steps),
    }
    if asked["queries"] is not None:
        row["tokens_per_step"] = kept
    if coordinator is not None:
        row["settings"] = {each.name: each.value for each in coordinator.config.settings}
    engine.engine.abort_request([*names])
    engine.run_out()
    return row


def _held(engine: Engine) -> dict[str, int]:
    """Return bytes by tier: topkv's own counts, or all blocks of stock vLLM's pool."""
    if engine.coordinator is not None:
        report = engine.coordinator.memory()
        return attrs.asdict(report) | {"device": report.device}
    config = engine.engine.vllm_config
    cache = config.cache_config.num_gpu_blocks * _block_bytes(config)
    return {"cache": cache, "device": cache, "host": 0}


if __name__ == "__main__":
    write(row_of)
