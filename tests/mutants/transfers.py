"""Mutants of the transfer engine of the core: one line of it changed, or one method replaced.

None of them leaves its tensors: interpreted kernels that do so break the process, not the test.
"""

from __future__ import annotations

import inspect
import itertools
import linecache
from types import ModuleType
from typing import Any

from tests.mutants.harness import Mutant, name_of
from topkv.entries import Capabilities, PluginEntry
from topkv.plugins.discovery import hookimpl
from topkv.transfer import kernels, reference, token_kernels, triton
from topkv.transfer.reference import ReferenceTransfer
from topkv.transfer.triton import TritonTransfer
from topkv_testing.tiers import tier
from topkv_testing.transfers import TransferTests

_numbers = itertools.count()


def changed(module: ModuleType, old: str = "", new: str = "", **names: Any) -> ModuleType:
    """A second copy of a module with one piece of its source changed and some names rebound.

    Raises:
        ValueError: the source does not have ``old`` exactly once, so nothing would be mutated.
    """
    source = inspect.getsource(module)
    if old:
        if source.count(old) != 1:
            raise ValueError(
                f"{module.__name__} must have {old!r} once, got {source.count(old)} times; "
                "follow the change of the module in the mutant"
            )
        source = source.replace(old, new)
    name = f"{module.__name__}_mutant_{next(_numbers)}"
    file = f"<{name}>"
    # Triton reads the source of its kernels through inspect, which asks linecache.
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    second = ModuleType(name)
    second.__file__ = file  # so that a copy can be changed again
    exec(compile(source, file, "exec"), vars(second))
    vars(second).update(names)
    return second


def reference_with(old: str, new: str) -> type:
    """The reference with one change."""
    return changed(reference, old, new).ReferenceTransfer


def kernels_with(module: ModuleType, old: str, new: str) -> type:
    """The engine over kernels, one of which has one change."""
    short = module.__name__.rpartition(".")[2]
    return changed(triton, **{short: changed(module, old, new)}).TritonTransfer


class EvictsAHit(
    reference_with(
        "selected[slot_of[hits].long()] = True", "selected[slot_of[hits].long()] = False"
    )
):
    """Victims are chosen before hits are stamped."""


class EvictsTheNewest(
    reference_with("order[stale][: len(missed)]", "order[stale].flip(0)[: len(missed)]")
):
    """Victims are those that were selected last."""


class KeepsVictimsInTheMap(reference_with("slot_of[evicted[evicted >= 0].long()] = -1", "pass")):
    """The map still says that an evicted unit is in the buffer."""


class TakesLogicalForHostIds(
    reference_with(
        "out.miss_hosts[lane, : len(missed)] = hosts",
        "out.miss_hosts[lane, : len(missed)] = missed",
    )
):
    """A logical id is used as a host id: the page table is ignored."""


class TakesHostIdsForSlots(
    reference_with(
        "slots = plan.miss_slots[lane, :misses].long()",
        "slots = hosts.to(plan.misses.device) % group.buffer_slots",
    )
):
    """A host id is used as a slot id."""


class AcceptsIdsBehindTheLimit(
    reference_with("if 0 <= unit < bound", "if 0 <= unit < group.max_units")
):
    """Ids behind the limit are taken for units that can be attended."""


class CountsDuplicatesTwice(
    reference_with(
        "dict.fromkeys(unit for unit in ids[lane].tolist() if 0 <= unit < bound)",
        "[unit for unit in ids[lane].tolist() if 0 <= unit < bound]",
    )
):
    """Equal ids are counted, and missed, as often as they stand there."""


class ForgetsTheRing(
    reference_with(
        "in_ring = units >= self.ring_low(high)\n",
        "in_ring = units >= group.max_units\n",
    )
):
    """Units in the ring are looked for in the LRU buffer, and fetched from the host."""


class LeavesValuesBehindCount(reference_with("tensor.fill_(-1)", "pass")):
    """The plan leaves what stood behind its counts."""


class LoadsKeysOnly(
    reference_with(
        "store.buffer[layer.index, lane_row, slots] = loaded",
        "store.buffer[layer.index, lane_row][slots, :, 0] = loaded[:, :, 0]",
    )
):
    """A miss brings the keys of an entry and leaves its values."""


class OffloadsAUnitLate(reference_with("slot, filled, fits)", "slot, filled - 1, fits)")):
    """The unit before the one that closed goes to the host."""


class OffloadsTheUnitThatOpens(reference_with("slot, filled, fits)", "slot, filled + 1, fits)")):
    """The unit behind the one that closed goes to the host."""


class OffloadsWhatDidNotAppend(
    reference_with(
        "range((length - int(step.appended[batch])) // unit,",
        "range((length - 1) // unit,",
    )
):
    """Rows that append nothing are offloaded again."""


