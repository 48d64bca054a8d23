"""Features of vLLM above attention work as in stock vLLM."""

from __future__ import annotations

import pytest
import torch

from plugins.vllm.tests.test_drafts import SEVERAL
from tools.engines.tests.adapters import save_adapter


def logprobs(output):
    """Log-probabilities of a prompt or of generated tokens, position by position."""
    return [
        each and {token: reported.logprob for token, reported in each.items()} for each in output
    ]


def test_log_probabilities_of_prompts_and_of_tokens(served, stock, prompt):
    engine, how = served(), {"prompt_logprobs": 2, "logprobs": 3}
    prompts = [prompt(length) for length in (120, 1, 33)]
    for each in (engine, stock):
        for number, one in enumerate(prompts):
            each.add(f"logprobs-{number}", one, 6, **how)
        each.run()
    for number, one in enumerate(prompts):
        got, expected = (each.outputs[f"logprobs-{number}"] for each in (engine, stock))
        pairs = [
            (logprobs(got.prompt_logprobs), logprobs(expected.prompt_logprobs)),
            (logprobs(got.outputs[0].logprobs), logprobs(expected.outputs[0].logprobs)),
        ]
        assert len(got.prompt_logprobs) == len(one)
        assert len(got.outputs[0].logprobs) == 6
        for ours, theirs in pairs:
            for mine, stocks in zip(ours, theirs, strict=True):
                assert (mine is None) == (stocks is None)
                assert mine is None or mine == pytest.approx(stocks, abs=1e-4)
    engine.check_nothing_is_held()


def test_structured_output(served, stock, prompt):
    """Tokens are those that a regular expression allows, and those of stock vLLM."""
    from vllm.sampling_params import StructuredOutputsParams

    engine, prompts = served(), [prompt(length) for length in (40, 90)]
    how = {"structured_outputs": StructuredOutputsParams(regex="[0-9]{4}-[ab]{3}")}
    expected = stock.answer(prompts, 8, **how)
    free = stock.answer(prompts, 8)
    assert expected != free
    assert engine.answer(prompts, 8, **how) == expected
    # A batch in which one is bound and the other is not.
    engine.add("bound", prompts[0], 8, **how)
    engine.add("free", prompts[1], 8)
    engine.run()
    assert engine.tokens["bound"][0] == expected[0][0]
    assert engine.tokens["free"][0] == free[1][0]
    engine.check_nothing_is_held()


@pytest.fixture(scope="session")
def adapters(tmp_path_factory):
    """Two LoRA adapters of the projections of queries, keys and values."""
    from vllm.lora.request import LoRARequest

    return [
        LoRARequest(f"adapter-{number}", number, str(save_adapter(number, tmp_path_factory)))
        for number in (1, 2)
    ]


# There is room for a third adapter, as vLLM's kernels of a CPU give requests without one the last.
LORA = {"enable_lora": True, "max_lora_rank": 8, "max_loras": 3}


@pytest.fixture
def stock_lora(engines, arguments, beside, make_served):
    """Stock vLLM with adapters."""
    if "stock lora" not in engines:
        engines["stock lora"] = make_served(**arguments, **LORA, **beside)
    return engines["stock lora"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="vLLM's kernels there take no float32")
@pytest.mark.parametrize("prefixes", [False, True], ids=["alone", "prefixes"])
@pytest.mark.parametrize("drafts", [{}, SEVERAL], ids=["", "drafts"])
def test_adapters(prefixes, drafts, served, stock_lora, adapters, prompt, monkeypatch):
    """Requests with one adapter, another one and none in a batch, and again, when all but one
    block of each is found where prefixes are: each has the tokens of its adapter."""
    from vllm import SamplingParams

    engine = served(enable_prefix_caching=prefixes, **LORA, **drafts)
    how = SamplingParams(max_tokens=24, temperature=0, detokenize=False, ignore_eos=True)
    found, begin = [], engine.session.coordinator.request_begin
    monkeypatch.setattr(
        engine.session.coordinator,
        "request_begin",
        lambda pages, length: (found.append(length), begin(pages, length))[1],
    )
    tokens, names = [], [f"{prefixes}-{bool(drafts)}-{number}" for number in range(6)]
    for each in (stock_lora, engine):
        for wave in (names[:3], names[3:]):
            for name, adapter in zip(wave, (adapters[0], None, adapters[1]), strict=True):
                asked = {"prompt_token_ids": prompt(7) * 10}
                each.engine.add_request(name, asked, how, lora_request=adapter)
            each.run()
        tokens.append([each.tokens[name][0] for name in names])
    assert tokens[0] == tokens[1]
    assert tokens[1][:3] == tokens[1][3:]
    assert len({*map(tuple, tokens[1])}) == 3
    assert found == [0, 0, 0, *[64 * prefixes] * 3], "blocks of another adapter are not found"
    engine.check_nothing_is_held()


def test_a_kv_cache_dtype_of_8_bits_is_that_of_the_host_pool(served, prompt):
    """Rows that are read from the host pool are the same by either name."""
    small, prompts = {"budget": 64, "unit": 8}, [prompt(length) for length in (200, 33, 120)]
    engine = served(small, kv_cache_dtype="fp8")
    assert engine.session.coordinator.config.host_format == "fp8"
    named = served({**small, "host_format": "fp8"})
    assert engine.answer(prompts, 30) == named.answer(prompts, 30)
    assert engine.session.coordinator.transfers_of().misses
    engine.check_nothing_is_held()
