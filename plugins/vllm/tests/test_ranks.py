"""Two tensor parallel ranks, in processes of their own, beside one: heads and pools are split."""

from __future__ import annotations

import json
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

from plugins.vllm.tests.answers import answers_of, parted
from plugins.vllm.tests.ranks import SETTINGS, check_nothing_is_held, pools_of, ranks_of, use
from topkv import hookimpl
from topkv.errors import CapabilityError, ConfigError
from topkv_snapkv.algorithm import SnapKV
from topkv_vllm import engine_args
from topkv_vllm.ranks import host_file
from topkv_vllm.refusals import check

pytestmark = pytest.mark.skipif(torch.cuda.device_count() == 1, reason="each rank wants a GPU")

ALGORITHMS = {
    "quest": {"algorithm": "quest"},
    "clusterkv": {
        "algorithm": "clusterkv",
        "unit": 1,
        "params": {"tokens_per_cluster": 16, "window": 32, "sinks": 4},
    },
    "double_sparsity": {"algorithm": "double_sparsity"},
}


@pytest.fixture(scope="module")
def _ranks_end(engines):
    """End the ranks' processes behind this file, which alone needs them."""
    yield
    for key in [key for key in engines if "tensor_parallel_size" in key]:
        engines.pop(key).close()


@pytest.fixture
def of_two(served, _ranks_end):
    """Gives engines of two ranks."""
    return partial(served, tensor_parallel_size=2)


@pytest.fixture
def two(of_two):
    """An engine of two ranks."""
    return of_two()


@pytest.mark.parametrize("name", ALGORITHMS)
def test_tokens_are_those_of_one_rank_and_of_stock(name, two, served, stock, prompt):
    """Tokens agree where everything is selected, and where little is: each kv-head selects on its
    rank what it selects on one."""
    prompts, one = [prompt(length) for length in (250, 33, 130)], served()
    use(two, ALGORITHMS[name] | {"budget": 512})
    assert two.answer(prompts) == stock.answer(prompts)
    check_nothing_is_held(two)
    sparse = ALGORITHMS[name] | {"budget": 96, "buffer": 128}
    answers = []
    for engine in (one, two):
        use(engine, sparse)
        answers.append(engine.answer(prompts))
    first, second = ranks_of(two)
    assert pools_of(two) == [[0], [1]]
    assert first["heads"] == second["heads"] == (2, 1)
    (whole,) = ranks_of(one)
    assert answers[0] == answers[1]
    assert answers[0] != stock.answer(prompts), "the budget is meant to show"
    assert first["misses"] + second["misses"] == whole["misses"] > 0
    check_nothing_is_held(two)
    use(one, {"algorithm": "quest", "budget": 512})


def test_ranks_hold_the_same_pages_through_aborts_and_preemptions(two, stock, prompt):
    """Prompts that arrive while others decode, one that is aborted, and all preempted once."""
    use(two, {"algorithm": "quest", "budget": 512})
    prompts = [prompt(length, 3) for length in (150, 40, 97, 10)]
    names = [f"rank-{number}" for number in range(4)]
    expected = [tokens for (tokens,) in stock.answer(prompts, 12)]
    for number, (name, each) in enumerate(zip(names, prompts, strict=True)):
        two.add(name, each, 12)
        two.steps(2)
        first, second = ranks_of(two)
        assert {**first, "hits": 0, "misses": 0} == {**second, "hits": 0, "misses": 0}
        assert len(first["slots"]) == number + 1
    two.engine.abort_request([names[1]])
    two.preempt()
    two.run()
    for number in (0, 2, 3):
        assert two.tokens[names[number]][0] == expected[number]
    check_nothing_is_held(two)


