"""Models whose layers attend to windows or to everything: vLLM keeps windows on the device, topkv
the others. Tokens are those of stock vLLM."""

from __future__ import annotations

import random

import pytest
import torch

from plugins.vllm.tests import tiny
from plugins.vllm.tests.lives import live, same
from plugins.vllm.tests.test_drafts import SEVERAL, count_drafts, repeating
from plugins.vllm.tests.test_features import LORA
from tools.engines.tests.adapters import save_adapter

CHUNK, PAGE, LONGEST = 96, 32, 512

KINDS = {"gemma3": tiny.gemma3, "gpt_oss": tiny.gpt_oss}

LENGTHS = (5, 63, 64, 65, 150, 300, LONGEST - 24, PAGE, CHUNK, CHUNK + 1, 200, 1)
"""Tokens of prompts: about a window, a page and a chunk, and as many as fit."""


class Both:
    """Engines of a model: stock, and through topkv.

    Args:
        path: folder of the model.
        stock: engine of stock vLLM.
        served: makes engines through topkv.
    """

    def __init__(self, path, stock, served):
        self.more, self.stock = {"model": path, "skip_tokenizer_init": True}, stock
        self._served = served

    def served(self, settings=None, **more):
        """An engine through topkv that finds prefixes, unless it is said."""
        return self._served(settings, **{"enable_prefix_caching": True, **self.more, **more})


@pytest.fixture(scope="session")
def paths(tmp_path_factory):
    return {kind: save(tmp_path_factory.mktemp(kind)) for kind, save in KINDS.items()}


@pytest.fixture
def both(served, engines, arguments, beside, make_served, paths):
    """Gives the engines of a model: ``both(kind)``."""
    from vllm.distributed import parallel_state as groups

    def make(kind):
        # Groups of ranks are made once in a process, of experts if the first engine has some. Of
        # one rank any group will do.
        groups._EP = groups._EP or groups._TP
        more = {"model": paths[kind], "skip_tokenizer_init": True, "enable_prefix_caching": True}
        if kind not in engines:
            engines[kind] = make_served(**arguments | more, **beside)
        return Both(paths[kind], engines[kind], served)

    return make


def pools(engine):
    """The pool of blocks of the device, and that of pages."""
    managers = engine.scheduler.kv_cache_manager.coordinator.single_type_managers
    found = {manager.block_pool.medium: manager.block_pool for manager in managers}
    return found["GPU"], found["CPU"]


def check_nothing_is_held(engine):
    """No request holds a block or a page, and none is lost."""
    engine.check_nothing_is_held()
    for pool in pools(engine):
        assert pool.get_num_free_blocks() == pool.num_gpu_blocks - 1
    assert engine.engine.reset_prefix_cache()


@pytest.mark.parametrize("kind", ["gemma3", pytest.param("gpt_oss", marks=pytest.mark.nightly)])
def test_tokens_are_those_of_stock_vllm(kind, both, prompt):
    """Prompts of all lengths come at a time, and some again."""
    both = both(kind)
    engine, prompts = both.served(), [prompt(length) for length in LENGTHS]
    for wave in (prompts, prompts[3:6]):
        assert engine.answer(wave, 24) == both.stock.answer(wave, 24)
    config = engine.session.coordinator.config
    groups = engine.scheduler.kv_cache_config.kv_cache_groups
    assert config.model.num_layers == 2
    assert len(groups[0].layer_names) == 2, "topkv's are one group"
    device, host = pools(engine)
    assert host.num_gpu_blocks == config.num_pages
    assert device.num_gpu_blocks == engine.scheduler.kv_cache_config.num_blocks
    check_nothing_is_held(engine)


@pytest.mark.parametrize(
    ("kind", "tight"),
    [
        ("gemma3", {"settings": {"max_tokens": LONGEST}}),
        pytest.param("gpt_oss", {"num_gpu_blocks_override": 12}, marks=pytest.mark.nightly),
        pytest.param("gemma3", {"num_gpu_blocks_override": 19}, marks=pytest.mark.nightly),
        pytest.param(
            *("gpt_oss", {"settings": {"max_tokens": LONGEST}}), marks=pytest.mark.nightly
        ),
    ],
    ids=["gemma3-pages", "gpt_oss-blocks", "gemma3-blocks", "gpt_oss-pages"],
)
def test_requests_preempt_each_other_for_either_pool(kind, tight, both, prompt):
    """Their prompts fit together, and what they generate does not."""
    both = both(kind)
    prompts = [prompt(length, 2) for length in (100, 90, 110, 64)]
    engine = both.served(enable_prefix_caching=False, **tight)
    assert engine.answer(prompts, 70) == both.stock.answer(prompts, 70)
    assert engine.preempted > 0
    check_nothing_is_held(engine)


def test_prefixes_are_found_as_in_stock_vllm(both, prompt):
    """The last window has to be on the device; where it is gone, the prompt is computed anew."""
    both = both("gemma3")
    engine, head = both.served(), prompt(200, 7)
    for each in (engine, both.stock):
        assert each.engine.reset_prefix_cache()
    found = []
    for each in (both.stock, engine):
        for number, tail in enumerate((20, 33, 64, 64)):
            each.add(f"found-{number}", head + prompt(tail, 9), 12)
            each.run()
        outputs = [each.outputs[f"found-{number}"] for number in range(4)]
        found.append([(one.num_cached_tokens, one.outputs[0].token_ids) for one in outputs])
    assert found[0] == found[1]
    assert found[1][-1][0] > 200
    check_nothing_is_held(engine)


