"""Time of plan + load per layer-step, and of a prefill's offload, beside the link's ceiling.

    python benchmarks/swap_in.py --out benchmarks/results/swap_in.jsonl

Every cell replays one CUDA graph of ``STEPS`` steps over a prepared stream of selections, from
the same warm state each time, and reports the median over ``REPEATS`` replays. Afterwards every
occupied slot is compared with what the host pool must hold. Entries of 656 and 1152 bytes are
single tokens (top-k 2048, buffer 4096, one lane a request); 8 KiB are units of 16 tokens of one
kv-head (128 units, buffer 256, eight lanes a request). With ``--host-format fp8`` the latter are
coded on the host, 4384 bytes that the load decodes; ``gbs`` counts the bytes of the host.

Entries without neighbours come more slowly out of a larger pool. ``--tokens 131072 --layers 8``
makes a large one, of which the first layer is loaded. Its pages are shuffled, as those of requests
that come and go; ``--in-order`` leaves them as they are.
"""

from __future__ import annotations

import argparse
import json
import statistics
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from attrs import evolve

from topkv.hooks.eviction import EvictionSetup
from topkv.hooks.transfer import TransferSetup
from topkv.kv.host_pool import HostKVPool
from topkv.kv.store import GroupStore
from topkv.transfer.eviction import LeastRecentlyUsed
from topkv.transfer.triton import TritonTransfer
from topkv.types import GroupShape, LayerView, Plan, StepTensors
from topkv_fp8_host_format.rows import rounded
from topkv_testing.models.host_formats import CODED, coding, host_of

STEPS, REPEATS = 60, 15
DEVICE = torch.device("cuda")
INTS = {"dtype": torch.int32, "device": DEVICE}
# Plan + load of the first two-kernel prototype on an H200, us, by (entry bytes, requests, miss %).
PROTOTYPE = {
    (656, 1): (10.0, 13.7, 18.3, 30.7),
    (656, 4): (10.1, 15.6, 31.5, 74.1),
    (656, 16): (10.4, 23.1, 84.7, 250.0),
    (656, 64): (11.1, 52.5, 296.0, 958.0),
    (1152, 1): (10.1, 14.1, 20.8, 39.0),
    (1152, 64): (11.0, 73.6, 457.0, 1491.0),
}
MISSES = (0.0, 0.02, 0.15, 0.50)


def median_us(run: Callable[[], None], before: Callable[[], None] | None = None) -> float:
    """Median over ``REPEATS`` of one call, by events, after ``before``."""
    times = []
    for _ in range(REPEATS):
        if before:
            before()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        start.record()
        run()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) * 1e3)
    return statistics.median(times)


def link_ceiling() -> dict[str, float]:
    """Measure GB/s of 1 GiB copies between pinned and device memory."""
    size = 1 << 30
    device = torch.empty(size, dtype=torch.uint8, device=DEVICE)
    host = torch.empty(size, dtype=torch.uint8).pin_memory()
    return {
        "h2d": size / median_us(lambda: device.copy_(host, non_blocking=True)) / 1e3,
        "d2h": size / median_us(lambda: host.copy_(device, non_blocking=True)) / 1e3,
    }


def in_format(group: GroupShape, host_format: str) -> GroupShape:
    """Give a group the bytes that its entries have in a host format."""
    if host_format == "model":
        return group
    return evolve(group, coded_bytes=coding(group).coded_bytes())


def on_host(group: GroupShape, pages: int) -> tuple[HostKVPool, GroupStore]:
    """Make a host pool of one group, and its store."""
    pool = HostKVPool([group], pages, DEVICE)
    host = host_of(group, "triton")
    return pool, GroupStore.on_host(group, pool.layouts[0], pool.bytes, pages, DEVICE, host=host)


def engine_of(store: GroupStore, views: list[LayerView]) -> TritonTransfer:
    """Make the engine of a group, by kernels."""
    return TritonTransfer(TransferSetup(store, views, LeastRecentlyUsed(EvictionSetup(DEVICE))))


