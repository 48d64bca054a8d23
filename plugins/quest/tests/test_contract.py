"""Contract with the core: hook names, refusals, and decoding inside a CUDA graph."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

import topkv.hooks.algorithm as hooks
from topkv.errors import ConfigError
from topkv.hooks.algorithm import AlgorithmSetup
from topkv.plugins.contract import check_instance, has_hook
from topkv.types import Selection
from topkv_quest.quest import Quest


def test_one_instance_serves_the_hooks_by_their_names(world, impl, device):
    w = world(impl, device)
    check_instance(w.quest, hooks, "quest")
    for name in ("settle", "retrieve_prompt", "truncated"):
        assert not has_hook(w.quest, name)
    ids = torch.zeros(2, 3).int()
    with pytest.raises(ValueError, match="at most 1 queries a row"):
        w.quest.retrieve_topk(w.layer, torch.zeros(1, 2, 4, 12), None, Selection(ids))


def test_wrong_parameters_are_refused_together(world):
    with pytest.raises(ConfigError) as raised:
        world("reference", "cpu", metadata="fp8", sinks="all")
    assert len(raised.value.reasons) == 2
    for sinks in (True, 1.5, -1, 4):
        with pytest.raises(ConfigError, match="sink_units"):
            world("reference", "cpu", sinks=sinks)


def test_packed_rows_are_refused(world):
    """The ring has packed rows as they are stored, and bounds of their bytes bound nothing."""
    w = world("reference", "cpu", kv_heads=1)
    packed = evolve(w.group, head_dim=656, dtype=torch.uint8)
    setup = AlgorithmSetup(w.model, packed, w.quest.params, w.device, w._topk)
    with pytest.raises(ConfigError, match="set kv_format to 'model'"):
        Quest(setup)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_graph_replays_update_and_retrieve(world, metadata, scope):
    w = world.filled("triton", "cuda", metadata=metadata, scope=scope)
    slots, q, k = [0, 1, 2], w.queries(3).cuda(), w.random(3).cuda()
    ids = torch.empty(3 * w.group.lane_heads, 3, dtype=torch.int32, device="cuda")
    w.rows(slots, appended=1)
    step = w.layer.step

    def decode():
        w.quest.update(w.layer, k[:, None], k[:, None])
        w.quest.retrieve_topk(w.layer, q, None, Selection(ids))

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    for _ in range(2 * w.unit):
        if len(w.keys[0]) == 80:
            w.keys[0] = w.keys[0][:60]
        w.append(slots, w.random(3))
        q.copy_(w.queries(3))
        expected = w.retrieve(q, slots)
        step.lengths.copy_(w.layer.step.lengths)
        for pool in w.pools.values():
            pool[w.host(0, 20)[-1]] = 0
        graph.replay()
        assert torch.equal(ids.cpu().view_as(expected), expected)
