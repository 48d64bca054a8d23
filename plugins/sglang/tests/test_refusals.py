"""Refusals of what cannot be served: before a weight is loaded, with every reason at once."""

from __future__ import annotations

import json

import pytest

from plugins.sglang.tests.conftest import DEFAULTS, DEVICE

SETTINGS = {name: value for name, value in DEFAULTS.items() if name != "poison"}


@pytest.fixture(scope="module")
def refused(driven, arguments, model):
    """Expects a refusal with these reasons: ``refused(*reasons, settings=..., **arguments)``.
    Arguments that SGLang refuses itself here are ``changes`` of what it has resolved."""
    process = driven()

    def expect(*reasons, error="CapabilityError", settings=None, changes=None, **more):
        config = {**SETTINGS, "max_request_tokens": arguments["context_length"]}
        given = {**arguments, **more}
        if "context_length" not in more:
            del given["context_length"]
        found = process.try_(
            "check", arguments=given, config=config | (settings or {}), **(changes or {})
        )
        assert found.get("error") == error, found
        assert "SGLang cannot serve this through topkv" in found["text"]
        reported = "\n".join(found["reasons"])
        assert all(reason in reported for reason in reasons), reported
        return found["reasons"]

    expect.process, expect.arguments = process, arguments
    return expect


def test_places_are_where_they_were_in_the_version_that_runs(refused):
    assert refused.process.do("moved") == []


def test_options_are_refused_together_where_an_engine_is_started(refused):
    reasons = refused(
        "kv_cache_dtype fp8_e5m2; say auto",
        "attention backend torch_native beside topkv; say --attention-backend topkv alone",
        "enable_memory_saver: device buffers of topkv would stay",
        kv_cache_dtype="fp8_e5m2",
        decode_attention_backend="torch_native",
        enable_memory_saver=True,
    )
    assert len(reasons) == 3


OPTIONS = {
    f"SGLang 0.5.22 is not among the versions that were tested on {DEVICE}": {"version": "0.5.22"},
    "the device xpu; tested are cpu, cuda": {"device": "xpu"},
    "speculative decoding (EAGLE); say NGRAM": {"speculative_algorithm": "EAGLE"},
    "models of diffusion": {"dllm_algorithm": "LowConfidence"},
    "embeddings": {"is_embedding": True},
    "prefill_only_disable_kv_cache": {"prefill_only_disable_kv_cache": True},
    "compilation": {"enable_torch_compile": True},
    "two batches or a split prompt": {"enable_two_batch_overlap": True},
    "many items in a prompt": {"enable_mis": True},
    "looks into the pool": {"kv_canary": "sweep"},
    "pipeline parallel stages": {"pp_size": 2},
    "data parallel ranks": {"dp_size": 2},
    "ranks that share attention": {"attn_dp_size": 2},
    "context parallel ranks": {"dcp_size": 2},
    "several machines": {"nnodes": 2},
    "enable_hierarchical_cache: rows are in host memory already": {
        "enable_hierarchical_cache": True
    },
    "enable_lmcache": {"enable_lmcache": True},
    "enable_flexkv": {"enable_flexkv": True},
    "enable_unified_cache_external_linker": {"enable_unified_cache_external_linker": True},
    "enable_hisparse": {"enable_hisparse": True},
    "enable_unified_memory": {"enable_unified_memory": True},
    "enable_page_major_kv_layout": {"enable_page_major_kv_layout": True},
    "enable_kv_cache_sharding": {"enable_kv_cache_sharding": True},
    "enable_streaming_session": {"enable_streaming_session": True},
    "enable_session_radix_cache": {"enable_session_radix_cache": True},
    "radix_cache_backend mine": {"radix_cache_backend": "mine"},
    "disaggregation_mode decode": {"disaggregation_mode": "decode"},
}


def test_each_option_has_its_reason(refused):
    """All are refused at once; versions and devices, alone."""
    changes = {name: value for each in OPTIONS.values() for name, value in each.items()}
    del changes["version"], changes["device"]
    reasons = refused(changes=changes)
    assert len(reasons) == len(OPTIONS) - 2
    for each in OPTIONS:
        assert any(each in reason for reason in reasons) or each in list(OPTIONS)[:2], each
    for each in list(OPTIONS)[:2]:
        assert len(refused(each, changes=OPTIONS[each])) == 1


def test_drafts_that_are_no_chain_are_refused(refused):
    changes = {"speculative_algorithm": "NGRAM", "speculative_ngram_max_bfs_breadth": 4}
    assert len(refused("speculative_ngram_max_bfs_breadth = 4", changes=changes)) == 1


def test_settings_that_sglang_decides_are_refused(refused):
    override = json.dumps({"topkv_settings": {"page_tokens": 32, "pages": "core", "unit": 16}})
    given = {**refused.arguments, "attention_backend": "topkv", "page_size": 32}
    found = refused.process.try_(
        "check", arguments={**given, "json_model_override_args": override}
    )
    assert found["error"] == "CapabilityError"
    page, pages = found["reasons"]
    assert page.startswith("page_tokens is page_size of SGLang")
    assert pages.startswith("pages: the engine gives them out")
    found = refused.process.try_("check", arguments=given)
    assert "holds no configuration of topkv" in found["reasons"][0]


def test_pools_that_do_not_fit_are_refused_with_both_numbers(refused):
    refused("512 and 256", error="ConfigError", settings={"max_tokens": 256})
    refused("max_total_tokens = 8192 exceeds the 2176 tokens", max_total_tokens=8192)


def test_a_page_that_no_unit_fits_is_refused(refused):
    refused("24", error="ConfigError", settings={"page_tokens": 24, "unit": 16})


def test_algorithms_that_keep_more_than_pages_hold_are_refused(refused):
    """Refused are those that keep more of a prompt, and those that may run out of room."""
    refused(
        "the radix cache: clusterkv keeps more of a prompt",
        "say disable_radix_cache=True",
        settings={"algorithm": "clusterkv", "unit": 1},
    )
    settings = {"algorithm": "snapkv", "budget": 256, "params": {"generated": 64}}
    refused("room for 64 tokens", "511 within context_length = 512", settings=settings)
    drafts = {"speculative_algorithm": "NGRAM", "speculative_num_draft_tokens": 4}
    drafts["speculative_ngram_max_bfs_breadth"] = 1
    refused("room for 61 tokens", settings=settings, **drafts)  # three may be rejected ones


def test_ranks_that_would_share_a_selection_are_refused(refused):
    """Other reasons say of which rank they are."""
    refused(
        "tensor parallel ranks: with quest all heads of a layer share a selection",
        "set scope to 'kv_head'",
        settings={"scope": "shared"},
        changes={"tp_size": 2},
    )
    refused(
        "24",
        "one of 2 tensor parallel ranks, which has 1 of the 2 kv-heads",
        error="ConfigError",
        settings={"page_tokens": 24, "unit": 16},
        changes={"tp_size": 2},
    )


MODELS = {
    "has layers of other kinds (sliding_attention)": {
        "layer_types": ["full_attention", "sliding_attention", "full_attention"]
    },
    "caps attention logits": {"attn_logit_softcapping": 30.0},
}


@pytest.mark.parametrize("reason", MODELS)
def test_models_are_refused_by_their_configuration(reason, refused, model, tmp_path):
    config = json.loads((model / "config.json").read_text()) | MODELS[reason]
    (tmp_path / "config.json").write_text(json.dumps(config))
    refused(reason, model_path=str(tmp_path))
