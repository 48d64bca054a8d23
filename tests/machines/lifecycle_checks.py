"""Invariants of the lifecycle machine, which hold after every call."""

from __future__ import annotations

import torch
from torch import Tensor

from topkv.kv.host_pool import POISON
from topkv.kv.store import GroupStore
from topkv.report import TransferReport
from topkv.types import LayerView
from topkv_testing.integrity import check_integrity
from topkv_testing.machines.lifecycle_model import RESIDENT, SPARSE, STREAMED, Side
from topkv_testing.models.cache_model import RequestModel


def poisoned(rows: Tensor) -> bool:
    """Return True if nothing was written to these rows since they were freed."""
    return bool((rows.isnan() if rows.is_floating_point() else rows == POISON).all())


def hits_and_misses(report: TransferReport) -> dict[int, list[int]]:
    """Hits and misses of each layer."""
    return {layer: [counts.hits, counts.misses] for layer, counts in report.layers.items()}


class Checks(Side):
    """Comparisons of the coordinator's memory with the model."""

    def check_counts(self) -> None:
        """Check slots, pages, page tables, and the counts that the core reports."""
        coordinator, manager = self.coordinator, self.coordinator.manager
        check_integrity(coordinator)
        assert manager.host.free == self.pages.free
        assert coordinator.requests.free == len(coordinator.requests.active) - len(self.live)
        self.pages.match({slot: coordinator.requests.pages.of(slot) for slot in self.live})
        for slot, row in enumerate(coordinator.requests.pages.table.tolist()):
            held = coordinator.requests.pages.of(slot)
            assert row == held + [0] * (len(row) - len(held)), f"page table of slot {slot}: {row}"
        for slot, request in self.live.items():
            counts = hits_and_misses(coordinator.transfers_of([slot]))
            assert counts == request.counts, f"hits and misses of slot {slot}: {counts}"
        every = [request.counts for request in (*self.live.values(), *self.ended)]
        sums = {
            layer: [sum(counts[layer][at] for counts in every) for at in (0, 1)]
            for layer in self.groups
        }
        assert hits_and_misses(coordinator.transfers_of()) == sums, "counts of all requests"

    def check_lanes(self) -> None:
        """Check order and maps of every lane."""
        for slot, request in self.live.items():
            assert self.coordinator.length(slot) == request.length
            for layer, group in self.groups.items():
                view, store = self._place(layer)
                place = store.lanes_of(slot)
                lanes = [request.lanes[layer, head] for head in range(group.lane_heads)]
                order = store.order[view.index, place].tolist()
                assert order == [lane.order for lane in lanes], f"eviction order of slot {slot}"
                units = store.slot_unit[view.index, place].tolist()
                expected = [[-1 if u is None else u for u in lane.unit_in] for lane in lanes]
                assert units == expected, f"units in the buffer of slot {slot}, layer {layer}"

    def check_tokens(self) -> None:
        """Check entries on both tiers, and representations, of every unit that they must hold."""
        for slot, request in self.live.items():
            for layer in self.groups:
                self._check_closed_units(slot, request, layer)
                self._check_ring(slot, request, layer)
                self._check_state(slot, request, layer)
            for layer in (RESIDENT, STREAMED):
                self._check_pages(slot, request, layer)

    def _place(self, layer: int) -> tuple[LayerView, GroupStore]:
        view = self.coordinator.layers[layer].view
        stores = self.coordinator.manager.stores
        return view, next(store for store in stores if store.group is view.group)

    def _check_closed_units(self, slot: int, request: RequestModel, layer: int) -> None:
        group = self.groups[layer]
        count = max(0, (request.length - 1) // group.unit)
        if not count:
            return
        view, store = self._place(layer)
        units = torch.arange(count)
        held = torch.tensor(self.coordinator.requests.pages.of(slot))
        pages = held[units // group.units_per_page]
        within = units % group.units_per_page
        truth, host = request.entries(layer, group, count), store.host
        entries = host.decode(host.parts(store.entries[pages, view.index, :, within]))
        assert torch.equal(entries, truth), "host entries"
        hosts = pages * group.units_per_page + within
        self._check_representations(layer, request, hosts.to(self.on.device))
        lanes = store.lanes_of(slot)
        held = store.unit_slot[view.index, lanes, :count].cpu().T  # [units, lane heads]
        unit, head = (held >= 0).nonzero(as_tuple=True)
        copies = store.buffer[view.index, lanes].cpu()[head, held[unit, head].long()]
        assert torch.equal(copies, truth[unit, head]), "device copies"

    def _check_representations(self, layer: int, request: RequestModel, hosts: Tensor) -> None:
        """Check representations; ``hosts`` are the host ids of the closed units, in order."""
        unit, count = self.groups[layer].unit, len(hosts)
        pools, keys = self.coordinator.layers[layer].view.pools, request.k[layer][: count * unit]
        if self.follows and layer == SPARSE[1]:
            assert not pools, "a layer that shares keeps nothing to select by"
            return
        expected = keys.unflatten(0, (count, -1)).sum(1)
        torch.testing.assert_close(pools["sums"][hosts].cpu(), expected, rtol=1e-5, atol=1e-5)
        if "stages[0].keys" in pools:
            kept = pools["stages[0].keys"].unflatten(0, (-1, unit))[hosts].flatten(0, 1)
            assert torch.equal(kept.cpu(), keys), "keys that a stage keeps"

    def _check_state(self, slot: int, request: RequestModel, layer: int) -> None:
        """Check state that is keyed by slot."""
        if self.follows and layer == SPARSE[1]:
            return
        turns = self.coordinator.layers[layer].view.pools["turns"]
        assert int(turns[slot]) == request.turns, "state that is keyed by slot"

    def _check_ring(self, slot: int, request: RequestModel, layer: int) -> None:
        group, length = self.groups[layer], request.length
        view, _ = self._place(layer)
        ring = torch.stack([view.ring_k[slot], view.ring_v[slot]][: group.planes]).cpu()
        rows = request.planes(layer)
        for unit in range(request.ring_low(group), -(-length // group.unit)):
            tokens = slice(unit * group.unit, min(length, (unit + 1) * group.unit))
            held = ring[:, :, unit % group.ring_slots, :, : tokens.stop - tokens.start]
            held = held.flatten(1, 2).transpose(1, 2)
            assert torch.equal(held, rows[:, tokens]), f"ring, unit {unit}"

    def _check_pages(self, slot: int, request: RequestModel, layer: int) -> None:
        """Check that dense layers hold every token in their pages."""
        view, store = self._place(layer)
        pages = self.coordinator.requests.pages.of(slot)
        entries = store.entries[pages, view.index, 0, 0].cpu()  # [pages, Hkv, planes, tokens, D]
        tokens = entries.permute(2, 0, 3, 1, 4).flatten(1, 2)[:, : request.length]
        assert torch.equal(tokens, request.planes(layer)), "pages of a dense layer"

    def check_poison(self) -> None:
        """Check that nothing was written to a page or a slot after it was freed."""
        manager, table = self.coordinator.manager, self.coordinator.requests.pages.table
        self.seen_pages |= set(table.flatten().tolist()) - {0}
        freed = [page for page in self.seen_pages if manager.host.references[page] == 0]
        for store, pools in zip(manager.stores, manager.representations, strict=True):
            assert poisoned(store.entries[freed]), "a freed page was written"
            for spec in pools.specs:
                if spec.grain != "request":
                    pool = pools.pools[spec.name].unflatten(1, (manager.host.num_pages, -1))
                    assert poisoned(pool[:, freed]), "a freed page was represented"
        for slot in self.used - set(self.live):
            for layer in self.groups:
                view, store = self._place(layer)
                buffer = store.buffer[view.index, store.lanes_of(slot)]
                assert poisoned(buffer), "the buffer of an ended request was written"
                for spec in self.coordinator.layers[layer].algorithm.spec().representations:
                    own = spec.grain == "request" and spec.name in view.pools
                    kept = own and view.pools[spec.name][slot].any()
                    assert not kept, "state outlived its request"
