"""Another exact top-k, named by the configuration, selects for the algorithms."""

from __future__ import annotations

import pytest
import torch

from tests import test_matrix
from topkv import hookimpl
from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.entries import PluginEntry
from topkv.errors import CapabilityError, ConfigError
from topkv.ops import topk_kernels
from topkv.plugins import PluginRegistry
from topkv.plugins.records import installed
from topkv.types import Index, IndexerShape, ModelShape
from topkv_testing.tiers import tier

HEADS, KV_HEADS, DIM, PROMPT, STEPS = 4, 2, 64, 70, 3


class Sorted:
    """Top-k by a stable sort; records the shape that it was made for, its calls and their rows."""

    made: tuple[int, int, int] | None = None
    calls = rows = 0

    def __init__(self, setup):
        Sorted.made = (setup.rows, setup.columns, setup.select)

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
        return [PluginEntry("sorted", "topk", {"triton": f"{__name__}:Sorted"}, hook_api=(3, 0))]


@pytest.fixture
def registry():
    """Plugins that are installed, and the package above."""
    return PluginRegistry([*installed(), ("topkv-sorted", "0.1", Package())])


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
    """Run a prompt and some steps; return their outputs."""
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


# True where an algorithm selects by top-k: in a prompt; by the end of the first step, which
# settles the prompt and warms the buffer; in the step behind it.
CALLS = {
    "arkvale": (False, True, True),
    "clusterkv": (False, False, False),
    "deepseek_dsa": (True, True, True),
    "double_sparsity": (False, True, True),
    "infllm_v2": (False, True, True),
    "pariskv": (False, True, True),
    "pqcache": (False, True, True),
    "quest": (False, True, True),
    "rocketkv": (False, True, True),
    "snapkv": (False, True, False),
    "streaming_llm": (False, False, False),
    "trained_gate": (True, True, True),
}


def one_of_each():
    """A cell of every algorithm that runs in the interpreter."""
    found = {}
    for cell in test_matrix.CELLS:
        if cell.backend == "triton_attention" and "interpret" in cell.tiers:
            found.setdefault(cell.algorithm, cell)
    return [pytest.param(cell, id=name) for name, cell in found.items()]


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize("cell", one_of_each())
def test_every_algorithm_selects_by_it(cell, registry, monkeypatch):
    """It selects in prompts and in steps, and the core's own kernels are not called."""
    on = tier("interpret")
    if on.missing:
        pytest.skip(on.missing)
    monkeypatch.setattr(test_matrix, "registry", lambda: registry)
    params = test_matrix.PARAMS.get(cell.algorithm, {})

    def outputs(**more):
        run = test_matrix.Run(cell, on, params=params, **more)
        calls, outs = [], []
        for count in (run.most - 2, 1, 1):
            Sorted.calls = 0
            outs.append(run.forward(count, decode=count == 1))
            calls.append(Sorted.calls > 0)
        run.coordinator.close()
        return torch.cat(outs), tuple(calls)

    def refused(*args):
        raise AssertionError("the core's own kernels were called")

    usual, none = outputs()
    assert not any(none)
    monkeypatch.setattr(topk_kernels, "topk", refused)
    named, calls = outputs(topk="sorted")
    assert calls == CALLS[cell.algorithm]
    assert torch.equal(named, usual)


@pytest.mark.parametrize("name", ["interpret", pytest.param("gpu", marks=pytest.mark.gpu)])
def test_rows_of_prompts_are_selected_by_it_too(name, registry, monkeypatch):
    """For sparse prompts; in several calls where there are more rows than it was made for."""
    on = tier(name)
    if on.missing:
        pytest.skip(on.missing)
    for module in ("topkv_authoring.index", "topkv_deepseek_dsa.launch"):
        monkeypatch.setattr(f"{module}.PROMPT_ROWS", 32)
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
        named = run(on, registry, topk="cuda")
    except (CapabilityError, ConfigError) as error:
        pytest.skip(str(error))
    assert torch.equal(named, usual)


def test_the_choice_is_that_of_one_configuration(registry):
    """A coordinator beside one that selects by another implementation keeps its own."""
    on = tier("interpret")
    if on.missing:
        pytest.skip(on.missing)
    run(on, registry, topk="sorted")
    Sorted.calls = 0
    run(on, registry)
    assert Sorted.calls == 0


def test_what_it_lacks_is_refused(registry):
    with pytest.raises(ConfigError, match="takes impl triton, got reference"):
        lower(config(topk="sorted"), MODEL, device=torch.device("cpu"), registry=registry)
    with pytest.raises(ConfigError, match="unknown topk 'nobody'"):
        lower(config(topk="nobody"), MODEL, device=torch.device("cpu"), registry=registry)
