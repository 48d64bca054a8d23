"""Another exact top-k, named by the configuration, selects for the algorithms."""

from __future__ import annotations

import pytest
import torch

from topkv import hookimpl
from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.discovery import installed
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import CapabilityError, ConfigError
from topkv.ops.topk import topk, workspace
from topkv.plugins import PluginRegistry
from topkv.testing.tiers import tier
from topkv.types import Index, IndexerShape, ModelShape

HEADS, KV_HEADS, DIM, PROMPT, STEPS = 4, 2, 64, 70, 3


class Sorted:
    """Top-k by a stable sort; notes for what it was made, how often it was called and for how
    many rows."""

    made: tuple[int, int, int] | None = None
    calls = rows = 0

    def __init__(self, rows, columns, select, device):
        Sorted.made = (rows, columns, select)

    @hookimpl
    def topk(self, scores, lengths, ids):
        Sorted.calls += 1
        Sorted.rows += len(lengths)
        for row, size in enumerate(lengths.clamp(0, scores.shape[1]).tolist()):
            order = scores[row, :size].double().sort(descending=True, stable=True).indices
            best = order[: ids.shape[1]].sort().values
            ids[row] = -1
            ids[row, : len(best)] = best.int()


class Package:
    @hookimpl
    def topkv_register_topks(self):
        caps = Capabilities(impls=("triton",))
        return [PluginEntry("sorted", "topk", f"{__name__}:Sorted", capabilities=caps)]


@pytest.fixture
def registry():
    """What is installed, and the package above."""
    others = [(offer.package, offer.version, offer.load()) for offer in installed()]
    return PluginRegistry([*others, ("topkv-sorted", "0.1", Package())])


def config(**more):
    return SparseConfig(**{
        "algorithm": "quest", "backend": "triton_attention", "unit": 4, "budget": 24, "buffer": 24,
        "max_requests": 2, "max_tokens": 128, "max_request_tokens": 128, "page_tokens": 16,
        "ring_tokens": 16, "dense_layers": [], **more,
    })  # fmt: skip


MODEL = ModelShape(1, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)
INDEXED = ModelShape(1, HEADS, 1, 40, torch.float32, 0.2, "mla", 32, IndexerShape(16, 32))
DSA = {"algorithm": "deepseek_dsa", "unit": 1, "page_tokens": 64, "params": {"keys": "bf16"}}


def run(on, registry, model=MODEL, **more):
    """Outputs of a prompt and of some steps."""
    lowered = lower(config(impl=on.impl, **more), model, device=on.device, registry=registry)
    coordinator = SparseCoordinator(lowered, registry)
    generator, outs = torch.Generator().manual_seed(0), []
    slot, heads, dim = coordinator.request_begin(), model.num_kv_heads, model.head_dim
    for count in (PROMPT, *[1] * STEPS):

        def made(*shape, count=count):
            return torch.randn(count, *shape, generator=generator).to(on.device)

        rows = {"decode": [slot]} if count == 1 else {"prefill": [(slot, count)]}
        coordinator.forward_begin(**rows)
        q, k, v = made(HEADS, dim), made(heads, dim), made(heads, dim)
        index = None
        if shape := model.indexer:
            sizes = (shape.num_heads, shape.head_dim)
            index, v = Index(made(*sizes), made(sizes[1]), made(sizes[0])), k
        outs.append(coordinator.attention(0, q, k, v, index).cpu())
        coordinator.forward_end()
    coordinator.close()
    return torch.cat(outs)


@pytest.mark.parametrize("name", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_the_named_implementation_selects(name, registry):
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    Sorted.made, Sorted.calls = None, 0
    usual = run(on, registry)
    assert Sorted.made is None
    named = run(on, registry, topk="sorted")
    assert Sorted.made == (2 * KV_HEADS, 32, 5)
    assert Sorted.calls == STEPS + 1, "not asked in each step, and once to warm the buffer"
    assert torch.equal(named, usual)


@pytest.mark.parametrize("name", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_rows_of_prompts_are_selected_by_it_too(name, registry, monkeypatch):
    """Where prompts are sparse; in several calls where there are more rows than it is made for."""
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    monkeypatch.setattr("topkv_deepseek_dsa.launch.PROMPT_ROWS", 32)
    usual = run(on, registry, INDEXED, **DSA)
    Sorted.rows = 0
    named = run(on, registry, INDEXED, **DSA, topk="sorted")
    assert Sorted.rows == PROMPT + STEPS + 1
    assert torch.equal(named, usual)


def test_token_grained_algorithms_bring_the_one_for_long_rows(registry):
    cpu = torch.device("cpu")
    sizes = {"unit": 1, "page_tokens": 64}
    for model, name in ((MODEL, "double_sparsity"), (INDEXED, "deepseek_dsa")):
        lowered = lower(config(algorithm=name, **sizes), model, device=cpu, registry=registry)
        assert lowered.topk == "pivot"
    assert lower(config(), MODEL, device=cpu, registry=registry).topk == "radix"


@pytest.mark.parametrize(
    ("name", "where"),
    [
        ("pivot", "interpret"),
        *(pytest.param(name, "gpu", marks=pytest.mark.gpu)
          for name in ("pivot", "cuda", "flashinfer")),
    ],
)  # fmt: skip
def test_installed_ones_select_what_the_core_does(name, where, registry):
    on = tier(where)
    if on.missing:
        pytest.skip(on.missing)
    usual = run(on, registry)
    try:
        named = run(on, registry, topk=name)
    except (CapabilityError, ConfigError) as error:
        pytest.skip(str(error))
    assert torch.equal(named, usual)


def test_the_core_goes_back_to_its_own(registry):
    """The choice holds while an algorithm is made, and for it alone."""
    on = tier("interpret")
    if on.missing:
        pytest.skip(on.missing)
    run(on, registry, topk="sorted")
    Sorted.calls = 0
    ids = torch.full((1, 2), -7, dtype=torch.int32)
    lengths = torch.tensor([4], dtype=torch.int32)
    work = workspace(1, 4, 2, torch.device("cpu"))
    topk(torch.tensor([[3.0, 1.0, 2.0, 0.0]]), lengths, ids, impl="triton", work=work)
    assert (ids.tolist(), Sorted.calls) == ([[0, 2]], 0)


def test_what_it_lacks_is_refused(registry):
    with pytest.raises(ConfigError, match="takes impl triton, got reference"):
        lower(config(topk="sorted"), MODEL, device=torch.device("cpu"), registry=registry)
    with pytest.raises(ConfigError, match="unknown topk 'nobody'"):
        lower(config(topk="nobody"), MODEL, device=torch.device("cpu"), registry=registry)