def test_counts_of_a_mixture_are_reported(both, prompt, monkeypatch):
    engine, reported = both("gemma3").served(), []
    update = engine.scheduler.update_from_output

    def seen(step, output):
        if output.kv_connector_output and output.kv_connector_output.kv_connector_stats:
            reported.append(output.kv_connector_output.kv_connector_stats.data)
        return update(step, output)

    monkeypatch.setattr(engine.scheduler, "update_from_output", seen)
    engine.answer([prompt(250, 4)])
    assert sum(each["hits"] for each in reported) > 0
    assert reported[-1]["pages"] == engine.session.coordinator.config.num_pages - 1
    assert reported[-1]["used_pages"] == 0


@pytest.mark.nightly
@pytest.mark.parametrize(("tokens", "blocks"), [(4 * LONGEST, 39), (LONGEST, 39), (LONGEST, 26)])
@pytest.mark.parametrize("kind", KINDS)
def test_requests_come_and_go(kind, tokens, blocks, both, prompt):
    """Arrivals, aborts and preemptions in random order, over found pages and windows."""
    both, draw = both(kind), random.Random(blocks + tokens)
    heads = [prompt(128, 50), prompt(200, 51)]
    prompts = {f"{kind}-{n}": prompt(draw.randint(1, 250), n) for n in range(40)}
    for name in prompts:
        if draw.random() < 0.5:
            prompts[name] = draw.choice(heads) + prompts[name][:150]
    lengths = {name: draw.randint(1, 100) for name in prompts}
    engine = both.served({"max_tokens": tokens}, num_gpu_blocks_override=blocks)
    aborted = live(engine, prompts, lengths, draw)
    same(engine, both.stock, prompts, lengths, aborted)
    assert engine.preempted or tokens > LONGEST
    check_nothing_is_held(engine)


@pytest.mark.nightly
def test_what_requests_need_of_the_device_is_enough(both, prompt):
    """No request waits for blocks if as many are there as the worker would report."""
    both = both("gemma3")

    def needed(worker):
        cache, specs = worker.blocks.config.cache_config, worker.get_kv_cache_spec()
        stated, cache.kv_cache_memory_bytes = cache.kv_cache_memory_bytes, None
        try:
            return worker.blocks.memory(specs)
        finally:
            cache.kv_cache_memory_bytes = stated

    plain = both.served()
    (memory,) = plain.llm.collective_rpc(needed)
    config = plain.scheduler.kv_cache_config
    blocks = memory // (config.kv_cache_tensors[0].size // config.num_blocks)
    engine = both.served(num_gpu_blocks_override=blocks, enable_prefix_caching=False)
    prompts, least = [prompt(length, 8) for length in (350, 200, 300, 280)], []
    for number, each in enumerate(prompts):
        engine.add(f"needs-{number}", each, 60)
    while engine.engine.has_unfinished_requests():
        engine.step()
        least.append(pools(engine)[0].get_num_free_blocks())
    assert not engine.preempted
    assert min(least) < blocks // 2


@pytest.mark.nightly
def test_drafts_beside_windows(both, prompt, monkeypatch):
    """Drafts that are rejected leave windows as they were."""
    both = both("gpt_oss")
    engine = both.served(**SEVERAL)
    counts = count_drafts(engine, monkeypatch)
    prompts = [repeating(prompt, length, length, 7) for length in (40, 97, 200, 9)]
    assert engine.answer(prompts, 60) == both.stock.answer(prompts, 60)
    assert 0 < counts["rejected"] < counts["drafts"]
    check_nothing_is_held(engine)


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's kernels there take no float32")
def test_adapters_beside_windows(both, arguments, beside, make_served, tmp_path_factory, prompt):
    """Requests with one adapter, another one and none, then again over blocks that are found."""
    from vllm import SamplingParams
    from vllm.lora.request import LoRARequest

    both, adapters = both("gemma3"), [None]
    for seed in (1, 2):
        path = str(save_adapter(seed, tmp_path_factory, layers=6))
        adapters.append(LoRARequest(f"windows-{seed}", seed, path))
    more = {**both.more, **LORA, "enable_prefix_caching": True}
    engine, tokens = both.served(**LORA), []
    how = SamplingParams(max_tokens=24, temperature=0, detokenize=False, ignore_eos=True)
    for each in (make_served(**arguments | more, **beside), engine):
        for wave in range(2):
            for number, adapter in enumerate(adapters):
                asked = {"prompt_token_ids": prompt(40, 7) * 5}
                each.engine.add_request(f"{wave}-{number}", asked, how, lora_request=adapter)
            each.run()
        found = [each.outputs[f"1-{number}"].num_cached_tokens for number in range(3)]
        answers = [each.tokens[f"{wave}-{number}"][0] for wave in (0, 1) for number in range(3)]
        tokens.append((found, answers))
    assert tokens[0] == tokens[1]
    assert min(found) > 0
    assert answers[:3] == answers[3:]
    assert len({*map(tuple, answers)}) == 3
    check_nothing_is_held(engine)


@pytest.mark.nightly
@pytest.mark.skipif(torch.cuda.device_count() == 1, reason="each rank wants a GPU")
@pytest.mark.parametrize("kind", KINDS)
def test_two_ranks_of_a_mixture(kind, both, prompt):
    both = both(kind)
    engine = both.served(fresh=True, tensor_parallel_size=2)
    prompts = [prompt(length, 5) for length in (250, 33, 130, 97)]
    assert engine.answer(prompts) == both.stock.answer(prompts)