def test_metrics_are_the_sum_of_ranks(two, prompt):
    """The pages of one of them, which are the same on all."""
    use(two, {"algorithm": "quest", "budget": 96, "buffer": 128})
    reported, scheduler = [], two.scheduler
    update = scheduler.update_from_output

    def seen(step, output):
        if output.kv_connector_output and output.kv_connector_output.kv_connector_stats:
            reported.append(output.kv_connector_output.kv_connector_stats.data)
        return update(step, output)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scheduler, "update_from_output", seen)
        two.answer([prompt(250)])
    first, second = ranks_of(two)
    for name in ("hits", "misses"):
        assert sum(each[name] for each in reported) == first[name] + second[name] > 0
    assert reported[-1]["pages"] == first["num_pages"] - 1
    assert reported[-1]["used_pages"] == 0


@pytest.mark.nightly
def test_stock_of_two_ranks(arguments, beside, stock, prompt):
    """So that one rank of stock stands for two in these tests."""
    prompts = [prompt(length) for length in (130, 33)]
    two = type(stock)(**arguments, **beside, tensor_parallel_size=2)
    try:
        assert two.answer(prompts, 8) == stock.answer(prompts, 8)
    finally:
        two.close()


@pytest.fixture(scope="module")
def narrow(save_model, tmp_path_factory):
    """A model of one kv-head."""
    return save_model(tmp_path_factory.mktemp("narrow"), num_key_value_heads=1)


@pytest.mark.nightly
def test_fewer_kv_heads_than_ranks(of_two, narrow, arguments, beside, stock, prompt):
    """vLLM gives each rank a copy, which selects for the query heads of its rank."""
    more = {"model": str(narrow)}
    one = type(stock)(**arguments | more, **beside)
    try:
        prompts = [prompt(length) for length in (250, 33)]
        expected = one.answer(prompts, 8)
    finally:
        one.close()
    two = of_two(fresh=True, **more)
    assert two.answer(prompts, 8) == expected
    assert [rank["heads"] for rank in ranks_of(two)] == [(2, 1), (2, 1)]
    assert pools_of(two) == [[0, 1], [0, 1]], "the rows are there once"
    use(two, {"algorithm": "quest", "budget": 96, "buffer": 128})
    assert len(two.answer(prompts[:1])[0][0]) == 16
    assert all(rank["misses"] > 0 for rank in ranks_of(two))
    check_nothing_is_held(two)


@pytest.mark.gpu
def test_ranks_of_bfloat16_part_only_where_two_tokens_are_as_good(
    of_two, served, arguments, beside, stock, prompt
):
    """Two tokens are as good if closer than the change of each by two ranks of stock vLLM."""
    more, prompts = {"dtype": "bfloat16"}, [prompt(length, 7) for length in (250, 33, 130, 400)]
    stocks = []
    for number in (1, 2):
        more_ranks = {"tensor_parallel_size": number}
        engine = type(stock)(**arguments | more | more_ranks, **beside)
        try:
            stocks.append(answers_of(engine, prompts))
        finally:
            engine.close()
    changed = [
        abs(reported.logprob - two.logprobs[at][token].logprob)
        for one, two in zip(*stocks, strict=True)
        for at in range(parted(one, two))
        for token, reported in one.logprobs[at].items()
        if token in two.logprobs[at]
    ]
    answers = [answers_of(served(**more), prompts), answers_of(of_two(**more), prompts)]
    for one, two in zip(*answers, strict=True):
        at = parted(one, two)
        if at < len(one.token_ids):
            best, second = sorted(each.logprob for each in one.logprobs[at].values())[:-3:-1]
            assert best - second <= 2 * max(changed)


