"""Latent rows and a model's own indexer through the whole coordinator, against float64."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.errors import ConfigError, RequestError
from topkv.kv import host_pool
from topkv.ops import chunk_attention
from topkv.plugins import PluginRegistry
from topkv.types import Index, IndexerShape, ModelShape
from topkv_authoring.latent_fp8 import decode_fp8, encode_fp8
from topkv_testing.doubles import GATHER, Entries, Gather
from topkv_testing.integrity import check_integrity
from topkv_testing.kit import examples
from topkv_testing.models.indexed import INDEXED, Indexed, index_scores
from topkv_testing.oracle import attention
from topkv_testing.tiers import all_tiers

DENSE_PROMPTS = evolve(INDEXED, name="dense_prompts", factories=f"{__name__}:DensePrompts")
REGISTRY = PluginRegistry([("test", "1", Entries(INDEXED, DENSE_PROMPTS))])
HEADS, MOST = 3, 48
FORMATS = {"model": (12, 8), "fp8": (576, 512)}


class Request:
    """Requests of a coordinator of two layers; with ``shared`` the second has no indexer."""

    def __init__(
        self,
        on,
        kv_format,
        select,
        seed,
        count=1,
        shared=False,
        algorithm="indexed",
        **options,
    ):
        dim, value = FORMATS[kv_format]
        self.model = ModelShape(
            *(2, HEADS, 1, dim, torch.float32, dim**-0.5),
            *("mla", value, IndexerShape(2, 4, (0,) if shared else None)),
        )
        config = SparseConfig(
            algorithm=algorithm,
            backend="gather",
            impl=on.impl,
            kv_format=kv_format,
            budget=select,
            buffer=select + 2,
            ring_tokens=4,
            page_tokens=4,
            max_requests=count + 1,
            max_tokens=(count + 1) * MOST,
            max_request_tokens=MOST,
            dense_layers=[],
            prefill_block_tokens=8,
            poison=True,
            **options,
        )
        lowered = lower(config, self.model, device=on.device, registry=REGISTRY)
        self.coordinator = SparseCoordinator(lowered, REGISTRY)
        self.select, self.shared, self.device = select, shared, on.device
        self.kv_format, self.value = kv_format, value
        generator = torch.Generator().manual_seed(seed)

        def made(*shape):
            return torch.randn(2, count, MOST, *shape, generator=generator)

        self.q, self.rows = made(HEADS, dim), made(1, dim)
        # Small integers: sums are exact in every order, and many scores tie.
        self.index_q, self.index_k, self.weights = (
            made(*shape).mul(2).round() for shape in ((2, 4), (4,), (2,))
        )
        self.slots = [self.coordinator.request_begin() for _ in range(count)]
        self.lengths = [0] * count

    def index(self, layer, which):
        if layer == 1 and self.shared:
            return None
        parts = (
            torch.cat([x[layer, r, t] for r, t in which]).to(self.device)
            for x in (self.index_q, self.index_k, self.weights)
        )
        return Index(*parts)

    def forward(self, decode=(), prefill=()):
        """Run both layers; return ``[layer][rows, H, value]`` of the decode rows, then chunks."""
        which = [(r, slice(self.lengths[r], self.lengths[r] + 1)) for r in decode]
        which += [(r, slice(self.lengths[r], self.lengths[r] + n)) for r, n in prefill]
        self.coordinator.forward_begin(
            decode=[self.slots[r] for r in decode],
            prefill=[(self.slots[r], n) for r, n in prefill],
        )
        outs = []
        for layer in range(2):
            q, rows = (
                torch.cat([x[layer, r, t] for r, t in which]).to(self.device)
                for x in (self.q, self.rows)
            )
            out = torch.full((*q.shape[:2], self.value), torch.nan, device=self.device)
            self.coordinator.attention(layer, q, rows, rows, self.index(layer, which), out)
            outs.append(out.cpu())
        self.coordinator.forward_end()
        for r, t in which:
            self.lengths[r] = t.stop
        return outs

    def expected(self, layer, r, t):
        """Attention of token t over the tokens that its index selects, from rows as stored."""
        source = 0 if self.shared else layer
        scores = index_scores(
            self.index_q[source, r, t : t + 1],
            self.weights[source, r, t : t + 1],
            self.index_k[source, r, : t + 1],
        )[0]
        best = scores.sort(descending=True, stable=True).indices[: self.select]
        rows = self.rows[layer, r, : t + 1]
        if self.kv_format == "fp8":
            rows = decode_fp8(encode_fp8(rows), torch.float64)
        mask = torch.zeros(1, t + 1, dtype=torch.bool)
        mask[0, best] = True
        q = self.q[layer, r, t : t + 1]
        return attention(q, rows, rows[..., : self.value], self.model.scale, mask)[0][0]

    def check(self, outs, which):
        for layer, out in enumerate(outs):
            for row, (r, t) in zip(out, which, strict=True):
                torch.testing.assert_close(
                    *(row.double(), self.expected(layer, r, t)), rtol=1e-4, atol=1e-5
                )


@pytest.mark.parametrize("kv_format", sorted(FORMATS))
def test_prompt_and_decode_attend_to_what_the_index_selects(on, kv_format):
    @examples(on, cpu=20, interpret=3, gpu=10)
    @given(
        select=st.integers(2, 9),
        chunks=st.lists(st.integers(1, 13), min_size=1, max_size=3),
        steps=st.integers(1, 6),
        shared=st.booleans(),
        seed=st.integers(0, 999),
    )
    def check(select, chunks, steps, shared, seed):
        request = Request(on, kv_format, select, seed, count=2, shared=shared)
        for tokens in chunks:
            start = request.lengths[0]
            outs = request.forward(prefill=[(0, tokens)])
            request.check(outs, [(0, t) for t in range(start, start + tokens)])
        request.forward(prefill=[(1, chunks[0])])
        for _ in range(steps):
            which = [(1, request.lengths[1]), (0, request.lengths[0])]
            request.check(request.forward(decode=[1, 0]), which)
        check_integrity(request.coordinator)
        request.coordinator.close()

    check()


def test_chunks_of_a_prompt_do_not_matter(on):
    @examples(on, cpu=10, interpret=2, gpu=5)
    @given(cut=st.integers(1, 19), seed=st.integers(0, 999))
    def check(cut, seed):
        once, cuts = (Request(on, "fp8", 5, seed) for _ in range(2))
        (whole, _), parts = once.forward(prefill=[(0, 20)]), []
        for tokens in (cut, 20 - cut):
            parts.append(cuts.forward(prefill=[(0, tokens)])[0])
        torch.testing.assert_close(torch.cat(parts), whole, rtol=1e-5, atol=1e-6)
        for request in (once, cuts):
            request.coordinator.close()

    check()


def test_masks_of_a_long_prompt_are_made_in_blocks(on, monkeypatch):
    request = Request(on, "model", 5, seed=1, shared=True)
    made, columns = [], chunk_attention.Chosen.columns
    monkeypatch.setattr(chunk_attention, "MASK_BYTES", 3 * (1 + 20 + 24 * 5))
    monkeypatch.setattr(
        chunk_attention.Chosen, "columns", lambda *what: made.append(columns(*what)) or made[-1]
    )
    for start in (0, 20):
        outs = request.forward(prefill=[(0, 20)])
        request.check(outs, [(0, t) for t in range(start, start + 20)])
    assert max(map(len, made)) == 3
    request.coordinator.close()


def test_a_fork_goes_on_alone(on):
    request = Request(on, "fp8", 4, seed=7, count=2)
    request.forward(prefill=[(0, 11)])
    request.coordinator.request_end(request.slots[1])
    request.slots[1] = request.coordinator.fork(request.slots[0])
    request.rows[:, 1], request.index_k[:, 1] = request.rows[:, 0], request.index_k[:, 0]
    request.rows[:, 1, 11:] *= -1
    request.index_k[:, 1, 11:] *= -1
    request.lengths[1] = 11
    for _ in range(6):
        which = [(0, request.lengths[0]), (1, request.lengths[1])]
        request.check(request.forward(decode=[0, 1]), which)
    request.coordinator.close()


def test_bytes_of_a_token_are_those_of_its_row():
    for kv_format, row in (("model", 12 * 4), ("fp8", 656)):
        tier = next(tier for tier in all_tiers() if tier.name == "cpu")
        coordinator = Request(tier, kv_format, 4, seed=0).coordinator
        config = coordinator.config
        tokens = config.num_pages * config.page_tokens
        assert coordinator.memory().host == -(-2 * tokens * row // 256) * 256
        slots = config.max_requests * (6 + 4)
        assert coordinator.memory().buffer == 2 * slots * row
        assert coordinator.memory().representation >= tokens * 2 * 4 * 8
        coordinator.close()


def test_a_layer_without_an_indexer_keeps_nothing_to_select_by(on):
    def kept(**options):
        request = Request(on, "model", 4, seed=0, **options)
        size = request.coordinator.memory().representation
        pools = [path.selector.view.pools for path in request.coordinator.layers]
        request.coordinator.close()
        return size, pools

    both, _ = kept()
    one, (first, second) = kept(shared=True)
    assert 2 * one == both > 0
    assert first
    assert not second


def test_an_index_for_a_layer_that_has_none_is_refused(on):
    request = Request(on, "model", 4, seed=0, shared=True)
    request.shared = False
    for what in ({"prefill": [(0, 6)]}, {"decode": [0]}):
        with pytest.raises(RequestError, match="layer 1 was given an index, and the model"):
            request.forward(**what)
        request.coordinator.forward_abort()
    request.coordinator.close()


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"attention": "gqa", "value_dim": None}, "takes attention mla, got gqa"),
        ({"indexer": None}, "this model has none"),
        ({"num_kv_heads": 3}, "has one kv-head"),
        ({"value_dim": 13}, "value_dim 13"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    shape = {"num_kv_heads": 1, "attention": "mla", "value_dim": 8, "indexer": IndexerShape(2, 4)}
    model = ModelShape(
        num_layers=1, num_heads=3, head_dim=12, dtype=torch.float32, scale=1.0, **(shape | changes)
    )
    config = SparseConfig(algorithm="indexed", backend="gather", dense_layers=[])
    with pytest.raises(ConfigError) as caught:
        lower(config, model, device=torch.device("cpu"), registry=REGISTRY)
    assert words in str(caught.value)


def test_fp8_rows_are_for_512_and_64_alone():
    model = ModelShape(1, 3, 1, 12, torch.float32, 1.0, "mla", 8, IndexerShape(2, 4))
    config = SparseConfig(algorithm="indexed", backend="gather", kv_format="fp8", dense_layers=[])
    with pytest.raises(ConfigError, match="512 \\+ 64"):
        lower(config, model, device=torch.device("cpu"), registry=REGISTRY)


class DensePrompts(Indexed):
    """Uses the model's indexer in decode steps, and leaves prompts dense."""

    retrieve_prompt = None


