"""One cell with DeepSeek's sparse attention: ``python -m hisparse_cell ASKED FILE``.

It is a cell of ``topkv_bench.sglang_cell``, and HiSparse asks for more. HiSparse keeps a request
out of the batch while its prompt travels to the host, so steps are timed once every request
decodes; the first token is that of the last one. Its device pool has room for some whole prompts
and the buffers of all requests. The selection of an indexer is written over by one that drifts as
stated. SGLang counts no misses; its kernel writes a plan of them where it is asked to, and one
addition a step sums the plans.
"""

from __future__ import annotations

import json
import os
from typing import Any

import torch
from torch import Tensor

from topkv.errors import ConfigError
from topkv_bench import drift_kernels, sglang_cell
from topkv_bench.drift import effective, rate_of
from topkv_bench.engine_cell import write
from topkv_bench.rows import Row

COUNTS = os.environ.get("HISPARSE_COUNTS", "1") == "1"
"""False for a time without plans of misses and their sum."""

PROMPTS = 2
"""Whole prompts that the device pool holds at a time."""

SIZES = {"top_k": 2048, "device_buffer_size": 4096}
"""Tokens that a layer selects of a request, and that its buffer holds."""

made: list[Any] = []
"""The coordinator of HiSparse, once it is there."""


def arguments_of(asked: dict[str, Any]) -> dict[str, Any]:
    """Make SGLang's arguments, with pools that HiSparse needs for the requests."""
    given = plain_arguments_of(asked)
    if not given.get("enable_hisparse"):
        return given
    page, requests = sglang_cell.PAGE, asked["requests"]
    prompt = (-(-asked["tokens"] // page) + 1) * page
    of_each = SIZES["device_buffer_size"] + page + asked["tokens"] - asked["context"]
    device = min(requests, PROMPTS) * prompt + requests * of_each + 2 * asked["chunk"]
    device = -(-device // page) * page
    ratio = max(2, -(-requests * prompt // device))
    sizes = {**SIZES, "host_to_device_ratio": ratio}
    return {**given, "max_total_tokens": device, "hisparse_config": json.dumps(sizes)}


def run(
    engine: sglang_cell.Engine, requests: int, tokens: int, most: int, clock: Any = None
) -> None:
    """Take the place of ``Engine.run``: a clock ticks from the first step of all requests on."""
    for _ in range(requests):
        engine.send(torch.randint(engine._words, (tokens,)).tolist(), most)
    begun = False

    def look(batch: Any) -> None:
        nonlocal begun
        if clock is None:
            return
        is_step = batch.forward_mode.is_decode() and len(batch.reqs) == requests
        if begun and not is_step:
            raise RuntimeError(f"{len(batch.reqs)} of {requests} requests were in a step")
        begun = begun or is_step
        if begun:
            clock.put(None)
        engine.scheduler.gracefully_exit = clock.done

    if clock is not None:
        clock.start()
        clock.put(None)  # the prompts
    engine.loop(look)
    if clock is not None and not clock.done:
        raise RuntimeError("requests had ended before all decoded; ask for fewer, or more steps")


def watch(asked: dict[str, Any]) -> None:
    """Let selections of HiSparse drift, and count its misses."""
    from sglang.srt.managers.hisparse_coordinator import HiSparseCoordinator as Coordinator

    begin, swap = Coordinator._init_shared_index_prefetch, Coordinator._run_swap_in_kernel
    drift, units = asked["drift"], asked["context"]

    def begun(self: Any, *, layer_num: int, max_num_req_slots: int, **others: Any) -> None:
        begin(self, layer_num=layer_num, max_num_req_slots=max_num_req_slots, **others)
        if self.enable_prefetch:
            raise RuntimeError("misses of layers that share a selection are not counted")
        made.append(self)
        rows = max_num_req_slots, self.top_k
        self._miss_src = torch.zeros(rows, dtype=torch.int64, device=self.device)
        self._miss_dst = torch.zeros(rows, dtype=torch.int32, device=self.device)
        self.misses = torch.zeros(layer_num, rows[0], dtype=torch.int32, device=self.device)
        self.all_misses = self.misses.long()

    def swapped(self: Any, rows: Tensor, lengths: Tensor, ids: Tensor, layer: int) -> Tensor:
        if drift is not None:
            drift_kernels.write(ids, rows, lengths, lengths, layer, units, rate_of(drift))
        if not COUNTS:
            return swap(self, rows, lengths, ids, layer)
        self._miss_count = self.misses[layer]
        places = swap(self, rows, lengths, ids, layer, True)
        if layer == len(self.misses) - 1:
            self.all_misses += self.misses
        return places

    Coordinator._init_shared_index_prefetch = begun
    Coordinator._run_swap_in_kernel = swapped


class Clock(sglang_cell.Clock):
    """Counts misses where the counted steps begin and end, which their times leave out."""

    def __init__(self, warmup: int, steps: int, marks: dict[int, Any]) -> None:
        super().__init__(warmup, steps, {at: self._counted(mark) for at, mark in marks.items()})

    def _counted(self, mark: Any) -> Any:
        def counted() -> None:
            mark()
            counts.append(made[0].all_misses.sum(1).tolist() if made and COUNTS else [])

        return counted


counts: list[list[int]] = []
"""Misses of each layer so far, where the counted steps begin and where they end."""


def row_of(asked: dict[str, Any]) -> Row:
    """Return the row of a cell.

    Raises:
        ConfigError: an option that a cell of topkv alone knows.
    """
    if asked["kv_limit"] is not None or isinstance(asked["drift"], str):
        raise ConfigError("HiSparse is measured without", ["--kv-limit", "--drift of a trace"])
    if asked["engine_args"].get("enable_hisparse"):
        watch(asked)
    given = sglang_cell.resolved(asked)
    view, model = sglang_cell.resolving_view(given), sglang_cell.model_config_of(given)
    row = sglang_cell._measured(asked, given, [])
    row["bytes"] = bytes_of(view, model)
    if not made:
        return row
    layers, steps, entry = model.num_hidden_layers, asked["steps"], made[0].item_size_bytes
    if asked["drift"] is not None:
        share = effective(asked["drift"], made[0].top_k, asked["context"])
        row["drift"] = {"stated": asked["drift"], "effective": share, "layers": layers}
    row["stored_bytes_per_step"] = asked["requests"] * layers * entry  # to the host
    if COUNTS:
        before, after = map(sum, counts)
        misses = (after - before) / steps
        selected = asked["requests"] * layers * made[0].top_k
        row |= {"misses_per_step": misses, "link_bytes_per_step": misses * entry}
        row["hit_rate"] = 1 - misses / selected
    return row


def bytes_of(arguments: Any, model: Any) -> dict[str, int]:
    """Return bytes of rows and of index keys, of which HiSparse has the latter on the device."""
    each = sglang_cell.token_bytes(arguments, model)
    tokens = arguments.max_total_tokens
    if not made:
        return {"cache": tokens * each, "device": tokens * each, "host": 0}
    rows = model.num_hidden_layers * made[0].item_size_bytes
    logical = tokens * json.loads(arguments.hisparse_config)["host_to_device_ratio"]
    device = tokens * rows + logical * (each - rows)
    return {"cache": device, "device": device, "host": logical * rows}


plain_arguments_of = sglang_cell.arguments_of

if __name__ == "__main__":
    sglang_cell.arguments_of = arguments_of
    sglang_cell.Engine.run = run  # type: ignore[method-assign]
    sglang_cell.Clock = Clock  # type: ignore[misc]
    write(row_of)
