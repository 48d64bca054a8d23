"""Prompts and steps through the coordinator, beside the whole formula in float64."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from topkv import SparseCoordinator
from topkv.config import SparseConfig, lower
from topkv.errors import ConfigError
from topkv.plugins import registry
from topkv.types import Index, IndexerShape, ModelShape
from topkv_testing.fixtures import on as on
from topkv_testing.integrity import check_integrity
from topkv_testing.tiers import all_tiers

LAYERS, DIM, INDEX_DIM, UNIT, BLOCKS = 2, 64, 24, 4, 4


def make(on, heads=2, local=1, **options):
    index = IndexerShape(options.pop("index_heads", heads), INDEX_DIM)
    model = ModelShape(LAYERS, 2 * heads, heads, DIM, torch.float32, DIM**-0.5, indexer=index)
    sizes = {"unit": UNIT, "budget": UNIT * BLOCKS, "buffer": 2 * UNIT * BLOCKS}
    pages = {"page_tokens": 8, "max_requests": 3, "max_tokens": 512, "max_request_tokens": 160}
    plugins = {"algorithm": "trained_gate", "backend": "triton_attention"}
    own = {"impl": on.impl, "params": {"local": local}}
    config = SparseConfig(**{**plugins, **sizes, **pages, **own, **options})
    lowered = lower(config, model, device=on.device, registry=registry())
    return SparseCoordinator(lowered, registry())


def padded(rows, count):
    """Rows, and some of NaN behind them."""
    return torch.cat([rows, rows.new_full((count, *rows.shape[1:]), torch.nan)])


class Life:
    """A request whose every row is compared, in every layer."""

    def __init__(self, coordinator, seed, local=1):
        self.coordinator, self.model, self.local = coordinator, coordinator.model, local
        self.random = torch.Generator().manual_seed(seed)
        heads = (self.model.num_kv_heads, DIM)
        self.k, self.v = (torch.empty(LAYERS, 0, *heads) for _ in range(2))
        self.keys = torch.empty(LAYERS, 0, INDEX_DIM)
        self.slot = coordinator.request_begin()

    def forward(self, count, decode=False, queries=1):
        m, device = self.model, self.coordinator.config.device
        rows = {"prefill": [(self.slot, count)]}
        if decode:
            rows = {"decode": [self.slot], "append": [count], "queries": queries}
        padding = max(queries - count, 0)
        self.coordinator.forward_begin(**rows)
        start = self.k.shape[1]
        drawn = [self._draw(count, n) for n in (m.num_heads, m.num_kv_heads, m.num_kv_heads)]
        self.k, self.v = torch.cat([self.k, drawn[1]], 1), torch.cat([self.v, drawn[2]], 1)
        asked = self._draw(count, m.num_kv_heads, INDEX_DIM)
        self.keys = torch.cat([self.keys, self._draw(count, INDEX_DIM)], 1)
        for layer in range(LAYERS):
            of_index = (asked[layer], self.keys[layer, start:])
            given = [padded(each, padding).to(device) for each in of_index]
            inputs = (padded(each[layer], padding).to(device) for each in drawn)
            index = Index(*given)
            out = self.coordinator.attention(layer, *inputs, index).cpu()
            for row in range(count):
                # All queries of a step select together.
                first, selecting = (start, asked[layer]) if decode else (start + row, None)
                selecting = asked[layer, row][None] if selecting is None else selecting
                expected = self.expected(
                    layer, start + row, drawn[0][layer, row], selecting, first
                )
                torch.testing.assert_close(out[row].double(), expected, rtol=1e-4, atol=1e-5)
        self.coordinator.forward_end()

    def _draw(self, count, *shape):
        shape = shape if len(shape) > 1 or shape[0] == INDEX_DIM else (*shape, DIM)
        return torch.randn(LAYERS, count, *shape, generator=self.random)

    def expected(self, layer, at, q, asked, first):
        """``[H, D]`` of the row at position ``at``: blocks by their best key, for the best of
        queries ``asked``, and those of ``first`` and what follows it up to its own."""
        own, outs = first // UNIT, []
        group = self.model.group_size
        for head in range(self.model.num_kv_heads):
            products = (self.keys[layer].double() @ asked[:, head].double().T).amax(1)
            best = {u: products[u * UNIT : min((u + 1) * UNIT, at + 1)].max() for u in range(own)}
            forced = {*range(max(0, own - self.local + 1), own + 1)}
            others = sorted(best.keys() - forced, key=lambda u: -best[u])
            chosen = forced | {*others[: BLOCKS - len(forced)], *range(own, at // UNIT + 1)}
            seen = torch.tensor([t for t in range(at + 1) if t // UNIT in chosen])
            k, v = (x[layer, seen, head].double() for x in (self.k, self.v))
            heads = q[head * group : (head + 1) * group].double()
            outs.append((heads @ k.T * DIM**-0.5).softmax(-1) @ v)
        return torch.cat(outs)


def test_rows_attend_to_the_blocks_of_their_heads(on):
    """Rows are of chunks that end anywhere, of steps, of a further prompt, and after a cut."""
    heads, local = 3, 2

    @settings(max_examples=1 if on.name == "interpret" else 12, deadline=None)
    @given(st.lists(st.integers(1, 40), min_size=1, max_size=3), st.integers(0, 2**16))
    @example([23, 18], 0)
    def check(chunks, seed):
        coordinator = make(on, heads, local)
        life = Life(coordinator, seed, local)
        for count in chunks:
            life.forward(count)
        for _ in range(6):
            life.forward(1, decode=True)
        life.forward(9)
        life.forward(1, decode=True)
        length = life.k.shape[1] - 5
        coordinator.truncate(life.slot, length)
        life.k, life.v, life.keys = (x[:, :length] for x in (life.k, life.v, life.keys))
        life.forward(1, decode=True)
        check_integrity(coordinator)
        coordinator.close()

    check()


def test_rows_of_several_queries_attend_to_the_blocks_of_the_best(on):
    """Some tokens of a step are taken back, and others come in their place."""

    @settings(max_examples=1 if on.name == "interpret" else 12, deadline=None)
    @given(st.data(), st.integers(17, 40), st.integers(0, 2**16))
    def check(data, prompt, seed):
        coordinator = make(on, 3, 2, max_queries=4)
        life = Life(coordinator, seed, 2)
        life.forward(prompt)
        for _ in range(5):
            queries = data.draw(st.integers(1, 4))
            count = data.draw(st.integers(1, queries))
            life.forward(count, decode=True, queries=queries)
            length = life.k.shape[1] - data.draw(st.integers(0, count - 1))
            coordinator.rollback(life.slot, length)
            life.k, life.v, life.keys = (x[:, :length] for x in (life.k, life.v, life.keys))
        check_integrity(coordinator)
        coordinator.close()

    check()


def test_a_fork_goes_its_own_way():
    on = next(each for each in all_tiers() if each.name == "cpu")
    coordinator = make(on)
    life = Life(coordinator, 3)
    life.forward(37)
    twin = Life(coordinator, 4)
    coordinator.request_end(twin.slot)
    twin.slot = coordinator.fork(life.slot)
    twin.k, twin.v, twin.keys = life.k.clone(), life.v.clone(), life.keys.clone()
    for _ in range(6):
        for each in (life, twin):
            each.forward(1, decode=True)
    coordinator.close()


@pytest.mark.parametrize(
    ("options", "reported"),
    [
        ({"local": 5}, "local must be a number of units from 1 to 4, which the budget has, got 5"),
        ({"local": "all"}, "must be an int, got 'all'"),
        (
            {"index_heads": 1},
            "each kv-head needs an index head of its own, got 1 index heads for 2",
        ),
        ({"scope": "shared"}, "takes scope kv_head, got shared"),
    ],
)
def test_what_does_not_fit_is_refused(options, reported):
    on = next(each for each in all_tiers() if each.name == "cpu")
    with pytest.raises(ConfigError) as error:
        make(on, **options)
    assert reported in "\n".join(error.value.reasons)


def test_a_model_without_an_index_is_refused():
    on = next(each for each in all_tiers() if each.name == "cpu")
    model = ModelShape(LAYERS, 4, 2, DIM, torch.float32, 0.25)
    config = SparseConfig(algorithm="trained_gate", backend="triton_attention", max_tokens=512)
    with pytest.raises(
        ConfigError, match="selects by the model's own indexer, and this model has"
    ):
        lower(config, model, device=on.device, registry=registry())


def test_other_shapes_are_refused():
    on = next(each for each in all_tiers() if each.name == "cpu")
    coordinator = make(on)
    slot = coordinator.request_begin()
    coordinator.forward_begin(prefill=[(slot, 3)])
    q, k = torch.zeros(3, 4, DIM), torch.zeros(3, 2, DIM)
    with pytest.raises(ValueError, match=r"expected k of the index \[3, 1, 24\], got \[3, 1, 8\]"):
        coordinator.attention(0, q, k, k, Index(torch.zeros(3, 2, INDEX_DIM), torch.zeros(3, 8)))
    coordinator.forward_abort()
    coordinator.close()
