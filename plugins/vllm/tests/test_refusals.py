"""Refusals of what cannot be served: before a weight is loaded, with every reason at once."""

from __future__ import annotations

import json
import shutil
from types import SimpleNamespace

import pytest

from plugins.vllm.tests import tiny
from topkv import SparseConfig
from topkv.errors import CapabilityError, ConfigError, RequestError
from topkv_testing.integrity import check_integrity
from topkv_vllm import engine_args
from topkv_vllm.geometry import lowered_for, shape_of_config
from topkv_vllm.refusals import algorithm_reasons, check


def refused(served, *reasons, error=CapabilityError, settings=None, **arguments):
    """Expect a refusal of this type with these reasons, and before weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("topkv_vllm.worker.TopkvWorker.load_model", None)
        with pytest.raises(error, match="cannot serve this through topkv") as caught:
            served(settings, **arguments)
    reported = "\n".join(caught.value.reasons)
    assert all(reason in reported for reason in reasons), reported
    return caught.value.reasons


def test_options_are_refused_together(served):
    reasons = refused(
        served,
        "not supported: prefix caching beside scheduling by priority",
        "kv_cache_dtype fp8_e5m2; say auto or fp8",
        enable_prefix_caching=True,
        scheduling_policy="priority",
        kv_cache_dtype="fp8_e5m2",
    )
    assert len(reasons) == 2


def test_prefixes_and_storages_of_topkv_are_refused_beside_options(model, version):
    """Settings are refused by name, with advice, and before a worker is there to load weights."""
    config = configured(model, kv_cache_dtype="fp8_e5m2")
    config.additional_config["topkv"] |= {"pages": "prefixes"}
    with pytest.raises(CapabilityError, match="cannot serve this through topkv") as caught:
        check(config, version)
    dtype, pages = caught.value.reasons
    assert "kv_cache_dtype fp8_e5m2" in dtype
    assert pages.startswith("pages: the engine gives them out")
    assert "say enable_prefix_caching=True" in pages


def test_a_host_format_beside_another_one_by_kv_cache_dtype_is_refused(model, version):
    config = configured(model, kv_cache_dtype="fp8")
    config.additional_config["topkv"] |= {"host_format": "model"}
    with pytest.raises(CapabilityError, match="'model' here and 'fp8' by kv_cache_dtype"):
        check(config, version)


def test_a_pool_smaller_than_a_request_is_refused_with_both_numbers(served):
    refused(served, "512 and 256", error=ConfigError, settings={"max_tokens": 256})


def test_a_page_that_no_unit_fits_is_refused(served):
    refused(served, "24", error=ConfigError, settings={"page_tokens": 24, "unit": 16})


def test_an_algorithm_that_may_run_out_of_room_is_refused(served):
    settings = {"algorithm": "snapkv", "budget": 256, "params": {"generated": 64}}
    refused(served, "room for 64 tokens", "511 within max_model_len = 512", settings=settings)


def test_more_blocks_than_host_pages_are_refused(served):
    with pytest.raises(Exception, match="1000 blocks exceed 69 pages; raise max_tokens"):
        served(num_gpu_blocks_override=1000)


def test_an_exception_in_a_layer_leaves_nothing_behind(served, prompt):
    """vLLM ends an engine whose model raised; topkv has dropped the step, and is whole."""
    engine = served(fresh=True, enforce_eager=True)  # a replay calls no layer
    engine.add("one", prompt(150))
    engine.add("two", prompt(20))
    for _ in range(3):
        engine.step()
    session = engine.session
    coordinator, lengths = session.coordinator, [*session.coordinator.requests.length]
    attention = coordinator.attention

    def fail(layer, *rows, **options):
        if layer == 1:
            raise RequestError("on purpose")
        return attention(layer, *rows, **options)

    coordinator.attention = fail
    with pytest.raises(RequestError, match="on purpose"):
        engine.step()
    assert coordinator.forward is None
    assert [*coordinator.requests.length] == lengths
    check_integrity(coordinator)
    for held in [*session.requests.held.values()]:
        coordinator.request_end(held.slot)
    check_integrity(coordinator)
    assert coordinator.manager.host.used == 0


def configured(model, **arguments):
    """vLLM's configuration of an engine through topkv, without a worker."""
    from vllm import EngineArgs

    settings = {"algorithm": "quest", "backend": "triton_attention", "budget": 512}
    more = {"model": str(model), "dtype": "float32", "enable_prefix_caching": False, **arguments}
    return EngineArgs(**engine_args(settings, **more)).create_engine_config()


def test_drafts_of_other_methods_are_refused(model, version):
    """Drafts are refused of other methods, and too many of them."""
    drafts = {"num_speculative_tokens": 3, "parallel_drafting": False}
    config = configured(model)
    config.speculative_config = SimpleNamespace(
        method="medusa", **drafts | {"parallel_drafting": True}
    )
    config.additional_config["topkv"] |= {"max_queries": 2}
    with pytest.raises(CapabilityError) as caught:
        check(config, version)
    reported = "\n".join(caught.value.reasons)
    assert "method 'medusa'; say one of ngram, draft_model, eagle, eagle3, mtp" in reported
    assert "drafts in parallel, which were not run yet" in reported
    assert "max_queries is one more than num_speculative_tokens of vLLM" in reported
    config = configured(model)
    config.speculative_config = SimpleNamespace(
        method="ngram", **drafts | {"num_speculative_tokens": 9}
    )
    config.scheduler_config.async_scheduling = False
    with pytest.raises(ConfigError, match="max_queries"):
        check(config, version)


