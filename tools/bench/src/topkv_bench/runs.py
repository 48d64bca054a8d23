"""The grid of measurements, one after the other, each in memory that the one before freed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from topkv.errors import (
    DeviceMemoryError,
    HostMemoryError,
    OutOfMemory,
    TopkvError,
    is_out_of_memory,
)
from topkv_bench import geometry
from topkv_bench.clock import Clock, milliseconds
from topkv_bench.contestants import (
    Cell,
    Contestant,
    Expected,
    Topkv,
    clear,
    enter,
    expected,
)
from topkv_bench.options import Options
from topkv_bench.phases import Profile
from topkv_bench.room import Room, weights_of
from topkv_bench.rows import NO_MEMORY, OVER, REFUSED, Row, link
from topkv_bench.verify import Verifier, accepted
from topkv_prediction.probe import rates
from topkv_transformers.support import refusals

RATES = "bandwidth", "link"
"""Names of the rates of ``topkv_prediction.probe.rates``, in its order."""


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
        """Yield a row for each cell, as soon as it is done; one for each acceptance."""
        for cell, caches, lack in zip(self.cells, self.caches, self.lacks, strict=True):
            for row in self._rows(cell, caches, lack):
                yield cell.row | row

    def _rows(self, cell: Cell, caches: Expected | None, lack: str | None) -> list[Row]:
        if lack is not None:
            return [{"status": NO_MEMORY, "reason": lack}]
        over = self._over_limit(caches)
        if over:
            return [over]
        clear(self.options.device)
        try:
            rows = self._measured(cell)
        except TopkvError as error:
            status = NO_MEMORY if isinstance(error, OutOfMemory) else REFUSED
            rows = [{"status": status, "reason": " ".join(str(error).split())}]
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            rows = [{"status": NO_MEMORY, "reason": str(error).partition("\n")[0]}]
        clear(self.options.device)  # what an exception held is let go of by now
        return rows

    def _over_limit(self, caches: Expected | None) -> Row:
        limit = self.options.kv_limit
        if limit is None or caches is None or caches.device <= limit:
            return {}
        reason = f"it would hold {caches.device} bytes on the device, and --kv-limit is {limit}"
        return {"status": OVER, "reason": reason}

    def _measured(self, cell: Cell) -> list[Row]:
        began = perf_counter()
        contestant = enter(self.model, cell)
        try:
            attached = {"attach_seconds": perf_counter() - began}
            if not cell.pool:
                self._warm_up(contestant, cell)
            measure = self._generated if cell.queries is None else self._verified
            rows = measure(contestant, cell)
            return [attached | row | contestant.facts() for row in rows]
        finally:
            contestant.close()

    def _warm_up(self, contestant: Contestant, cell: Cell) -> None:
        """Compile kernels for a prompt of several chunks and a step, over a cache of its own."""
        columns = min(cell.context, 2 * self.options.chunk)
        self._generate(contestant.cache(filled=False), cell.requests, columns, 3, None)

    def _generated(self, contestant: Contestant, cell: Cell) -> list[Row]:
        """Measure one token a step, by one call of ``generate``."""
        options = self.options
        cache = contestant.cache(filled=cell.pool)
        moved: list[Any] = []
        profile = self._profile(contestant)
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
        first = None if cell.pool else clock.first
        return [self._found(contestant, cell, clock.seconds, first, held, moved, profile)]

    def _verified(self, contestant: Contestant, cell: Cell) -> list[Row]:
        """Measure steps that verify tokens, of one acceptance after the other."""
        cache, queries, first = contestant.cache(filled=cell.pool), cell.verified, None
        if not cell.pool:
            clock = Clock(0, 0, {})
            self._generate(cache, cell.requests, cell.columns, 1, clock, close=False)
            first = clock.first
        rows = []
        with contestant.verifying(cache):
            verifier = Verifier(contestant, cache, self._ids(cell.requests, queries))
            for accept in cell.accepts:
                found = self._accepting(verifier, cell, accept, first)
                rows.append({"accept": accept if queries > 1 else None, **found})
        if hasattr(cache, "close"):
            cache.close()
        return rows

    def _accepting(
        self, verifier: Verifier, cell: Cell, accept: float, first: float | None
    ) -> Row:
        """Measure steps that accept a share of their drafts."""
        options, contestant, cache = self.options, verifier.contestant, verifier.cache
        begin, end = options.warmup, options.warmup + options.steps
        counts = accepted(end + options.profiled, accept, cell.verified)
        verifier.run(counts[:begin])
        moved = [contestant.moved(cache)]
        seconds = verifier.run(counts[begin:end])
        moved.append(contestant.moved(cache))
        held, profile = contestant.held(cache), self._profile(contestant)
        if profile is not None:
            profile.start()
            try:
                verifier.run(counts[end:])
            finally:
                profile.stop()
        kept = 1 + sum(counts[begin:end]) / options.steps
        return {
            "tokens_per_step": kept,
            **self._found(contestant, cell, seconds, first, held, moved, profile, kept),
        }

    def _profile(self, contestant: Contestant) -> Profile | None:
        coordinator = contestant.coordinator if isinstance(contestant, Topkv) else None
        return Profile(coordinator, self.options.device) if self.options.profiled else None

    def _found(
        self,
        contestant: Contestant,
        cell: Cell,
        seconds: Sequence[float],
        first: float | None,
        held: Row,
        moved: Sequence[Any],
        profile: Profile | None,
        kept: float = 1,
    ) -> Row:
        """Return the figures of a row, of steps of ``kept`` tokens a request."""
        options, step = self.options, milliseconds(seconds)
        row: Row = {
            "step_ms": step,
            "tokens_per_second": 1e3 * cell.requests * kept / step["median"],
            "first_token_seconds": first,
            "bytes": held,
            "peak_bytes": self._peak(),
            **link(moved, options.steps),
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
        found = contestant.handle.prediction(
            middle, cell.requests, hit_rate=rate, queries=cell.verified, **self.rates
        )
        time: float = found.topkv.ms
        return time

    def _peak(self) -> int | None:
        """Return the most bytes beside the weights since the cell began; of a GPU alone."""
        if self.options.device.type != "cuda":
            return None
        return torch.cuda.max_memory_allocated(self.options.device) - self.weights_bytes

    def _generate(
        self,
        cache: Any,
        requests: int,
        columns: int,
        new_tokens: int,
        clock: Clock | None,
        close: bool = True,
    ) -> None:
        ids = self._ids(requests, columns)
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
        if close and hasattr(cache, "close"):
            cache.close()

    def _ids(self, requests: int, columns: int) -> torch.Tensor:
        """Draw tokens."""
        ids = torch.randint(self.model.config.vocab_size, (requests, columns))
        return ids.to(self.options.device)