class OffloadsOneLayer(reference_with("in self.layers:", "in self.layers[:1]:")):
    """Closed units go to the host in the first layer only."""


class KeepsOldCopies(reference_with("if at >= 0:", "if fits and at >= 0:")):
    """A unit that is written again stays as it was in the LRU buffer."""


class StaysResidentTooLong(ReferenceTransfer):
    """A lane is taken to fit with one unit more than its buffer has slots."""

    def fits(self, high: int, resident: bool) -> bool:
        return resident and (high - 1) // self.group.unit <= self.group.buffer_slots + 1


class ChunksMissTheRing(reference_with("in_ring = (units >= self", "in_ring = (units > self")):
    """A chunk leaves the oldest unit of the ring unwritten."""


class ChunksKeepOldCopies(
    reference_with("held = (places >= 0).nonzero().flatten()", "held = in_ring[:0]")
):
    """A chunk that writes a unit again leaves it as it was in the LRU buffer."""


class ChunksBeginAtTheirUnits(
    reference_with("positions % group.unit\n", "(positions - start) % group.unit\n")
):
    """The first token of a chunk is taken for the first one of its unit."""


class ForgetsToResetTheOrder(ReferenceTransfer):
    """A slot's next owner inherits the eviction order of the last."""

    @hookimpl
    def reset(self, slot: int) -> None:
        order = self.store.order.clone()
        super().reset(slot)
        self.store.order.copy_(order)


class ResetsItsCounts(ReferenceTransfer):
    """A request that is cut or dropped counts its hits and misses anew."""

    @hookimpl
    def reset(self, slot: int) -> None:
        super().reset(slot)
        self.store.counters[:, self.store.lanes_of(slot)] = 0


class FlushesNothing(ReferenceTransfer):
    """The open unit stays in the ring alone."""

    @hookimpl
    def flush(self, slot: int, length: int, high: int, resident: bool) -> None:
        pass


class RestoresWithoutRing(ReferenceTransfer):
    """After truncate the ring holds what it held before."""

    @hookimpl
    def restore(self, slot: int, length: int, resident: bool) -> None:
        lanes, first = self.store.lanes_of(slot), self.group.buffer_slots
        ring = self.store.buffer[:, lanes, first:].clone()
        super().restore(slot, length, resident)
        self.store.buffer[:, lanes, first:] = ring


class KernelSeesAWiderRing(
    kernels_with(
        kernels,
        "in_ring = valid & (unit >= newest - T + 1)",
        "in_ring = valid & (unit >= newest - T)",
    )
):
    """The plan kernel looks for a unit in the ring that has just left it."""


class KernelKeepsVictimsInTheMap(
    kernels_with(kernels, "tl.store(p_unit_slot + occupant, -1, victim & (occupant >= 0))", "pass")
):
    """The plan kernel does not clear the map entries of its victims."""


class KernelEvictsAHit(
    kernels_with(
        kernels,
        "stale = in_c & (tl.load(p_stamp + at, in_c, other=0) == UNSELECTED)",
        "stale = in_c & (at >= 0)",
    )
):
    """The plan kernel takes every slot for a victim, whatever was stamped."""


class KernelOffloadsWhatDidNotAppend(
    kernels_with(
        kernels,
        "(length - tl.load(p_appended + batch)) // UNIT",
        "(length - 1) // UNIT",
    )
):
    """The offload kernel moves the units of rows that append nothing."""


class KernelLoadsFromTheFirstHead(
    kernels_with(kernels, ".to(tl.int64) * s_page + head * s_head", ".to(tl.int64) * s_page")
):
    """The load kernel reads every lane's entries from the pages of the first."""


class KernelAppendsKeysTwice(
    kernels_with(
        token_kernels,
        "tl.store(p_target + entry + UNIT * D + d, v, d < D)",
        "tl.store(p_target + entry + UNIT * D + d, k, d < D)",
    )
):
    """The append kernel writes the key in the place of the value."""


class ChunksKeepOldExponents(
    reference_with(
        "zip(parts, self.host.encode(k), self.host.encode(v), strict=True):",
        "[*zip(parts, self.host.encode(k), self.host.encode(v))][:1]:",
    )
):
    """A chunk brings the codes of its rows and leaves the exponents that were there."""


class LoadsIfThereAreMisses(TritonTransfer):
    """Asks for the number of misses before it loads."""

    @hookimpl
    def load(self, layer: Any, plan: Any) -> None:
        if plan.misses.tolist():
            super().load(layer, plan)