def test_drafts_beside_asynchronous_scheduling_are_refused_where_the_host_counts(model, version):
    """Some algorithms follow on the host which tokens are decoded."""
    drafts = {"method": "ngram", "num_speculative_tokens": 3}
    config = configured(model, speculative_config=drafts, block_size=32)
    chosen = {"backend": "triton_attention", "budget": 64, "verification": "exact"}
    chosen["dense_layers"] = []
    for algorithm, unit in {"clusterkv": 1, "quest": 16}.items():
        settings = SparseConfig(algorithm=algorithm, unit=unit, **chosen)
        lowered = lowered_for(config, settings, shape_of_config(config))
        for scheduled in (False, True):
            config.scheduler_config.async_scheduling = scheduled
            found = [each for each in algorithm_reasons(config, lowered) if "beside" in each]
            assert len(found) == (scheduled and algorithm == "clusterkv")
            assert all("clusterkv follows on the host which" in each for each in found)
            assert all(each.endswith("say async_scheduling=False") for each in found)


def test_other_layers_that_draft_are_refused(needs_vllm, version, tmp_path):
    """Refused are several such layers (MTP), and those that read keys of the model's."""
    path = tiny.mimo(tmp_path)
    drafts = {"method": "mtp", "num_speculative_tokens": 2}
    options = {"skip_tokenizer_init": True, "max_model_len": 512, "async_scheduling": False}
    config = configured(path, speculative_config=drafts, **options)
    check(config, version)
    config.speculative_config.draft_model_config.hf_config.update(
        {"num_nextn_predict_layers": 2, "model_type": "gemma4_mtp"}
    )
    with pytest.raises(CapabilityError) as caught:
        check(config, version)
    several, shared = caught.value.reasons
    assert several.endswith("several MTP layers")
    assert shared.endswith("MTP layers that read keys of the model's")


def test_asynchronous_scheduling_is_refused(model, version):
    """vLLM turns it off on a CPU by itself, whatever is asked for."""
    config = configured(model, async_scheduling=True)
    check(config, version)
    config.scheduler_config.async_scheduling = True
    config.device_config.device_type = "cpu"
    with pytest.raises(
        CapabilityError, match="asynchronous scheduling on a CPU; say async_scheduling=F"
    ):
        check(config, version)


MODELS = {
    "slides over a window in every layer": {
        "use_sliding_window": True,
        "sliding_window": 64,
        "layer_types": None,
    },
    "caps attention logits": {"attn_logit_softcapping": 30.0},
    "attends in chunks": {"attention_chunk_size": 128},
}


@pytest.mark.parametrize("reason", MODELS)
def test_models_are_refused_by_their_configuration(reason, model, version, tmp_path):
    config = json.loads((model / "config.json").read_text()) | MODELS[reason]
    if config["layer_types"] is None:
        config |= {"max_window_layers": 0, "layer_types": ["sliding_attention"] * 2}
    for path in model.glob("token*"):
        shutil.copy(path, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(CapabilityError, match=reason):
        check(configured(tmp_path), version)


MIXTURE = {"use_sliding_window": True, "sliding_window": 64, "max_window_layers": 1}
MIXTURE |= {"layer_types": ["full_attention", "sliding_attention"]}


@pytest.fixture
def mixture(model, tmp_path):
    """A model of two layers, one of which slides over a window; its weights are not needed."""
    for path in model.glob("token*"):
        shutil.copy(path, tmp_path)
    config = json.loads((model / "config.json").read_text()) | MIXTURE
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def test_options_beside_layers_that_vllm_keeps_are_refused_together(needs_vllm, mixture, version):
    config = configured(mixture, max_model_len=512)
    assert check(config, version).model.num_layers == 1
    config.scheduler_config.async_scheduling = False
    config.scheduler_config.disable_hybrid_kv_cache_manager = True
    config.cache_config.block_size = 48
    drafts = {"method": "eagle", "num_speculative_tokens": 3, "parallel_drafting": False}
    config.speculative_config = SimpleNamespace(**drafts, draft_model_config=config.model_config)
    with pytest.raises(CapabilityError) as caught:
        check(config, version)
    assert len(caught.value.reasons) == 3
    reported = "\n".join(caught.value.reasons)
    for reason in (
        "disable_hybrid_kv_cache_manager",
        "page_tokens = 48; say a multiple of 32",
        "a drafter that mixes windows and full attention",
    ):
        assert reason in reported


def test_a_host_pool_smaller_than_a_request_of_a_mixture_is_refused(needs_vllm, mixture, version):
    """vLLM sees no need of the device's memory in its pages."""
    config = configured(mixture, max_model_len=512)
    config.additional_config["topkv"] |= {"max_tokens": 256}
    with pytest.raises(ConfigError, match="512 and 256"):
        check(config, version)


def test_connectors_are_refused(model, version):
    """Refused are connectors other than this package's, and prefix caching without that."""
    config = configured(model, enable_prefix_caching=True)
    check(config, version)
    config.kv_transfer_config.kv_connector = "ExampleConnector"
    with pytest.raises(CapabilityError, match="the KV connector ExampleConnector, which would"):
        check(config, version)
    config.kv_transfer_config = None
    with pytest.raises(CapabilityError, match="prefix caching without kv_transfer_config="):
        check(config, version)


def test_blocks_of_several_kinds_are_refused():
    """Each kind would open the forward of a step once more."""
    pytest.importorskip("vllm")
    from topkv_vllm.placeholders import Placeholders

    config = SimpleNamespace(num_blocks=2, kv_cache_groups=[None, None])
    lowered = SimpleNamespace(model=SimpleNamespace(attention="gqa"), num_pages=2)
    with pytest.raises(CapabilityError, match="keeps 2 groups of layers apart"):
        Placeholders(lowered).join(config)
