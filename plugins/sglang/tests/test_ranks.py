"""Two tensor parallel ranks, in processes of their own, beside one: heads and pools are split."""

from __future__ import annotations

import os
import random

import pytest
import torch

from plugins.sglang.tests.conftest import DEFAULTS, DEVICE, STOCK
from plugins.sglang.tests.lives import check_lives, draw_requests
from plugins.sglang.tests.test_latent import SETTINGS
from tools.engines.tests.indexed import YARN, Model, prompts_of

pytestmark = [
    pytest.mark.nightly,
    pytest.mark.skipif(torch.cuda.device_count() == 1, reason="each rank wants a GPU"),
]

SPARSE = {"budget": 96, "buffer": 128, "unit": 16}

SUMS = {"disable_custom_all_reduce": True, "enforce_disable_flashinfer_allreduce_fusion": True}
"""Arguments with which ranks of GPUs add by NCCL alone. Other ways may use NVLink multicast, which
not every machine allows."""


@pytest.fixture(scope="module")
def of_two(driven, arguments):
    """Gives engines of two ranks: ``of_two(settings, **arguments)``."""
    made = []

    def make(settings=None, **more):
        other = min(1, (os.cpu_count() or 1) - 1)
        engine = driven(SGLANG_CPU_OMP_THREADS_BIND=f"0|{other}")
        given = {**arguments, **SUMS, "tp_size": 2, **more}
        config = {
            **DEFAULTS,
            **(settings or {}),
            "max_request_tokens": given.pop("context_length"),
        }
        engine.do("start", arguments=given, config=config)
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.close()


def test_tokens_are_those_of_one_rank_and_of_stock(of_two, served, stock, prompt):
    """Requests come, are aborted, and find pages of others. Where little is selected each kv-head
    selects on its rank what it selects on one."""
    draw, texts = random.Random(5), [prompt(60)]
    while len(texts) < 12:
        text = draw.choice(texts[-8:])[: draw.randint(20, 250)]
        texts.append(text + prompt(draw.randint(1, 80), len(texts)))
    two = of_two()
    check_lives(two, stock, draw_requests(draw, texts))
    two.close()
    prompts = [prompt(length) for length in (250, 33, 130)]
    two, one = of_two(SPARSE), served(SPARSE)
    answers = two.answer(prompts)
    assert answers == one.answer(prompts)
    assert answers != stock.answer(prompts), "the budget is meant to show"
    halves, whole = (engine.check_nothing_is_held()["topkv"] for engine in (two, one))
    assert 0 < halves["misses"] < whole["misses"]


def test_a_model_with_fewer_kv_heads_than_ranks(
    of_two, driven, arguments, save_model, prompt, tmp_path
):
    """The second rank has a copy of the kv-head and one host pool with the first one; on a CPU it
    has a kv-head of zeros, which SGLang adds."""
    path = {"model_path": str(save_model(tmp_path, num_key_value_heads=1))}
    stock = driven()
    stock.do("start", arguments={**arguments, **STOCK, **path, "max_total_tokens": 2048})
    prompts = [prompt(length) for length in (250, 33, 130, 250)]
    two = of_two(**path)
    assert two.answer(prompts, 24) == stock.answer(prompts, 24)
    stock.close()
    if DEVICE == "cuda":
        two.do("check_pool_is_shared")
    two.check_nothing_is_held()


def test_rows_of_latent_attention_stand_in_one_pool(of_two, prompt, tmp_path):
    """Each rank has half of the heads, and selects and writes what the other one does."""
    model = Model("DeepseekV32", tmp_path, rope_parameters=YARN)
    two = of_two(SETTINGS, model_path=model.path, chunked_prefill_size=128)
    prompts = prompts_of(prompt, (250, 1, 33, 130))
    for _ in range(2):  # found prefixes, and pages that are used again
        assert two.answer(prompts, 24) == [model.answer(each, 24) for each in prompts]
    two.do("check_pool_is_shared")
    two.check_nothing_is_held()
