"""The grid of measurements, one after the other, each in memory that the one before freed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

import attrs
import torch
from transformers import PreTrainedConfig, PreTrainedModel

from topkv.config import SparseConfig
from topkv.errors import (
    ConfigError,
    DeviceMemoryError,
    HostMemoryError,
    OutOfMemory,
    TopkvError,
    is_out_of_memory,
)
from topkv_bench import geometry
from topkv_bench.clock import Clock
from topkv_bench.contestants import (
    NAMES,
    ROOM,
    Cell,
    Contestant,
    Expected,
    Topkv,
    clear,
    enter,
    expected,
)
from topkv_bench.phases import Profile
from topkv_bench.room import Room, weights_of
from topkv_prediction.probe import rates
from topkv_transformers.support import refusals

OK, OVER, NO_MEMORY, REFUSED = "ok", "over the limit", "out of memory", "refused"
"""States of a cell."""

RATES = "bandwidth", "link"
"""Names of the rates of ``topkv_prediction.probe.rates``, in its order."""

Row = dict[str, Any]


@attrs.frozen(kw_only=True)
class Options:
    """Options of the command.

    Attributes:
        model, config_path: a named geometry, or the path of a ``config.json``.
        contestants: some of ``NAMES``.
        contexts, requests: the grid.
        fill: ``"prompt"``, or ``"pool"`` for caches that are filled without one.
        drift: drift of topkv's selections, or a trace; None for the algorithm's own.
        steps, warmup: decode steps that are counted, and steps before them.
        profiled: decode steps behind them that are profiled.
        kv_limit: bytes on the device for keys, values and what topkv keeps beside them.
        chunk: tokens of a prompt that a forward takes.
        settings: settings of topkv.
        device, dtype: device and dtype of model and cache.
        engine: ``"transformers"`` or ``"vllm"``.
        engine_args: further arguments of vLLM.
    """

    model: str | None
    config_path: Path | None
    contestants: tuple[str, ...]
    contexts: tuple[int, ...]
    requests: tuple[int, ...]
    fill: str
    drift: float | str | None
    steps: int
    warmup: int
    profiled: int
    kv_limit: int | None
    chunk: int
    settings: SparseConfig
    device: torch.device
    dtype: torch.dtype
    engine: str = "transformers"
    engine_args: Mapping[str, Any] = attrs.Factory(dict)

    def cells(self) -> list[Cell]:
        """Return the grid: contexts, then requests, then contestants."""
        return [
            Cell(
                contestant=name,
                context=context,
                requests=requests,
                new_tokens=1 + self.warmup + self.steps + self.profiled,
                pool=self.fill == "pool",
                drift=self.drift,
                config=self.settings,
            )
            for context in self.contexts
            for requests in self.requests
            for name in self.contestants
        ]


def settings_of(config: SparseConfig, pairs: Mapping[str, Any]) -> SparseConfig:
    """Return the settings of a file, with single options over them.

    Raises:
        ConfigError: some are unknown or wrong, or follow from the grid.
    """
    settings = SparseConfig.load({**config.as_dict(), **pairs})
    reasons = [
        f"{name} follows from the contexts and requests of the grid; leave it out"
        for name in ROOM
        if name in settings.as_dict()
    ]
    if reasons:
        raise ConfigError("the configuration is refused", reasons)
    return settings


def _built(config: PreTrainedConfig, options: Options) -> PreTrainedModel:
    try:
        return geometry.build(config, options.device, options.dtype)
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition("\n")[0]
        text = f"the weights alone do not fit {options.device}: {reason}"
        raise DeviceMemoryError(text) from error


def _rates(device: torch.device) -> dict[str, float] | None:
    """Measure ``RATES`` of a GPU; None where it has no room left for that."""
    if device.type != "cuda":
        return None
    try:
        return dict(zip(RATES, rates(device), strict=True))
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        return None


def link(moved: Sequence[Any], steps: int) -> Row:
    """Return hits and bytes of the timed steps, from counts before and after them."""
    before, after = moved
    if after is None:
        return {"hit_rate": None, "link_bytes_per_step": None}
    hits, misses = after.hits - before.hits, after.misses - before.misses
    loaded = after.loaded_bytes - before.loaded_bytes
    return {
        "hit_rate": hits / (hits + misses) if hits + misses else None,
        "link_bytes_per_step": loaded / steps,
    }


class Bench:
    """Runs the cells of a grid over one model.

    Args:
        options: options of the command.

    Attributes:
        model: model of random weights.
        weights_bytes: bytes of its parameters.

    Raises:
        ConfigError, PluginError: no model can be made, or topkv's configuration is wrong; no cell
            was run.
        HostMemoryError, DeviceMemoryError: the weights, or all cells with them, do not fit. This
            is checked before weights are made: a container kills a process that takes too much.
    """

    def __init__(self, options: Options) -> None:
        self.options, self.cells = options, options.cells()
        longest = max(cell.tokens for cell in self.cells)
        config = geometry.config_of(options.model, options.config_path, longest)
        skeleton = geometry.skeleton(config, options.dtype)
        # None where it is unknown; settings are checked, too.
        self.caches = [expected(skeleton, cell, options.device) for cell in self.cells]
        self.lacks = self._lacks(skeleton)
        self.model = _built(config, options)
        self.weights_bytes = sum(each.nbytes for each in self.model.parameters())
        self.cannot_attach = refusals(self.model)
        self.rates = _rates(options.device)

    def _lacks(self, skeleton: PreTrainedModel) -> list[str | None]:
        """Return why each cell does not fit this machine, or None.

        Raises:
            HostMemoryError, DeviceMemoryError: no cell fits.
        """
        device = self.options.device
        room, weights = Room.of(device), weights_of(skeleton)
        lacks = [room.lack(weights, each or Expected()) for each in self.caches]
        if all(lacks):
            error = HostMemoryError if room.free is None else DeviceMemoryError
            dtype = str(self.options.dtype).removeprefix("torch.")
            cells = "".join(
                f"\n  - {cell.contestant} {cell.context} x {cell.requests}: {lack}"
                for cell, lack in zip(self.cells, lacks, strict=True)
            )
            raise error(
                f"no cell of {type(skeleton).__name__} in {dtype} fits {device}; take a smaller "
                f"model, context or number of requests, or a smaller --dtype:{cells}"
            )
        return lacks

    def facts(self) -> dict[str, Any]:
        """Facts about the model that results depend on."""
        return {
            "class": type(self.model).__name__,
            "parameters": self.model.num_parameters(),
            "weights_bytes": self.weights_bytes,
            "attention": self.model.config._attn_implementation,
            "cannot_attach": self.cannot_attach,
        }

    def run(self) -> Iterator[Row]:
        """Yield a row for each cell, as soon as it is done."""
        for cell, caches, lack in zip(self.cells, self.caches, self.lacks, strict=True):
            yield self._row(cell, caches, lack)

    def _row(self, cell: Cell, caches: Expected | None, lack: str | None) -> Row:
        row: Row = cell.row
        if lack is not None:
            return row | {"status": NO_MEMORY, "reason": lack}
        clear(self.options.device)
        try:
            row |= self._over_limit(caches) or self._measured(cell)
        except TopkvError as error:
            status = NO_MEMORY if isinstance(error, OutOfMemory) else REFUSED
            row |= {"status": status, "reason": " ".join(str(error).split())}
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            row |= {"status": NO_MEMORY, "reason": str(error).partition("\n")[0]}
        clear(self.options.device)  # what an exception held is let go of by now
        return row

    def _over_limit(self, caches: Expected | None) -> Row:
        limit = self.options.kv_limit
        if limit is None or caches is None or caches.device <= limit:
            return {}
        reason = f"it would hold {caches.device} bytes on the device, and --kv-limit is {limit}"
        return {"status": OVER, "reason": reason}

    def _measured(self, cell: Cell) -> Row:
        began = perf_counter()
        contestant = enter(self.model, cell)
        try:
            row = {"attach_seconds": perf_counter() - began}
            if not cell.pool:
                self._warm_up(contestant, cell)
            return row | self._generated(contestant, cell) | contestant.facts()
        finally:
            contestant.close()

    def _warm_up(self, contestant: Contestant, cell: Cell) -> None:
        """Compile kernels for a prompt of several chunks and a step, over a cache of its own."""
        columns = min(cell.context, 2 * self.options.chunk)
        self._generate(contestant.cache(filled=False), cell.requests, columns, 3, None)

    def _generated(self, contestant: Contestant, cell: Cell) -> Row:
        options, device = self.options, self.options.device
        cache = contestant.cache(filled=cell.pool)
        moved: list[Any] = []
        coordinator = contestant.coordinator if isinstance(contestant, Topkv) else None
        profile = Profile(coordinator, device) if options.profiled else None
        held: Row = {}
        last = options.warmup + options.steps

        def count() -> None:
            moved.append(contestant.moved(cache))

        def counted() -> None:
            count()
            held.update(contestant.held(cache))
            if profile is not None:
                profile.start()

        marks = {options.warmup: count, last: counted}
        if profile is not None:
            marks[last + options.profiled] = profile.stop
        clock = Clock(options.warmup, options.steps, marks)
        try:
            self._generate(cache, cell.requests, cell.columns, cell.new_tokens, clock)
        finally:
            if profile is not None:
                profile.stop()  # it would stand in the way of the next one
        step = clock.milliseconds()
        row: Row = {
            "step_ms": step,
            "tokens_per_second": 1e3 * cell.requests / step["median"],
            "first_token_seconds": None if cell.pool else clock.first,
            "bytes": held,
            "peak_bytes": self._peak(),
            **link(moved, self.options.steps),
        }
        captured = isinstance(contestant, Topkv) and not contestant.handle.config.compile
        if captured and self.rates is not None:  # the model of a step knows no compiled layers
            row["predicted_step_ms"] = self._predicted(contestant, cell, row["hit_rate"])
        if profile is not None:
            row["profile"] = profile.result(options.profiled)
        return row

    def _predicted(self, contestant: Any, cell: Cell, hit_rate: float | None) -> float:
        """Predict the milliseconds of a step of the middle by ``topkv_prediction``."""
        middle = cell.columns + self.options.warmup + self.options.steps // 2
        rate = 1.0 if hit_rate is None else hit_rate
        found = contestant.handle.prediction(middle, cell.requests, hit_rate=rate, **self.rates)
        time: float = found.topkv.ms
        return time

    def _peak(self) -> int | None:
        """Return the most bytes beside the weights since the cell began; of a GPU alone."""
        if self.options.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.options.device) - self.weights_bytes

    def _generate(
        self, cache: Any, requests: int, columns: int, new_tokens: int, clock: Clock | None
    ) -> None:
        ids = torch.randint(self.model.config.vocab_size, (requests, columns))
        ids = ids.to(self.options.device)
        if clock is not None:
            clock.start()
        self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=clock,
            do_sample=False,
            max_new_tokens=new_tokens,
            # Some versions of Transformers read the tokens of a filled cache again, in chunks.
            prefill_chunk_size=None if cache.get_seq_length() else self.options.chunk,
        )
        if hasattr(cache, "close"):
            cache.close()


def within_limit(rows: list[Row], limit: int) -> list[Row]:
    """Return for each contestant and context the row of most requests whose device bytes stay
    within a limit; those without such a row are left out."""
    best: dict[tuple[str, int], Row] = {}
    for row in rows:
        key = row["contestant"], row["context"]
        held = best.get(key)
        fits = row["status"] == OK and row["bytes"]["device"] <= limit
        if fits and (held is None or row["requests"] > held["requests"]):
            best[key] = row
    return [best[key] for key in sorted(best, key=lambda key: (key[1], NAMES.index(key[0])))]