def test_prompts_are_dense_where_the_algorithm_does_not_select_for_them(on):
    request = Request(on, "model", 4, seed=3, shared=True, algorithm="dense_prompts")
    for tokens in (7, 5):
        start = request.lengths[0]
        for layer, out in enumerate(request.forward(prefill=[(0, tokens)])):
            rows = request.rows[layer, 0, : start + tokens]
            seen = torch.ones(tokens, start + tokens, dtype=torch.bool).tril(start)
            q = request.q[layer, 0, start : start + tokens]
            truth, _ = attention(q, rows, rows[..., :8], request.model.scale, seen)
            torch.testing.assert_close(out.double(), truth, rtol=1e-4, atol=1e-5)
    for _ in range(5):
        which = [(0, request.lengths[0])]
        request.check(request.forward(decode=[0]), which)
    request.coordinator.close()


@pytest.mark.parametrize(
    "layers", [{"1": {"budget": 3}}, {"0": "resident"}], ids=["other settings", "dense"]
)
def test_a_layer_cannot_share_what_its_group_does_not_select(on, layers):
    with pytest.raises(ConfigError, match="layer 1 shares the selection of layer 0, so both"):
        Request(on, "model", 4, seed=5, shared=True, layers=layers)


def test_the_first_layer_has_nothing_to_share():
    model = ModelShape(2, 3, 1, 12, torch.float32, 1.0, "mla", 8, IndexerShape(2, 4, (1,)))
    config = SparseConfig(algorithm="indexed", backend="gather", dense_layers=[])
    with pytest.raises(ConfigError, match="layer 0 has no indexer, and there is no layer before"):
        lower(config, model, device=torch.device("cpu"), registry=REGISTRY)


