"""Another exact top-k, named by the configuration, selects for the algorithms."""

from __future__ import annotations

import pytest
import torch

from tests import test_matrix
from topkv import hookimpl
from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.discovery import installed
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import CapabilityError, ConfigError
from topkv.ops import topk_kernels
from topkv.ops.topk import topk, workspace
from topkv.plugins import PluginRegistry
from topkv.testing.tiers import tier
from topkv.types import ModelShape

HEADS, KV_HEADS, DIM, PROMPT, STEPS = 4, 2, 64, 70, 3


class Sorted:
    """Top-k by a stable sort; notes for what it was made and how often it was called."""

    made: tuple[int, int, int] | None = None
    calls = 0

    def __init__(self, rows, columns, select, device):
        Sorted.made = (rows, columns, select)

    @hookimpl
    def topk(self, scores, lengths, ids):
        Sorted.calls += 1
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
    return SparseConfig(
        algorithm="quest", backend="triton_attention", unit=4, budget=24, buffer=24,
        max_requests=2, max_tokens=128, max_request_tokens=128, page_tokens=16, ring_tokens=16,
        dense_layers=[], **more,
    )  # fmt: skip


MODEL = ModelShape(1, HEADS, KV_HEADS, DIM, torch.float32, DIM**-0.5)


def run(on, registry, **more):
    """Outputs of a prompt and of some steps."""
    lowered = lower(config(impl=on.impl, **more), MODEL, device=on.device, registry=registry)
    coordinator = SparseCoordinator(lowered, registry)
    generator, outs = torch.Generator().manual_seed(0), []
    slot = coordinator.request_begin()
    for count in (PROMPT, *[1] * STEPS):
        rows = {"decode": [slot]} if count == 1 else {"prefill": [(slot, count)]}
        coordinator.forward_begin(**rows)
        q, k, v = (
            torch.randn(count, heads, DIM, generator=generator).to(on.device)
            for heads in (HEADS, KV_HEADS, KV_HEADS)
        )
        outs.append(coordinator.attention(0, q, k, v).cpu())
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


# Whether an algorithm selects by top-k in a prompt, by the end of the first step, which settles
# the prompt and warms the buffer, and in the step behind it.
CALLS = {
    "arkvale": (False, True, True),
    "clusterkv": (False, False, False),
    "deepseek_dsa": (True, True, True),
    "double_sparsity": (False, True, True),
    "quest": (False, True, True),
    "snapkv": (False, True, False),
    "streaming_llm": (False, False, False),
}


def one_of_each():
    """A cell of every algorithm that runs in the interpreter, and parameters that select anew."""
    found = {}
    for cell in test_matrix.CELLS:
        if cell.backend == "triton_attention" and "interpret" in cell.tiers:
            found.setdefault(cell.algorithm, cell)
    return [pytest.param(cell, {}, id=name) for name, cell in found.items()] + [
        pytest.param(found["snapkv"], {"ada": True, "ada_max": 1.5}, id="snapkv-ada"),
        pytest.param(found["double_sparsity"], {"head_sparsity": 0.9}, id="double_sparsity-flat"),
    ]


@pytest.mark.parametrize(("cell", "params"), one_of_each())
def test_every_algorithm_selects_by_it(cell, params, registry, monkeypatch):
    """In prompts and in steps, and the core's own kernels are left alone."""
    on = tier("interpret")
    if on.missing:
        pytest.skip(on.missing)
    monkeypatch.setattr(test_matrix, "registry", lambda: registry)
    params = {**test_matrix.PARAMS.get(cell.algorithm, {}), **params}

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


@pytest.mark.gpu
def test_the_cuda_one_selects_what_the_core_does(registry):
    on = tier("gpu")
    if on.missing:
        pytest.skip(on.missing)
    usual = run(on, registry)
    try:
        named = run(on, registry, topk="cuda")
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
