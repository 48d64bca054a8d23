"""Windows, rollback, truncation and forks through the real coordinator."""

from __future__ import annotations

import pytest
import torch

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape
from topkv_clusterkv.entry import topkv_register_algorithms
from topkv_testing.doubles import Entries
from topkv_testing.integrity import check_integrity
from topkv_testing.oracle import attention

HEADS, KV_HEADS, DIM, MOST, RING = 4, 2, 8, 64, 4
PARAMS = {
    "tokens_per_cluster": 2,
    "window": 6,
    "segment": 12,
    "sinks": 2,
    "iterations": 3,
    "seed": 0,
}


class Decoder:
    """A coordinator, and the keys and values of every request beside it."""

    def __init__(self, on, budget, params=PARAMS):
        # Interpreted kernels are slow; the last layer joins what the others began.
        self.layers = 1 if on.name == "interpret" else 2
        model = ModelShape(self.layers, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
        config = SparseConfig(
            algorithm="clusterkv",
            backend="gather",
            impl=on.impl,
            unit=1,
            budget=budget,
            buffer=max(budget, 16),
            ring_tokens=RING,
            page_tokens=4,
            max_requests=3,
            max_tokens=3 * MOST,
            max_request_tokens=MOST,
            dense_layers=[],
            poison=True,
            prefill_block_tokens=8,
            params=params,
        )
        registry = PluginRegistry([("t", "1", Entries(*topkv_register_algorithms()))])
        lowered = lower(config, model, device=on.device, registry=registry)
        self.coordinator = SparseCoordinator(lowered, registry)
        self.device = on.device
        self.generator = torch.Generator().manual_seed(1)
        self.held = {}
        self.selected = {}

    def begin(self):
        slot = self.coordinator.request_begin()
        self.held[slot] = [torch.empty(0, KV_HEADS, 2, DIM) for _ in range(self.layers)]
        return slot

    def draw(self, count):
        q = torch.randn(self.layers, count, HEADS, DIM, generator=self.generator)
        kv = torch.randn(self.layers, count, KV_HEADS, 2, DIM, generator=self.generator)
        return q, kv

    def prefill(self, slot, count):
        q, kv = self.draw(count)
        self.coordinator.forward_begin(prefill=[(slot, count)])
        self._layers([slot], q, kv, count)
        self.coordinator.forward_end()

    def decode(self, *slots, data=None):
        """One token each; returns outputs ``[layers, rows, H, D]``."""
        q, kv = data or self.draw(len(slots))
        self.coordinator.forward_begin(decode=list(slots))
        out = self._layers(slots, q, kv, 1)
        self.coordinator.forward_end()
        return out

    def _layers(self, slots, q, kv, count):
        outs = []
        for layer in range(self.layers):
            new = kv[layer].to(self.device)
            k, v = new[:, :, 0].contiguous(), new[:, :, 1].contiguous()
            outs.append(self.coordinator.attention(layer, q[layer].to(self.device), k, v).cpu())
            for row, slot in enumerate(slots):
                part = kv[layer][row * count : (row + 1) * count]
                self.held[slot][layer] = torch.cat([self.held[slot][layer], part])
            ids = self.coordinator.layers[layer].lanes.selection.ids
            self.selected[layer] = ids.cpu().view(-1, KV_HEADS, ids.shape[1]).tolist()
        return torch.stack(outs)

    def cut(self, slot, length, how):
        getattr(self.coordinator, how)(slot, length)
        self.held[slot] = [held[:length] for held in self.held[slot]]

    def fork(self, slot):
        twin = self.coordinator.fork(slot)
        self.held[twin] = list(self.held[slot])
        return twin

    def dense(self, slot, q):
        """Exact outputs ``[layers, H, D]`` of the newest token."""
        return torch.stack(
            [
                attention(q[layer], held[:, :, 0], held[:, :, 1], DIM**-0.5)[0][0]
                for layer, held in enumerate(self.held[slot])
            ]
        )

    def state(self, slot, layer=0):
        """Watermark, built, clusters."""
        return self.coordinator.layers[layer].view.pools["state"][slot, :3].tolist()

    def check_dense(self, *slots):
        """Check that a step with a covering budget is dense attention: each token once."""
        q, kv = self.draw(len(slots))
        out = self.decode(*slots, data=(q, kv))
        for row, slot in enumerate(slots):
            exact = self.dense(slot, q[:, row : row + 1])
            assert (out[:, row].double() - exact).abs().max() < 1e-5

    def check_forced(self, slot):
        """A step's selection: sinks and open window, only tokens that are there, K of them."""
        self.decode(slot)
        length = len(self.held[slot][0])
        watermark = self.state(slot)[0]
        forced = {*range(PARAMS["sinks"]), *range(max(watermark, 2), length - 1)}
        for layer in range(self.layers):
            for lane in self.selected[layer][0]:
                chosen = [token for token in lane if token >= 0]
                assert len(set(chosen)) == len(chosen) == min(len(lane), length - 1)
                assert 0 <= min(chosen) <= max(chosen) < length - 1
                assert set(sorted(forced)[-len(lane) :]) <= set(chosen)


def test_windows_are_clustered_as_decode_fills_them(on):
    d = Decoder(on, budget=16)
    slot = d.begin()
    d.prefill(slot, 17)
    assert d.state(slot) == [12, 12, 5], "full segments, while prompts may go on"
    pools = d.coordinator.layers[0].view.pools
    names = ("centroids", "ends", "members")
    settled, clusters, before = 17, 8, None  # the end of the prompt makes three more
    for _ in range(14):
        d.check_forced(slot)
        length = len(d.held[slot][0])
        # The settle of a step comes before its token.
        if length - 1 - settled >= PARAMS["window"]:
            settled, clusters = length - 1, clusters + 3
        assert d.state(slot) == [settled, settled, clusters]
        widths = (clusters, clusters, settled - 2)
        now = [pools[n][slot][:, :w].cpu() for n, w in zip(names, widths, strict=True)]
        for old, new in zip(before or [], now, strict=bool(before)):
            assert torch.equal(old, new[:, : old.shape[1]]), "old clusters changed"
        before = now
        for head in before[2].tolist():
            assert sorted(head) == list(range(2, settled))
    assert settled == 29


def test_covering_budget_is_dense_whatever_happens_to_the_request(on):
    d = Decoder(on, budget=MOST + 1)
    slot = d.begin()
    for chunk in (1, 1, 7, 13, 1):
        d.prefill(slot, chunk)
    for _ in range(14):
        d.check_dense(slot)
    assert d.state(slot)[0] == 35
    d.prefill(slot, 9)  # a chunk after decode
    d.check_dense(slot)
    twin = d.fork(slot)
    for _ in range(3):
        d.check_dense(slot, twin)
    d.cut(slot, 20, "truncate")  # into a segment of the prompt
    d.check_dense(slot, twin)
    d.prefill(slot, 11)
    d.check_dense(twin, slot)
    d.cut(slot, 1, "truncate")
    d.prefill(slot, 10)
    for _ in range(8):
        d.check_dense(slot)
    d.coordinator.request_end(slot)
    assert d.begin() == slot
    assert d.state(slot) == [0, 0, 0]
    d.prefill(slot, 3)
    for _ in range(7):
        d.check_dense(slot, twin)
    check_integrity(d.coordinator)


def test_rollback_below_the_clustered_tokens(on):
    d = Decoder(on, budget=12)
    slot = d.begin()
    d.prefill(slot, 14)
    for _ in range(7):
        d.check_forced(slot)
    assert d.state(slot) == [20, 20, 9]
    d.cut(slot, 18, "rollback")
    d.check_forced(slot)
    # Tokens 18 .. 20 are in clusters, and rejected; they are in no selection as such.
    assert d.state(slot) == [18, 20, 9]
    for _ in range(12):
        d.check_forced(slot)
    watermark, built, _ = d.state(slot)
    assert watermark == built == 30
    members = d.coordinator.layers[0].view.pools["members"][slot, :, : built - 2]
    for head in members.tolist():
        assert sorted(head) == list(range(2, built))


def test_forked_twins_answer_alike_and_go_their_own_ways(on):
    d = Decoder(on, budget=10)
    slot = d.begin()
    d.prefill(slot, 23)
    for _ in range(4):
        d.decode(slot)
    twin = d.fork(slot)
    for _ in range(3):
        q, kv = d.draw(1)
        out = d.decode(slot, twin, data=(q.repeat(1, 2, 1, 1), kv.repeat(1, 2, 1, 1, 1)))
        assert torch.equal(out[:, 0], out[:, 1])
    assert d.state(slot) == d.state(twin)
    before = d.state(slot)
    for _ in range(7):
        d.decode(twin)
    assert d.state(twin) != before == d.state(slot)


def _goes_on(d, slot):
    d.cut(slot, 5, "truncate")
    d.decode(slot)


def _is_prompted_again(d, slot):
    d.cut(slot, 5, "truncate")
    d.prefill(slot, 19)
    d.decode(slot)


def _rolls_back(d, slot):
    d.cut(slot, 15, "rollback")
    d.decode(slot)


def _is_aborted(d, slot):
    q, kv = d.draw(20)
    d.coordinator.forward_begin(prefill=[(slot, 20)])
    for layer in range(d.layers):
        k, v = (kv[layer, :, :, part].contiguous().to(d.device) for part in (0, 1))
        d.coordinator.attention(layer, q[layer].to(d.device), k, v)
    d.coordinator.forward_abort()
    d.decode(slot)


@pytest.mark.parametrize(
    ("prompt", "then"),
    [(23, _goes_on), (23, _is_prompted_again), (18, _rolls_back), (3, _is_aborted)],
)
def test_keys_of_rejected_tokens_reach_no_centroid(on, prompt, then):
    """The ring of keys holds those of a longer prompt when the segment is clustered at last."""
    d = Decoder(on, budget=12, params={**PARAMS, "segment": 24, "sinks": 0})
    slot = d.begin()
    d.prefill(slot, prompt)
    then(d, slot)
    pools = d.coordinator.layers[0].view.pools
    clusters = d.state(slot)[2]
    assert clusters > 0
    for head in range(KV_HEADS):
        begin = 0
        for place, end in enumerate(pools["ends"][slot, head, :clusters].tolist()):
            members = pools["members"][slot, head, begin:end].cpu().long()
            if len(members):
                mean = d.held[slot][0][members, head, 0].mean(0)
                assert torch.allclose(pools["centroids"][slot, head, place].cpu(), mean, atol=1e-5)
            begin = end


def test_places_of_emptied_clusters_are_taken_again(on):
    """Prompts that are cut and read again do not run out of places."""
    d = Decoder(on, budget=12, params={**PARAMS, "segment": 24})
    slot = d.begin()
    for _ in range(12):
        d.prefill(slot, 50 - len(d.held[slot][0]))
        d.decode(slot)
        d.cut(slot, 30, "truncate")
    pools = d.coordinator.layers[0].view.pools
    _, built, clusters = d.state(slot)
    ends = pools["ends"][slot, :, :clusters]
    sizes = ends.diff(dim=1, prepend=torch.zeros_like(ends[:, :1]))
    assert built == 50
    assert int(sizes.max()) < 12


def test_chunk_schedules_cluster_the_same_tokens(on):
    ends = []
    for chunks in ([30], [5, 1, 9, 15], [1] * 30):
        d = Decoder(on, budget=10)
        slot = d.begin()
        for chunk in chunks:
            d.prefill(slot, chunk)
        ends.append(d.state(slot)[:2])
    assert ends == [[24, 24]] * 3


@pytest.mark.parametrize("places", [1, 2])
def test_places_that_run_short_join_the_last_cluster(places):
    from topkv_clusterkv.entry import ClusterParams
    from topkv_clusterkv.store import RequestClusters

    settings = ClusterParams(**{**PARAMS, "sinks": 0})
    pools = {
        "centroids": torch.zeros(1, KV_HEADS, places, DIM),
        "ends": torch.zeros(1, KV_HEADS, places, dtype=torch.int32),
        "members": torch.full((1, KV_HEADS, 12), -1, dtype=torch.int32),
    }
    keys = torch.randn(12, KV_HEADS, DIM, generator=torch.Generator().manual_seed(0))
    done = RequestClusters(pools, 0, settings, 0, 0)
    done.append(keys[:6], 0)
    done.append(keys[6:], 6)
    assert done.clusters == places
    for head in range(KV_HEADS):
        assert pools["members"][0, head].sort().values.tolist() == list(range(12))
        edges = [0, *pools["ends"][0, head].tolist()]
        assert edges[-1] == 12
        for c in range(places):
            ids = pools["members"][0, head, edges[c] : edges[c + 1]].long()
            assert torch.equal(ids, ids.sort().values)
            assert torch.allclose(
                pools["centroids"][0, head, c], keys[ids, head].mean(0), atol=1e-5
            )


def test_a_chunk_in_which_no_segment_ends_reads_nothing(on, monkeypatch):
    """The host waits for the device only where clusters are made behind others."""
    d = Decoder(on, 12)
    reads, tolist = [], torch.Tensor.tolist
    slot = d.begin()
    state = tuple(d.coordinator.layers[0].view.pools["state"][slot].shape)
    monkeypatch.setattr(torch.Tensor, "tolist", lambda x: reads.append(x.shape) or tolist(x))
    # Segments of 12 tokens end within the third, the fifth and the last chunk.
    for count, wanted in [(5, 0), (4, 0), (4, 1), (9, 0), (5, 1), (8, 0), (12, 1)]:
        reads.clear()
        d.prefill(slot, count)
        assert reads.count(state) == wanted * d.layers
