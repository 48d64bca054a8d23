"""Several engines in a process, one that is not used at all, and one that ends."""

from __future__ import annotations

import io
import json
import logging
import os
import subprocess
import sys

import pytest

from topkv.kv.host_mapping import HostMapping
from topkv_vllm import engine_args

STOCK = """
import json, sys
from vllm import LLM, SamplingParams
arguments, prompts = json.loads(sys.argv[1])
llm = LLM(**arguments)
how = SamplingParams(max_tokens=16, temperature=0, detokenize=False, ignore_eos=True)
outputs = llm.generate([{"prompt_token_ids": each} for each in prompts], how, use_tqdm=False)
modules = sorted(name for name in sys.modules if name.startswith("topkv"))
print(json.dumps([[[*each.outputs[0].token_ids] for each in outputs], modules]))
"""


def alone(arguments, prompts, **environment):
    """Tokens and log of stock vLLM in a process of its own, and the modules of topkv there."""
    reported = json.dumps([arguments, prompts])
    result = subprocess.run(
        [sys.executable, "-c", STOCK, reported],
        env={**os.environ, "VLLM_LOGGING_LEVEL": "INFO", **environment},
        capture_output=True,
        text=True,
    )
    if "grouped-gemm kernel cannot be used" in result.stderr:
        pytest.skip("stock vLLM's own kernels of experts refuse float32 on this CPU")
    assert result.returncode == 0, result.stderr[-4000:]
    *log, last = result.stdout.splitlines()
    return *json.loads(last), [*log, *result.stderr.splitlines()]


def test_installed_and_not_used_it_changes_nothing(stock, arguments, beside, prompt):
    """Tokens are the same without the plugin, and its engine is not even imported."""
    prompts, arguments = [prompt(length) for length in (50, 7)], {**arguments, **beside}
    without, modules, log = alone(arguments, prompts, VLLM_PLUGINS="")
    assert not modules
    assert log
    assert not [line for line in log if "topkv" in line]
    used, modules, log = alone(arguments, prompts)
    assert not {*modules} & {"topkv_vllm.backend", "topkv_vllm.worker", "topkv.coordinator"}
    assert not [line for line in log if "topkv" in line]
    assert used == without == [each for (each,) in stock.answer(prompts)]


@pytest.mark.nightly
def test_a_mixture_of_experts(arguments, beside, tmp_path, prompt):
    """Layers of experts are known to vLLM by name too, beside those of attention. In processes of
    their own, for groups of ranks are made once in each, by what the first engine needs."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 256}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 128}
    more = {"num_hidden_layers": 2, "max_position_embeddings": 512}
    model = Qwen3MoeForCausalLM(Qwen3MoeConfig(**sizes, **heads, **experts, **more))
    model.float().save_pretrained(tmp_path)
    arguments = {**arguments, "model": str(tmp_path), "skip_tokenizer_init": True}
    prompts = [prompt(length) for length in (130, 33)]
    expected, _, _ = alone({**arguments, **beside}, prompts)
    settings = {"algorithm": "quest", "backend": "triton_attention", "budget": 512}
    ours = engine_args({**settings, "page_tokens": 32, "max_requests": 4}, **arguments)
    got, modules, _ = alone(ours, prompts)
    assert "topkv_vllm.worker" in modules
    assert got == expected


def test_stock_vllm_beside_topkv_is_what_it_was(served, stock, prompt):
    """The attention backend of stock vLLM is its own too."""
    from vllm.v1.attention.backends.registry import AttentionBackendEnum

    engine = served()
    assert not AttentionBackendEnum.CPU_ATTN.is_overridden()
    expected = stock.answer([prompt(50)])
    assert engine.answer([prompt(50)]) == stock.answer([prompt(50)]) == expected
    (layers,) = stock.llm.collective_rpc(
        lambda worker: worker.vllm_config.compilation_config.static_forward_context
    )
    kinds = {type(layer.impl).__module__.split(".")[0] for layer in layers.values()}
    assert kinds == {"vllm"}


def test_how_far_a_pool_is_stands_in_the_log_of_vllm(served):
    """The workers of an engine that is there have seen to it."""
    served()
    ours, theirs = (logging.getLogger(name) for name in ("topkv", "vllm"))
    lines = io.StringIO()
    assert theirs.handlers
    assert ours.handlers == theirs.handlers
    assert ours.level == theirs.getEffectiveLevel()
    with pytest.MonkeyPatch.context() as patch:
        for handler in theirs.handlers:
            patch.setattr(handler, "stream", lines)
        logging.getLogger(HostMapping.__module__).error("10 %% of %.1f GiB touched", 64)
    assert "10 % of 64.0 GiB touched" in lines.getvalue()


def test_a_log_that_somebody_has_set_up_stays(served, monkeypatch):
    served()
    from topkv_vllm.worker import log_as_vllm_does

    ours = logging.getLogger("topkv")
    monkeypatch.setattr(ours, "level", logging.DEBUG)
    monkeypatch.setattr(ours, "handlers", [])
    log_as_vllm_does()
    assert (ours.level, ours.handlers) == (logging.DEBUG, [])


def test_two_engines_in_a_process_take_turns(served, stock, prompt):
    """Step by step, with other settings; each has a coordinator and requests of its own."""
    first, second = served(), served({"dense_layers": [0, 1]})
    assert first.session.coordinator is not second.session.coordinator
    prompts = [prompt(length) for length in (120, 60, 9)]
    for number, each in enumerate(prompts):
        first.add(f"turns-{number}", each, 12)
        second.add(f"turns-{number}", each[::-1], 12)
    while first.engine.has_unfinished_requests() or second.engine.has_unfinished_requests():
        first.step()
        second.step()
    first.step()
    second.step()
    for engine, asked in ((first, prompts), (second, [each[::-1] for each in prompts])):
        got = [[engine.tokens[f"turns-{number}"][0]] for number in range(len(asked))]
        assert got == stock.answer(asked, 12)
        engine.check_nothing_is_held()


def test_one_that_ends_gives_back_its_memory_and_leaves_others_alone(served, stock, prompt):
    engine, other = served(fresh=True), served()
    engine.add("open", prompt(50))
    engine.steps(3)
    session, closed = engine.session, []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(session.coordinator, "close", lambda: closed.append(True))
        engine.close()
        engine.close()
    assert session.requests is None
    assert closed == [True]
    session.coordinator.close()
    assert other.answer([prompt(50)]) == stock.answer([prompt(50)])