@pytest.mark.parametrize(("heads", "pools"), [(1, [0, 0, 0, 0]), (2, [0, 0, 2, 2]), (4, None)])
def test_ranks_of_the_same_rows_map_one_file(heads, pools, monkeypatch):
    """Four of them, in threads of one process, which stand in for processes."""
    parallel_state = pytest.importorskip("vllm.distributed.parallel_state")
    ranks, reported, meeting = 4, {}, threading.Barrier(4)
    own = threading.local()
    model = SimpleNamespace(use_mla=False, get_total_num_kv_heads=lambda: heads)
    parallel = SimpleNamespace(tensor_parallel_size=ranks)
    config = SimpleNamespace(model_config=model, parallel_config=parallel)

    def gather(paths, path, group):
        reported[own.rank] = path
        meeting.wait(60)
        paths[:] = [reported[rank] for rank in range(ranks)]
        meeting.wait(60)

    def group():
        return SimpleNamespace(rank_in_group=own.rank, cpu_group=None)

    def ask(rank):
        own.rank = rank
        with host_file(config) as file:
            found = None if file is None else os.fstat(file).st_ino
            meeting.wait(60)
        return found

    monkeypatch.setattr(parallel_state, "get_tp_group", group)
    monkeypatch.setattr("torch.distributed.all_gather_object", gather)
    before = len(os.listdir("/proc/self/fd"))
    with ThreadPoolExecutor(ranks) as threads:
        found = list(threads.map(ask, range(ranks)))
    assert len(os.listdir("/proc/self/fd")) == before
    assert found == [None if pools is None else found[pools[rank]] for rank in range(ranks)]
    assert len({*found}) == (1 if pools is None else len({*pools}))


REFUSED = {
    "quest all heads of a layer share a selection": {"algorithm": "quest", "scope": "shared"},
    "snapkv a selection uses all heads": {
        "algorithm": "snapkv",
        "params": {"outgrow": "slide"},
    },
}


@pytest.mark.parametrize("reason", REFUSED)
def test_selections_of_all_heads_are_refused(reason, model, version, monkeypatch):
    own = SnapKV.spec
    spec = hookimpl(lambda self: evolve(own(self), heads="all"))
    monkeypatch.setattr(SnapKV, "spec", spec)
    refused = configured(model, REFUSED[reason])
    with pytest.raises(CapabilityError, match=f"tensor parallel ranks: with {reason}") as caught:
        check(refused, version)
    assert len(caught.value.reasons) == 1
    assert "each of 2 ranks has some of the 2 kv-heads alone" in caught.value.reasons[0]
    check(configured(model, REFUSED[reason], tensor_parallel_size=1), version)


def test_places_alone_are_shared_by_ranks(model, version):
    lowered = check(configured(model, {"algorithm": "streaming_llm"}), version)
    assert {group.scope for group in lowered.groups} == {"shared"}
    assert lowered.model.num_kv_heads == 1


def test_a_shared_selection_of_a_single_kv_head_is_served(narrow, version):
    check(configured(narrow, {"algorithm": "quest", "scope": "shared"}), version)


def test_a_calibration_of_all_heads_is_refused_with_the_heads_of_a_rank(model, tmp_path, version):
    layers = {str(layer): [[1.0] * 64] * 2 for layer in range(2)}
    reported = {"format": "topkv-double-sparsity-1", "kind": "importance"}
    (tmp_path / "file.json").write_text(json.dumps(reported | {"layers": layers}))
    settings = {"algorithm": "double_sparsity"}
    settings["params"] = {"calibration": str(tmp_path / "file.json")}
    with pytest.raises(ConfigError, match="one of 2 tensor parallel ranks, which has 1 of the 2"):
        check(configured(model, settings), version)


def test_several_machines_are_refused(model, version):
    config = configured(model, {"algorithm": "quest"})
    config.parallel_config.nnodes = 2
    with pytest.raises(CapabilityError, match="not supported: ranks on several machines"):
        check(config, version)


def configured(model, settings, **arguments):
    """vLLM's configuration of an engine of two ranks, without a worker."""
    from vllm import EngineArgs

    more = {"model": str(model), "dtype": "float32", "enable_prefix_caching": False}
    more |= {"tensor_parallel_size": 2, **arguments}
    return EngineArgs(**engine_args({**SETTINGS, **settings}, **more)).create_engine_config()
