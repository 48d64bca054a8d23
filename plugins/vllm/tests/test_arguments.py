"""Tests that need no vLLM: arguments, settings, versions, and the entry of the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from topkv.errors import CapabilityError, ConfigError
from topkv.hooks.engine import EngineSetup
from topkv.plugins import registry
from topkv_vllm import engine_args
from topkv_vllm.args import CONNECTOR, WORKERS
from topkv_vllm.engine import VllmEngine
from topkv_vllm.refusals import settings_of
from topkv_vllm.versions import TESTED, version_reasons


def test_settings_get_the_names_that_vllm_has():
    config = {"max_requests": 3, "page_tokens": 32, "max_request_tokens": 96, "budget": 64}
    more = {"seed": 7, "additional_config": {"mine": 1}, "worker_cls": WORKERS["cpu"]}
    assert engine_args(config, **more) == {
        "attention_backend": "CUSTOM",
        "worker_cls": "topkv_vllm.cpu_worker.TopkvCPUWorker",
        "kv_transfer_config": CONNECTOR,
        "max_num_seqs": 3,
        "block_size": 32,
        "max_model_len": 96,
        "additional_config": {"mine": 1, "topkv": {"budget": 64}},
        "seed": 7,
    }


def test_arguments_of_vllm_stand_above_defaults():
    arguments = engine_args({}, max_num_seqs=2)
    assert arguments["max_num_seqs"] == 2
    assert arguments["block_size"] == 64
    assert "max_model_len" not in arguments


def test_a_gpu_gets_a_worker_and_graphs_of_its_own(monkeypatch):
    """Graphs are of all numbers of rows that vLLM rounds up to, and of the most."""
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    arguments = engine_args({"max_requests": 13})
    assert arguments["worker_cls"] == WORKERS["cuda"]
    assert arguments["compilation_config"] == {
        "mode": 0,
        "cudagraph_mode": "FULL_DECODE_ONLY",
        "cudagraph_capture_sizes": [1, 2, 4, 8, 13],
    }
    sizes = engine_args(max_num_seqs=2)["compilation_config"]["cudagraph_capture_sizes"]
    assert sizes == [1, 2]
    assert "compilation_config" not in engine_args(enforce_eager=True)
    mine = {"mode": 0, "cudagraph_mode": "NONE"}
    assert engine_args(compilation_config=mine)["compilation_config"] == mine
    assert "compilation_config" not in engine_args(worker_cls=WORKERS["cpu"])


def test_what_is_said_twice_is_refused_together():
    with pytest.raises(ConfigError) as caught:
        engine_args(
            {"max_requests": 3, "pages": "core"},
            max_num_seqs=4,
            attention_backend="FLASH_ATTN",
            additional_config={"topkv": {}},
        )
    reported = "\n".join(caught.value.reasons)
    assert len(caught.value.reasons) == 4
    assert "max_num_seqs is 3 by the configuration of topkv and 4 by the arguments" in reported
    assert "pages: the engine gives them out" in reported
    assert "attention_backend is 'CUSTOM'" in reported


def configured(settings, dtype="auto"):
    """Part of a configuration of vLLM that says something of topkv's."""
    cache = SimpleNamespace(cache_dtype=dtype)
    return SimpleNamespace(additional_config=settings, cache_config=cache)


def test_settings_that_vllm_decides_are_refused():
    more = {"topkv": {"page_tokens": 64, "pages": "core", "budget": 64}}
    _, reasons = settings_of(configured(more))
    assert len(reasons) == 2
    assert reasons[0].startswith("page_tokens is block_size of vLLM")
    _, reasons = settings_of(configured({"topkv": {"scope": "sharp"}}))
    assert "'sharp'" in reasons[0]
    _, reasons = settings_of(configured({}))
    assert "holds no configuration of topkv" in reasons[0]
    plain = configured({"topkv": {"host_format": "model"}}, "fp8")
    assert settings_of(plain)[1] == ["host_format is 'model' here and 'fp8' by kv_cache_dtype"]


def test_what_an_engine_with_pages_of_its_own_keeps_itself_is_refused_by_name():
    """``engine_args`` and a command line of vLLM's own give the same reasons, all at once."""
    config = {"pages": {"name": "prefixes", "params": {"storage": {"name": "files"}}}}
    with pytest.raises(ConfigError) as caught:
        engine_args(config)
    _, reasons = settings_of(configured({"topkv": config}))
    assert list(caught.value.reasons) == reasons
    (pages,) = reasons
    assert pages.startswith("pages: the engine gives them out")
    assert "say enable_prefix_caching=True" in pages
    assert "raise max_tokens" in pages


def test_versions_that_were_not_tested_are_refused():
    for device, tested in TESTED.items():
        assert not version_reasons(f"{tested[-1]}.1", device)
        (reason,) = version_reasons("0.1.0", device)
        assert f"0.1.0 is not among the minor versions that were tested on {device}" in reason
    (only,) = TESTED["cuda"]
    assert version_reasons(f"{only}.0", "cpu")


def test_a_model_object_is_refused_with_what_to_call():
    engine, reported = (
        VllmEngine(EngineSetup(registry())),
        r"LLM\(model, \*\*topkv_vllm.engine_args",
    )
    assert len(engine.refusals(object())) == 1
    with pytest.raises(CapabilityError, match=reported):
        engine.attach(object(), None)
