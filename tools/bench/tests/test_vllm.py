"""``topkv bench --engine vllm``; where vLLM is not installed, ``plugins/vllm/test.sh`` runs it."""

from __future__ import annotations

import json
import os
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from topkv_cli.group import topkv
from topkv_vllm.versions import installed

needs_vllm = pytest.mark.skipif(
    not installed() and not os.environ.get("TOPKV_NEEDS_VLLM"),
    reason="vLLM is not installed; plugins/vllm/test.sh",
)

BLOCK = 2 * 4 * 2 * 64 * 4
"""Bytes of a token of the tiny geometry: keys and values, layers, kv-heads, dim, float32."""


WINDOWS = {
    "model_type": "gpt_oss",
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "sliding_window": 32,
    "vocab_size": 256,
}
"""Every other layer slides over a window."""

LATENT = {
    "model_type": "deepseek_v32",
    "hidden_size": 64,
    "intermediate_size": 64,
    "moe_intermediate_size": 64,
    "num_hidden_layers": 2,
    "first_k_dense_replace": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "q_lora_rank": 32,
    "kv_lora_rank": 512,
    "qk_rope_head_dim": 64,
    "qk_nope_head_dim": 64,
    "v_head_dim": 64,
    "index_topk": 64,
    "index_head_dim": 128,
    "index_n_heads": 4,
    "vocab_size": 256,
}
"""An indexer selects latent rows."""


def rows_of(tmp_path, *args, device="cpu", config=None):
    out, model = tmp_path / "out.json", ("--config", config) if config else ("--model", "tiny")
    few = ("--steps", 4, "--warmup", 1, "--device", device, "--prefill-chunk", 128)
    grid = ("bench", "--engine", "vllm", *model, "--context", 512, *few, *args)
    result = CliRunner().invoke(topkv, [*map(str, grid), "--json", str(out)])
    assert result.exit_code == 0, result.output
    shown = json.loads(out.read_text())
    assert shown["options"]["engine"] == "vllm"
    assert config or shown["model"]["class"] == "LlamaForCausalLM"
    assert shown["model"]["vllm"] in installed().values()
    return shown["rows"]


def check_times(row):
    step, kept = row["step_ms"], row.get("tokens_per_step", 1)
    assert 0 < step["p10"] <= step["median"] <= step["p90"]
    assert row["tokens_per_second"] == 1e3 * row["requests"] * kept / step["median"]
    assert row["first_token_seconds"] is None or row["first_token_seconds"] > 0
    assert row["attach_seconds"] > 0