def test_a_layer_that_selects_by_an_index_wants_one(on):
    request = Request(on, "model", 4, seed=5, shared=True)
    request.index = lambda layer, which: None
    for what in ({"prefill": [(0, 6)]}, {"decode": [0]}):
        with pytest.raises(RequestError, match="layer 0 was given no index and selects by it"):
            request.forward(**what)
        request.coordinator.forward_abort()
        check_integrity(request.coordinator)
    request.coordinator.close()


class Blind(Gather):
    """A backend that cannot attend to a selection in a prompt."""

    prefill_selected = None


def test_a_backend_that_cannot_attend_to_selected_prompts_is_refused(monkeypatch):
    def allocate(*args):
        raise AssertionError("the host pool was allocated before the configuration was refused")

    monkeypatch.setattr(host_pool, "HostMemory", allocate)
    entry = evolve(GATHER, name="blind", factories=f"{__name__}:Blind")
    registry = PluginRegistry([("test", "1", Entries(INDEXED, entry))])
    model = ModelShape(1, 3, 1, 12, torch.float32, 1.0, "mla", 8, IndexerShape(2, 4))
    config = SparseConfig(algorithm="indexed", backend="blind", dense_layers=[])
    lowered = lower(config, model, device=torch.device("cpu"), registry=registry)
    with pytest.raises(ConfigError, match="blind has no prefill_selected"):
        SparseCoordinator(lowered, registry)


def test_an_algorithm_knows_the_width_of_its_selection():
    """The newest token competes here, so the tail leaves its place in the budget."""
    tier = next(tier for tier in all_tiers() if tier.name == "cpu")
    request = Request(tier, "model", 7, seed=0)
    request.forward(prefill=[(0, 9)])
    request.forward(decode=[0])
    coordinator = request.coordinator
    for path in coordinator.layers:
        assert path.algorithm.group.select == path.lanes.selection.ids.shape[1] == 7
        assert path.algorithm.group == path.view.group
    coordinator.close()
