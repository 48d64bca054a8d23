"""Contract with the core: hook names, refusals, the entry, and decoding inside a CUDA graph."""

from __future__ import annotations

import inspect

import attrs
import pytest
import torch

from topkv.errors import ConfigError
from topkv.hooks.algorithm import Algorithm
from topkv.types import IndexerShape, Selection
from topkv_deepseek_dsa.entry import IndexerParams, topkv_register_algorithms

HOOKS = ("spec", "construct", "update", "retrieve_topk", "retrieve_prompt")


def test_one_instance_serves_the_hooks_by_their_names(world, impl, device):
    w = world(impl, device)
    for name in HOOKS:
        method = getattr(w.indexer, name)
        assert hasattr(method, "topkv_impl")
        assert (
            list(inspect.signature(method).parameters)
            == list(inspect.signature(getattr(Algorithm, name)).parameters)[1:]
        )


def test_the_entry_says_what_it_needs(world):
    (entry,) = topkv_register_algorithms()
    assert entry.capabilities.needs_index
    assert entry.capabilities.attention == ("mla",)
    assert entry.parameters() == IndexerParams("fp8", False, "fp32", 0.0)
    assert entry.defaults["budget"] == 2048
    assert entry.defaults["page_tokens"] % 64 == 0
    assert entry.capabilities.tail == "selectable"
    spec = world("reference", "cpu").indexer.spec()
    assert spec.prefix == "pages"
    assert not spec.representations[0].derived


def test_other_shapes_than_the_indexers_are_refused(world, impl, device):
    w = world.filled(impl, device)
    q, weights = (x.to(device) for x in w.queries(3))
    ids = torch.zeros(3, 8, dtype=torch.int32, device=device)
    w.rows([0, 1, 2])
    for wrong, given_weights, match in (
        (q[:, :, :2], weights[:, None], "expected q of the index"),
        (q.expand(3, 2, 4, 16), weights[:, None], "expected q of the index"),
        (q, weights[:, None, :2], "expected weights of the index"),
        (q, None, "weights of the index .*, got None"),
    ):
        with pytest.raises(ValueError, match=match):
            w.indexer.retrieve_topk(w.layer, wrong, given_weights, Selection(ids))
    with pytest.raises(ValueError, match="expected k of the index"):
        w.indexer.update(w.layer, q[:, :, None, :2], q)
    with pytest.raises(ValueError, match="expected k of the index"):
        w.indexer.construct(w.layer, 0, 0, q[:, 0], q, q, weights)
    with pytest.raises(ValueError, match="expected weights of the index"):
        w.indexer.retrieve_prompt(w.layer, 0, 0, q[:, 0], weights[:2], ids)


def test_wrong_parameters_are_refused_together(world):
    with pytest.raises(ConfigError) as raised:
        world("reference", "cpu", keys="int4", hadamard=1, scale_format="e8")
    assert len(raised.value.reasons) == 3
    with pytest.raises(ConfigError, match="page_tokens must be a multiple of 64, got 96"):
        world("reference", "cpu", page=96)
    with pytest.raises(ConfigError, match="power of two from 16 to 256, got 96"):
        world("reference", "cpu", dim=96)
    with pytest.raises(ConfigError, match="from 1 to 128 index heads"):
        world("reference", "cpu", heads=129)
    with pytest.raises(ConfigError, match=r"sticky of deepseek_dsa must be >= 0, got -0\.5"):
        world("reference", "cpu").make("reference", {"sticky": -0.5})


def test_the_shape_of_the_indexer_decides_what_is_kept(world):
    w = world("reference", "cpu")
    params: dict[str, object] = {}
    with pytest.raises(ConfigError, match="unknown parameter 'sinks'"):
        w.make("reference", params | {"sinks": 1})
    wide = attrs.evolve(w.model, indexer=IndexerShape(64, 128))
    assert w.make("reference", params, model=wide).spec().representations[0].bytes == 132


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("hadamard", [False, True])
def test_a_graph_replays_update_and_retrieve(world, form, hadamard):
    """One capture serves growing lengths and other pages."""
    w = world.filled("triton", "cuda", keys=form, hadamard=hadamard, heads=64, dim=128, select=40)
    slots, k = [0, 1, 2], w.random(3)[:, None].cuda()
    q, weights = (x.cuda() for x in w.queries(3))
    ids = torch.empty(3, 40, dtype=torch.int32, device="cuda")
    w.rows(slots, appended=1)
    step = w.layer.step

    def decode():
        w.indexer.update(w.layer, k[:, None], k[:, None])
        w.indexer.retrieve_topk(w.layer, q, weights[:, None], Selection(ids))

    decode()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        decode()
    w.prefill(0, w.keys[0][:120])
    for _ in range(10):
        fresh, (other, others) = w.random(3), w.queries(3)
        w.append(slots, fresh)
        expected, before = w.retrieve(other, others, slots), w.pool.clone()
        k.copy_(fresh[:, None])
        q.copy_(other)
        weights.copy_(others)
        step.lengths.copy_(w.layer.step.lengths)
        ids.fill_(-7)
        for slot in slots:
            w.overwrite(slot, torch.tensor([len(w.keys[slot]) - 1]), 0x3A)
        graph.replay()
        assert torch.equal(w.pool.view(torch.uint8), before.view(torch.uint8))
        assert w.formed(ids, [len(w.keys[slot]) for slot in slots]) == expected