@needs_vllm
def test_stock_vllm_and_a_limit(tmp_path):
    """Two requests exceed the limit, one does not; cells that do not fit are not started."""
    grid = ("--contestants", "dense", "--requests", "2,1", "--kv-limit", "3MiB")
    over, row = rows_of(tmp_path, *grid, "--engine-arg", "block_size=32")
    assert (over["requests"], over["status"]) == (2, "over the limit")
    assert "--kv-limit is 3145728" in over["reason"]
    assert row["status"] == "ok", row
    check_times(row)
    tokens = 512 + 1 + 1 + 4 + 4 + 1  # prompt, first, warmup, steps, four chunks and one more
    assert row["bytes"]["device"] == (-(-tokens // 32) + 1) * 32 * BLOCK
    assert row["bytes"]["host"] == 0
    assert row["hit_rate"] is None


@needs_vllm
@patch.dict(os.environ)  # a cell has a process of its own, whose environment it changes
@pytest.mark.parametrize(("dtype", "row"), [("auto", 576 * 4), ("fp8", 656)])
def test_stock_vllm_holds_latent_rows_and_keys_of_the_indexer(tmp_path, dtype, row):
    """A token has one row, and one key in fp8 with its scale."""
    from vllm.engine.arg_utils import EngineArgs

    from topkv_bench.vllm_cell import expected_bytes

    (tmp_path / "config.json").write_text(json.dumps(LATENT))
    common = {"model": str(tmp_path), "skip_tokenizer_init": True, "dtype": "float32"}
    config = EngineArgs(**common, kv_cache_dtype=dtype).create_engine_config()
    size = config.cache_config.block_size
    asked = {"contestant": "dense", "requests": 3, "tokens": 2 * size + 1}
    assert expected_bytes(config, asked) == (3 * 3 + 1) * size * 2 * (row + 128 + 4)


@needs_vllm
def test_topkv_with_a_stated_drift(tmp_path):
    sets = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "unit": 16}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    grid = ("--contestants", "offloaded,topkv", "--requests", "2", "--drift", 0.25)
    none, row = rows_of(tmp_path, *grid, *words, "--set", "buffer=128")
    assert none["status"] == "refused"
    assert "there are dense, topkv-resident, topkv and no offloaded" in none["reason"]
    assert row["status"] == "ok", row
    check_times(row)
    assert row["drift"]["stated"] == 0.25
    assert row["drift"]["layers"] == 2
    assert 0.6 < row["hit_rate"] < 0.9
    assert row["link_bytes_per_step"] > 0
    assert row["bytes"]["host"] > 0
    assert row["settings"]["budget"] == 128


@needs_vllm
@pytest.mark.nightly
def test_caches_that_are_filled_without_a_prompt(tmp_path):
    """vLLM takes all but the last page of each prompt for found, stock and with topkv."""
    sets = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "buffer": 128}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    grid = ("--contestants", "dense,topkv", "--requests", 2, "--drift", 0.25, "--fill", "pool")
    dense, row = rows_of(tmp_path, *grid, *words)
    for each in (dense, row):
        assert each["status"] == "ok", each
        assert each["first_token_seconds"] is None
        check_times(each)
    assert 0.6 < row["hit_rate"] < 0.9


@needs_vllm
@pytest.mark.nightly
def test_windows_beside_full_attention(tmp_path):
    """Windows take blocks of stock's pool, where every request decodes at once all the same."""
    path = tmp_path / "config.json"
    path.write_text(json.dumps(WINDOWS))
    sets = {"algorithm": "quest", "backend": "triton_attention", "budget": 128}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    rows = rows_of(tmp_path, "--contestants", "dense,topkv", "--requests", 3, *words, config=path)
    for row in rows:
        assert row["status"] == "ok", row
        check_times(row)


@needs_vllm
@pytest.mark.gpu
def test_steps_that_verify_drafts(tmp_path):
    """A share of what vLLM looks up is accepted, whatever it is, stock and with topkv."""
    sets = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "unit": 16}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    grid = ("--contestants", "dense,topkv", "--requests", "2", "--drift", 0.05, "--steps", 12)
    verified = ("--queries", "1,4", "--accept", "1,0")
    beside = ("--engine-arg", "gpu_memory_utilization=0.05")  # other tests may run there
    rows = rows_of(tmp_path, *grid, *words, *verified, *beside, device="cuda")
    assert [(row["queries"], row["accept"]) for row in rows] == [(1, None), (4, 1), (4, 0)] * 2
    for row in rows:
        assert row["status"] == "ok", row
        check_times(row)
        if row["accept"] == 1:
            assert 1 < row["tokens_per_step"] <= 4
        else:
            assert row["tokens_per_step"] == 1


def test_what_vllm_cannot_measure_is_refused_together(monkeypatch):
    monkeypatch.setattr("topkv_vllm.versions.installed", dict)
    tiny = ("bench", "--model", "tiny", "--engine-arg", "tensor_parallel_size=2")
    result = CliRunner().invoke(topkv, tiny)
    assert result.exit_code == 2
    assert "--engine-arg is of --engine vllm and --engine sglang" in result.stderr
    more = ("--engine", "vllm", "--profile", "--device", "cpu")
    more += ("--queries", "1,4")
    result = CliRunner().invoke(topkv, (*tiny, *more))
    assert result.exit_code == 2
    reported = (
        "vLLM is not installed",
        "--profile: phases",
        "on a GPU alone",
        "so one rank",
    )
    assert all(reason in " ".join(result.stderr.split()) for reason in reported), result.stderr
