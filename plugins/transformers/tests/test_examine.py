"""Examinations of checkpoints by their configurations, beside what attaching them then does."""

from __future__ import annotations

import json
import re
import warnings

import pytest
import torch
from click.testing import CliRunner
from model_cases import config_of, model_of
from transformers import DynamicCache, LongcatFlashConfig

import topkv
from topkv.errors import CapabilityError, ConfigError
from topkv.plugins import registry
from topkv_cli.group import topkv as command
from topkv_transformers.engine import warn_of_versions
from topkv_transformers.examine import examine
from topkv_transformers.support import layers_of

LENGTH = 64  # whole pages


def written(folder, name, **options):
    config = config_of(name, **options)
    config.architectures, config.dtype = [f"{name}ForCausalLM"], "float32"
    config.save_pretrained(folder)
    return folder


def reported(*args):
    result = CliRunner().invoke(command, ["doctor", "--json", *map(str, args)])
    return result, json.loads(result.stdout) if not result.exit_code else None


@pytest.mark.parametrize("name", ["Granite", "Qwen3Moe", "Gemma3", "GptOss", "DeepseekV3"])
def test_bytes_are_those_of_the_stock_cache(tiny, tmp_path, name):
    """Bytes are of all layers in the stock model, and of the full ones on the host."""
    settings = tiny.settings(dense_layers=[0])
    found = examine(written(tmp_path, name), settings, LENGTH, registry())
    model, cache = model_of(name), DynamicCache(config=config_of(name))
    with torch.no_grad():
        model(torch.arange(2, 2 + LENGTH)[None], past_key_values=cache)
    held = [layer.keys.nbytes + layer.values.nbytes for layer in cache.layers]
    kinds = [kind for kind, _ in layers_of(model)]
    assert found.bytes["stock_device"] == sum(held)
    full = [size for size, kind in zip(held, kinds, strict=True) if kind == "full_attention"]
    assert found.bytes["host"] == sum(full[1:])
    expected = iter(["resident"] + ["sparse"] * len(full))
    slides = "left alone: sliding_attention"
    assert found.layers == [next(expected) if kind[0] == "f" else slides for kind in kinds]
    assert found.bytes["device"] > sum(held) - sum(full[1:])


def test_states_are_not_counted_and_that_is_said(tiny, tmp_path):
    found = examine(written(tmp_path, "Qwen3Next"), tiny.settings(), LENGTH, registry())
    assert found.layers[0] == "left alone: linear_attention"
    assert found.not_counted == ["the states of linear_attention layers"]


def test_the_command_reports_layers_and_bytes(tmp_path):
    written(tmp_path, "Gemma3")
    _, report = reported("--model", tmp_path, "--length", LENGTH)
    assert report["attaches"]
    assert report["group"] == "windows"
    assert report["layers"] == {"left alone: sliding_attention": "0,2", "served": "1,3"}
    assert "host_bytes" not in report
    names = ("--algorithm", "quest", "--backend", "triton_attention")
    _, report = reported("--model", tmp_path, "--length", LENGTH, *names)
    assert (
        report["device_bytes"] > report["host_bytes"] == 0
    )  # the first two full layers are dense
    shown = CliRunner().invoke(command, ["doctor", "--model", str(tmp_path)])
    assert "left alone: sliding_attention: 0,2" in shown.stdout


def test_code_of_a_folder_does_not_run(tmp_path):
    """Nobody is asked on standard input, where a yes waits."""
    marker, folder = tmp_path / "it_ran", tmp_path / "model"
    written(folder, "Gemma3")
    code = f"open({str(marker)!r}, 'w')\nfrom transformers import LlamaConfig as Foreign\n"
    (folder / "foreign.py").write_text(code)
    config = json.loads((folder / "config.json").read_text())
    config |= {"auto_map": {"AutoConfig": "foreign.Foreign"}, "model_type": "foreign"}
    (folder / "config.json").write_text(json.dumps(config))
    reported = CliRunner().invoke(command, ["doctor", "--model", str(folder)], input="y\ny\n")
    assert reported.exit_code == 2, reported.output
    assert not marker.exists()
    assert "[y/N]" not in reported.output
    assert "doctor runs no code of a model" in reported.output


def test_reasons_are_those_of_attaching(tmp_path):
    config = LongcatFlashConfig(num_layers=1)
    config.architectures = ["LongcatFlashForCausalLM"]
    config.save_pretrained(tmp_path)
    _, report = reported("--model", tmp_path)
    assert not report["attaches"]
    assert len(report["refused"]) == 2
    assert "latent attention (kv_lora_rank)" in report["refused"][1]