class Cell:
    """One group of one layer, every lane's pages filled with words that name their place, or with
    random codes."""

    def __init__(self, entry_bytes: int, requests: int, options: argparse.Namespace) -> None:
        host_format, tokens = options.host_format, entry_bytes != 8192
        heads, unit = (1, 1) if tokens else (8, 16)
        width, units = 2048 // unit, options.tokens // unit
        dim = entry_bytes // (2 * unit) // (1 if tokens else 2)
        page = 64 if tokens else 256
        plain = GroupShape(
            layers=(*range(options.layers),),
            unit=unit,
            lane_heads=heads,
            heads_per_lane=1,
            head_dim=dim,
            dtype=torch.uint8 if tokens else torch.bfloat16,
            page_tokens=page,
            max_requests=requests,
            max_units=units,
            select=width,
            buffer_slots=2 * width,
            ring_slots=2,
        )
        self.group = in_format(plain, host_format)
        per_page = self.group.units_per_page
        pages = units // per_page
        self.pool, self.store = on_host(self.group, 1 + requests * pages)
        if host_format == "model":
            self.fill_with_words()
        else:
            codes, words, exponents = self.store.host.parts(self.store.entries)
            codes.random_(0, 256)
            words.random_(0, 256)
            exponents.random_(120, 130)
        order = torch.arange if options.in_order else torch.randperm
        table = 1 + order(requests * pages).view(requests, pages)
        fixed = (
            torch.arange(requests),
            torch.full((requests,), units * unit),
            torch.full((requests,), units * unit),
            torch.ones(requests),
            torch.zeros(requests),
        )
        self.step = StepTensors(*(t.to(**INTS) for t in fixed), table.to(**INTS))
        empty = torch.zeros(0)
        self.view = LayerView(0, 0, self.group, self.step, empty, empty)
        self.engine = engine_of(self.store, [self.view])
        self.limit = torch.full((requests,), units - 4, **INTS)
        lanes = requests * heads
        shapes = ((lanes, width), (lanes,), (lanes, width), (lanes, width), (lanes,))
        self.plan = Plan(*(torch.zeros(shape, **INTS) for shape in shapes))

    def fill_with_words(self) -> None:
        """Fill the pool with a plain run of words: word w holds w, wrapped to 32 bits."""
        words, step = self.pool.bytes.view(torch.int32), 1 << 26
        for first in range(0, words.numel(), step):
            end = min(first + step, words.numel())
            words[first:end] = torch.arange(first, end).int()

    def stream(self, miss: float) -> Iterator[torch.Tensor]:
        """Selections ``[lanes, K]`` that miss the given share of their units in every step."""
        group = self.group
        lanes, width, universe = group.max_lanes, group.select, group.max_units - 4
        fresh = round(width * miss)
        current = torch.rand(lanes, universe, device=DEVICE).argsort(1)[:, :width].int()
        # Never selected for at least universe - 2 * buffer steps: certain misses, in order.
        rest = torch.rand(lanes, universe, device=DEVICE)
        rest.scatter_(1, current.long(), 2.0)
        queue = rest.argsort(1)[:, : universe - width].int()
        at = 0
        while True:
            yield current.contiguous()
            leave = torch.rand(lanes, width, device=DEVICE).argsort(1)[:, :fresh]
            index = torch.arange(at, at + fresh, device=DEVICE) % queue.shape[1]
            incoming = queue[:, index]
            queue[:, index] = current.gather(1, leave)
            current = current.scatter(1, leave, incoming)
            at += fresh

    def measure(self, miss: float) -> dict[str, float]:
        stream = self.stream(miss)
        for slot in range(self.group.max_requests):
            self.engine.reset(slot)
        for _ in range(8):
            self.once(next(stream))
        ids = [next(stream) for _ in range(STEPS)]
        # One more step leaves every allocation and compilation behind before the capture.
        state = [self.store.unit_slot, self.store.slot_unit, self.store.order, self.store.counters]
        saved = [tensor.clone() for tensor in state]
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for selection in ids:
                self.once(selection)

        def rewind() -> None:
            for tensor, value in zip(state, saved, strict=True):
                tensor.copy_(value)

        time = median_us(graph.replay, rewind) / STEPS
        before, after = saved[3].sum((0, 1)), self.store.counters.sum((0, 1))
        hits, misses = (after - before).tolist()
        (self.verify_coded if self.group.coded_bytes else self.verify)()
        moved = misses / STEPS * self.group.host_entry_bytes
        return {"us": time, "miss": misses / (hits + misses), "gbs": moved / time / 1e3}

    def once(self, ids: torch.Tensor) -> None:
        self.engine.plan(self.view, ids, self.limit, self.plan)
        self.engine.load(self.view, self.plan)

    def verify_coded(self) -> None:
        """Assert that every occupied slot holds the decoded entry of its unit."""
        group, host = self.group, self.store.host
        for row, units in enumerate(self.store.slot_unit[0].cpu().long()):
            slot, head = divmod(row, group.lane_heads)
            held = units >= 0
            page = self.step.page_table[slot].cpu().long()[units[held] // group.units_per_page]
            entries = self.store.entries[page, 0, head, units[held] % group.units_per_page]
            expected = host.decode(host.parts(entries)).view(torch.int16)
            found = self.store.buffer[0, row, : group.buffer_slots].cpu()[held]
            if not torch.equal(found.view(torch.int16), expected):
                raise SystemExit(f"lane {row} of the buffer differs from the host pool")

    def verify(self) -> None:
        """Assert that every occupied slot holds the words of its unit's place in the pool."""
        group, layout = self.group, self.store.layout
        units = self.store.slot_unit[0].long()
        row = torch.arange(group.max_lanes, device=DEVICE)[:, None].expand(units.shape)
        page = self.step.page_table[
            row // group.lane_heads, units.clamp(min=0) // group.units_per_page
        ]
        first = (
            page.long() * layout.page_stride
            + row % group.lane_heads * layout.head_stride
            + units.clamp(min=0) % group.units_per_page * layout.unit_stride
        ) // 4
        words = self.store.buffer.view(torch.int32)[0, :, : group.buffer_slots].flatten(2)
        for chunk in range(0, group.max_lanes, 16):
            rows = slice(chunk, chunk + 16)
            expected = first[rows, :, None] + torch.arange(group.entry_bytes // 4, device=DEVICE)
            wrong = (words[rows] != expected.int()) & (units[rows] >= 0)[:, :, None]
            if wrong.any():
                raise SystemExit(
                    f"{int(wrong.sum())} words of the buffer differ from the host pool"
                )


def offload_cell(layers: int, tokens: int, host_format: str) -> dict[str, float]:
    """Bytes a second of ``store_chunk`` for one prefill chunk over several layers."""
    group = GroupShape(
        *(tuple(range(layers)), 16, 8, 1, 128, torch.bfloat16, 64, 1, tokens // 16, 127, 256, 2)
    )
    group = in_format(group, host_format)
    pool, store = on_host(group, 1 + tokens // 64)
    step = StepTensors(
        *(torch.zeros(1, **INTS) for _ in range(5)),
        torch.arange(1, 1 + tokens // 64, **INTS)[None],
    )
    views = [LayerView(i, i, group, step, torch.zeros(0), torch.zeros(0)) for i in range(layers)]
    engine = engine_of(store, views)
    k, v = (torch.randn(tokens, 8, 128, device=DEVICE).bfloat16() for _ in range(2))
    if host_format != "model":
        k, v = rounded(k), rounded(v)

    def run() -> None:
        for view in views:
            engine.store_chunk(view, 0, 0, k, v, tokens, False)

    run()
    time = median_us(run)
    host = store.host
    # [pages, heads, units, 1, 2, 16, 128]
    entries = host.decode(host.parts(store.entries[1:, layers - 1]))
    got = entries[:, :, :, 0].permute(3, 0, 2, 4, 1, 5).reshape(2, tokens, 8, 128)
    if not (torch.equal(got[0], k.cpu()) and torch.equal(got[1], v.cpu())):
        raise SystemExit("offload wrote other bytes than it was given")
    pool.close()
    moved = layers * tokens // 16 * 8 * group.host_entry_bytes
    return {"us": time, "gbs": moved / time / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--requests", type=int, nargs="+", default=[1, 4, 16, 64])
    parser.add_argument("--entries", type=int, nargs="+", default=[656, 1152, 8192])
    parser.add_argument("--host-format", choices=["model", CODED], default="model")
    parser.add_argument("--tokens", type=int, default=16384, help="of a request")
    parser.add_argument("--layers", type=int, default=1, help="that share the pool")
    parser.add_argument("--in-order", action="store_true", help="pages of a request are adjacent")
    options = parser.parse_args()
    rows: list[dict[str, object]] = [
        {"what": "ceiling", "device": torch.cuda.get_device_name(), **link_ceiling()}
    ]
    print(rows[0])
    coded = options.host_format != "model"
    for entry in [8192] if coded else options.entries:
        for requests in options.requests:
            cell = Cell(entry, requests, options)
            for place, miss in enumerate(MISSES):
                result = cell.measure(miss)
                known, size = PROTOTYPE.get((entry, requests)), cell.group.host_entry_bytes
                row = {"what": "swap_in", "entry": size, "requests": requests, **result}
                if known:
                    row["prototype_us"] = known[place]
                    row["ratio"] = result["us"] / known[place]
                rows.append(row)
                print({k: round(v, 3) if isinstance(v, float) else v for k, v in row.items()})
            cell.pool.close()
            del cell
            torch.cuda.empty_cache()
    for layers, tokens in ((8, 8192), (8, 32768)):
        row = {
            "what": "offload",
            "layers": layers,
            "tokens": tokens,
            **offload_cell(layers, tokens, options.host_format),
        }
        row["of_link"] = float(str(row["gbs"])) / float(str(rows[0]["d2h"]))
        rows.append(row)
        print(row)
    if options.out:
        options.out.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
