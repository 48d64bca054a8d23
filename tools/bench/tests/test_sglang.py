"""``topkv bench --engine sglang``: ``plugins/sglang/test.sh`` has SGLang, and runs it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from unittest.mock import patch

import pytest
from click.testing import CliRunner

from topkv_cli.group import topkv
from topkv_sglang.versions import installed

needs_sglang = pytest.mark.skipif(
    not installed() and not os.environ.get("TOPKV_NEEDS_SGLANG"),
    reason="SGLang is not installed; plugins/sglang/test.sh",
)

TOKEN = 2 * 4 * 2 * 64 * 4
"""Bytes of a token of the tiny geometry: keys and values, layers, kv-heads, dim, float32."""

STUBS = Path(__file__).parents[3] / "plugins" / "sglang" / "tests" / "stubs"


def rows_of(tmp_path, *args):
    """Rows of a grid of the tiny geometry on a CPU."""
    out = tmp_path / "out.json"
    few = ("--steps", 4, "--warmup", 1, "--device", "cpu", "--prefill-chunk", 128)
    grid = ("bench", "--engine", "sglang", "--model", "tiny", "--context", 512, *few, *args)
    paths = os.pathsep.join([str(STUBS), os.environ.get("PYTHONPATH", "")])
    with patch.dict(os.environ, PYTHONPATH=paths, SGLANG_USE_CPU_ENGINE="1"):
        result = CliRunner().invoke(topkv, [*map(str, grid), "--json", str(out)])
    assert result.exit_code == 0, result.output
    shown = json.loads(out.read_text())
    assert shown["model"]["sglang"] == installed()
    return shown["rows"]


@needs_sglang
@pytest.mark.nightly
def test_stock_and_topkv_within_a_limit(tmp_path):
    """A step gives every request a token; cells that do not fit are not started."""
    sets = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "buffer": 128}
    words = [word for name, value in sets.items() for word in ("--set", f"{name}={value}")]
    grid = ("--contestants", "dense,topkv", "--requests", "2,4", "--kv-limit", "8MiB")
    stock = ("--engine-arg", "attention_backend=torch_native")
    rows = rows_of(tmp_path, *grid, *stock, "--drift", 0.25, *words, "--set", "dense_layers=[]")
    dense, two, over, four = rows
    assert "--kv-limit is 8388608" in over["reason"]
    assert dense["bytes"]["device"] % (64 * TOKEN) == 0
    for row in (dense, two, four):
        assert row["status"] == "ok", row
        step = row["step_ms"]
        assert 0 < step["p10"] <= step["median"] <= step["p90"]
        assert row["tokens_per_second"] == 1e3 * row["requests"] / step["median"]
        assert row["first_token_seconds"] > 0
    for row in (two, four):
        assert row["drift"]["stated"] == 0.25
        assert 0.6 < row["hit_rate"] < 0.9
        assert row["link_bytes_per_step"] > 0
        assert row["settings"]["budget"] == 128


def test_what_sglang_cannot_measure_is_refused_together(monkeypatch):
    monkeypatch.setattr("topkv_sglang.versions.installed", lambda: None)
    words = ("bench", "--engine", "sglang", "--model", "tiny", "--engine-arg", "tp_size=2")
    more = ("--queries", "1,4", "--fill", "pool", "--profile", "--device", "cpu")
    result = CliRunner().invoke(topkv, (*words, *more))
    assert result.exit_code == 2
    reported = ("SGLang is not installed", "--queries", "--fill pool", "so one rank", "--profile")
    assert all(reason in result.stderr for reason in reported), result.stderr


@needs_sglang
def test_bytes_of_stock_latent_attention():
    """DeepSeek-V3.2 has 512 latent and 64 rotated elements, and index keys of 128; of four layers
    the second and the last have no indexer, or none has."""
    code = """
import torch
from types import SimpleNamespace as Names
from topkv_bench.sglang_cell import token_bytes
text = Names(architectures=["DeepseekV32ForCausalLM"], index_topk=2048, index_n_heads=64)
text.index_head_dim, text.index_topk_pattern = 128, "FSFS"
model = Names(hf_text_config=text, num_hidden_layers=4, num_attention_heads=128, scaling=0.1)
model.attention_arch, model.dtype = Names(name="MLA"), torch.bfloat16
model.kv_lora_rank, model.qk_rope_head_dim = 512, 64
for kept in ("fp8_e4m3", "bfloat16"):
    print(token_bytes(Names(kv_cache_dtype=kept), model))
text.index_topk = None
print(token_bytes(Names(kv_cache_dtype="auto"), model))
"""
    paths = os.pathsep.join([str(STUBS), os.environ.get("PYTHONPATH", "")])
    variables = {**os.environ, "PYTHONPATH": paths, "SGLANG_USE_CPU_ENGINE": "1"}
    found = subprocess.run(
        [sys.executable, "-c", code], env=variables, capture_output=True, text=True, check=True
    )
    keys = 2 * 132
    assert [*map(int, found.stdout.split()[-3:])] == [4 * 656 + keys, 4 * 1152 + keys, 4 * 1152]
