"""Models of latent attention with an indexer of their own, beside Transformers' stock models:
SGLang has no such attention on a CPU, and rounds index keys on a GPU."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from plugins.sglang.tests.conftest import DEFAULTS, DEVICE
from plugins.sglang.tests.inside import Inside
from plugins.sglang.tests.watch import hopper
from tools.engines.tests.indexed import FAMILIES, SIZES, TOPK, YARN, Model, prompts_of
from topkv_sglang import engine_args, latent

PAGE = 64


@pytest.fixture(scope="module", params=FAMILIES)
def indexed(request, tmp_path_factory):
    """A model of each family."""
    pytest.importorskip("sglang")
    return Model(request.param, tmp_path_factory.mktemp(request.param), rope_parameters=YARN)


SETTINGS = {"algorithm": "deepseek_dsa", "budget": TOPK, "params": {"keys": "bf16"}}
SETTINGS["page_tokens"] = PAGE


@pytest.fixture(scope="module")
def start(indexed, stand_ins, arguments, graphs):
    """Starts an engine of the model: ``start()``."""
    how = {"model_path": indexed.path, "chunked_prefill_size": 128, "log_level": "error"}
    how |= {} if graphs else {"disable_cuda_graph": True}
    given = {**arguments, **how}
    settings = {**DEFAULTS, **SETTINGS, "max_request_tokens": given.pop("context_length")}

    def make():
        with pytest.MonkeyPatch.context() as patch:
            if DEVICE == "cpu":
                patch.setattr(torch.cuda, "get_device_capability", hopper)
            return Inside(**engine_args(settings, **given))

    return make


@pytest.fixture(scope="module")
def engine(start):
    """One for all tests."""
    return start()


def test_tokens_are_those_of_the_stock_model(engine, indexed, prompt):
    """Requests run beside each other, more than run at a time, with selections far below the
    context; steps mix chunks of prompts with decoding."""
    prompts = prompts_of(prompt, (250, 1, 33, 16, 17, 100, 300))
    assert engine.answer(prompts, 24) == [indexed.answer(each, 24) for each in prompts]
    assert engine.check_nothing_is_held()["topkv"]["misses"] > 0


def test_prompts_that_begin_like_others(engine, indexed, prompt):
    """Rows and index keys of pages that the radix cache has found are those that were computed,
    and pages are replaced by equal ones."""
    (base,) = prompts_of(prompt, (200,), seed=3)
    for tail in (0, 40, 40, 150):
        prompts = [base + each for each in prompts_of(prompt, (tail + 1, tail + 9), seed=tail)]
        assert engine.answer(prompts, 12) == [indexed.answer(each, 12) for each in prompts]
    assert engine.check_nothing_is_held()["topkv"]["found_tokens"] >= 6 * 192


def test_sglang_itself_keeps_one_element_a_token_and_layer(engine):
    pool = engine.scheduler.token_to_kv_pool_allocator.get_kvcache()
    held = [each.nbytes for each in pool.k_buffer]
    assert held == [4 * PAGE] * SIZES["num_hidden_layers"]


MUTANTS = {
    "weights lose their sign": lambda index: evolve(index, weights=index.weights.abs()),
    "keys are those of the row before": lambda index: evolve(index, k=index.k.roll(1, 0)),
    "heads use the weights of others": lambda index: evolve(index, q=index.q.roll(1, 1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant, start, indexed, prompt, monkeypatch):
    """Mutants generate other tokens than the stock model."""
    project = latent._project

    def mutated(layer, *rest, **named):
        project(layer, *rest, **named)
        layer.topkv_index = MUTANTS[mutant](layer.topkv_index)

    monkeypatch.setattr(latent, "_project", mutated)
    (each,) = prompts_of(prompt, (100,))
    assert start().answer([each], 30) != [indexed.answer(each, 30)]