class WrapsFarAddresses(TritonTransfer):
    """Byte offsets of the copy have 31 bits and wrap: row times width passes 2**31."""

    @hookimpl
    def load(self, layer: Any, plan: Any) -> None:
        group, store, most = self.group, self.store, 2**31 - 1
        size = group.entry_bytes
        buffer = store.buffer.view(-1).view(dtype=store.pool.dtype)
        for lane, misses in enumerate(plan.misses.tolist()):
            batch, head = divmod(lane, group.lane_heads)
            row = int(layer.step.slots[batch]) * group.lane_heads + head
            for place in range(misses):
                page, within = divmod(int(plan.miss_hosts[lane, place]), group.units_per_page)
                at = store.layout
                source = at.base + page * at.page_stride + layer.index * at.layer_stride
                source = (source + head * at.head_stride + within * at.unit_stride) & most
                slot = int(plan.miss_slots[lane, place])
                target = ((layer.index * group.max_lanes + row) * group.slots + slot) * size & most
                buffer[target : target + size] = store.pool[source : source + size].to(
                    buffer.device
                )


CODED = Capabilities(host_formats=None, queries=None)

CLEAN = PluginEntry(
    "zero_copy_twin",
    "transfer",
    {
        "reference": "topkv.transfer.reference:ReferenceTransfer",
        "triton": "topkv.transfer.triton:TritonTransfer",
    },
    capabilities=CODED,
)


def mutant(factory: type, test: str, seen_on: str = "cpu") -> Mutant:
    """The mutant of an engine that one test of the suite has to fail."""
    name = factory.__name__
    factories = {tier(seen_on).impl: f"{factory.__module__}:{name}"}
    entry = PluginEntry(name.lower(), "transfer", factories, capabilities=CODED)
    return Mutant(name_of(factory), TransferTests, test, entry, CLEAN, (seen_on,))


_ORDERED = "test_plan_and_load_follow_the_ordered_model"
_OFFLOAD = "test_offload_moves_what_closed"
_CODED = "test_coded_entries_hold_what_was_rounded"

MUTANTS = [
    mutant(EvictsAHit, "test_what_is_selected_is_not_evicted"),
    mutant(EvictsTheNewest, _ORDERED),
    mutant(KeepsVictimsInTheMap, "test_state_machine"),
    mutant(TakesLogicalForHostIds, _ORDERED),
    mutant(TakesHostIdsForSlots, _ORDERED),
    mutant(AcceptsIdsBehindTheLimit, "test_ids_out_of_range_are_dropped_wherever_they_stand"),
    mutant(CountsDuplicatesTwice, "test_persistent_duplicates_do_not_grow_occupancy"),
    mutant(ForgetsTheRing, "test_lengths_around_ring_and_buffer"),
    mutant(LeavesValuesBehindCount, "test_padded_rows_change_nothing"),
    mutant(LoadsKeysOnly, "test_row_formats_move_bytewise"),
    mutant(OffloadsAUnitLate, _OFFLOAD),
    mutant(OffloadsTheUnitThatOpens, _OFFLOAD),
    mutant(OffloadsWhatDidNotAppend, _OFFLOAD),
    mutant(OffloadsOneLayer, _OFFLOAD),
    mutant(KeepsOldCopies, "test_a_unit_written_again_is_new_in_every_copy"),
    mutant(StaysResidentTooLong, "test_lengths_around_ring_and_buffer"),
    mutant(ChunksMissTheRing, "test_chunks_fetch_flush_and_restore"),
    mutant(ChunksKeepOldCopies, "test_a_unit_written_again_is_new_in_every_copy"),
    mutant(ChunksBeginAtTheirUnits, "test_chunks_fetch_flush_and_restore"),
    mutant(ForgetsToResetTheOrder, "test_a_reused_slot_remembers_nothing"),
    mutant(ResetsItsCounts, "test_a_reused_slot_remembers_nothing"),
    mutant(FlushesNothing, "test_chunks_fetch_flush_and_restore"),
    mutant(RestoresWithoutRing, "test_chunks_fetch_flush_and_restore"),
    mutant(KernelSeesAWiderRing, "test_lengths_around_ring_and_buffer", "interpret"),
    mutant(KernelKeepsVictimsInTheMap, "test_what_is_selected_is_not_evicted", "interpret"),
    mutant(KernelEvictsAHit, "test_what_is_selected_is_not_evicted", "interpret"),
    mutant(KernelOffloadsWhatDidNotAppend, _OFFLOAD, "interpret"),
    mutant(KernelLoadsFromTheFirstHead, _ORDERED, "interpret"),
    mutant(ChunksKeepOldExponents, _CODED),
    mutant(KernelAppendsKeysTwice, "test_append_writes_the_new_token_alone", "interpret"),
    mutant(LoadsIfThereAreMisses, "test_hot_hooks_read_nothing_on_the_host", "interpret"),
    mutant(WrapsFarAddresses, "test_addresses_beyond_32_bits", "gpu"),
]