def test_settings_that_do_not_fit_are_refused(tmp_path):
    written(tmp_path, "Granite", head_dim=48)
    names = ("--algorithm", "quest", "--backend", "triton_attention")
    _, report = reported("--model", tmp_path, *names)
    assert not report["attaches"]
    assert any("48" in reason for reason in report["refused"])


@pytest.mark.parametrize("text", [None, "{", json.dumps({"model_type": "nobody"})])
def test_a_folder_without_a_configuration_is_one_error(tmp_path, text):
    if text is not None:
        (tmp_path / "config.json").write_text(text)
    result, _ = reported("--model", tmp_path)
    assert result.exit_code == 2
    assert f"cannot look at {tmp_path}" in result.output.replace("\n", "")


def test_head_dims_that_no_backend_takes_are_refused_without_settings(tiny, tmp_path):
    _, report = reported("--model", written(tmp_path, "Granite", head_dim=80))
    assert not report["attaches"]
    assert any("80" in each for each in report["refused"])
    named = {each.partition(":")[0] for each in report["refused"]}
    assert named == {record.name for record in registry().usable("backend")}
    with pytest.raises(CapabilityError, match="80"):
        topkv.attach(model_of("Granite", head_dim=80), tiny.settings())


@pytest.mark.parametrize(
    ("settings", "said"),
    [
        ({"compile": True, "capture": "off"}, "capture is .off."),
        ({"max_request_tokens": 656}, "sliding_window = 640"),
    ],
    ids=["compile", "window"],
)
def test_settings_are_refused_as_by_attach(tiny, tmp_path, settings, said):
    settings = tiny.settings(**settings)
    found = examine(written(tmp_path, "Phi3", sliding_window=640), settings, None, registry())
    with pytest.raises((CapabilityError, ConfigError)) as refused:
        topkv.attach(model_of("Phi3", sliding_window=640).to(tiny.device), settings)
    assert found.refused == list(refused.value.reasons)
    assert any(re.search(said, reason) for reason in found.refused)


@pytest.mark.parametrize("positions", [640, 40_000])
def test_a_request_has_no_more_tokens_than_the_model_positions(tmp_path, positions):
    written(tmp_path, "Granite", max_position_embeddings=positions)
    _, report = reported("--model", tmp_path)
    assert (report["length"], report["positions"]) == (min(positions, 32768), positions)
    _, report = reported("--model", tmp_path, "--length", 50_000)
    assert (report["length"], report["positions"]) == (50_000, positions)


def test_a_configuration_without_its_class_is_that_of_its_kind(tmp_path):
    written(tmp_path, "Gemma3")
    config = json.loads((tmp_path / "config.json").read_text())
    del config["architectures"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, report = reported("--model", tmp_path)
    assert (report["class"], report["attaches"]) == ("Gemma3ForCausalLM", True)


def test_what_generate_refuses_of_its_own_settings(tmp_path):
    """Gemma's is served, beams are not."""
    written(tmp_path, "Gemma3")
    own = {"cache_implementation": "hybrid", "num_beams": 4}
    (tmp_path / "generation_config.json").write_text(json.dumps(own))
    _, report = reported("--model", tmp_path)
    assert report["attaches"]
    (reason,) = report["generate_refuses"]
    assert reason == "num_beams=4: beams are not supported; give num_beams=1"


def test_versions_that_were_never_tested_are_named(tiny, tmp_path, monkeypatch):
    """Versions are named once in a process where a model is attached, and by each doctor."""
    untested = {"topkv": ["torch 9"], "topkv-transformers": ["transformers 8"]}
    everywhere = ("topkv_transformers.engine", "topkv_cli.checkpoint", "topkv_cli.doctor")
    for module in everywhere:
        monkeypatch.setattr(f"{module}.never_tested", lambda name: untested.get(name, []))
    _, report = reported("--model", written(tmp_path, "Granite"))
    assert report["attaches"]
    assert report["never_tested"] == ["torch 9", "transformers 8"]
    monkeypatch.setattr("topkv_cli.attaching._PROBE", 1 << 22)
    assert reported()[1]["never_tested"] == ["torch 9", "transformers 8"]
    warn_of_versions.cache_clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            topkv.attach(tiny.model(), tiny.settings()).detach()
    warn_of_versions.cache_clear()
    ours = [str(each.message) for each in said if "install one of those" in str(each.message)]
    assert [each.partition(";")[0] for each in ours] == ["torch 9", "transformers 8"]
