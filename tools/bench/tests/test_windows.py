"""``topkv bench`` on models whose layers slide beside those of topkv."""

from __future__ import annotations

import json

import pytest
import torch
from click.testing import CliRunner

from topkv.config import SparseConfig
from topkv_bench import contestants, geometry
from topkv_bench.contestants import Cell
from topkv_cli.group import topkv

SPARSE = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "unit": 16}
SPARSE |= {"dense_layers": []}


@pytest.mark.slow
@pytest.mark.parametrize(("fill", "context"), [("pool", 300), ("prompt", 96)])
def test_windows_and_experts_are_measured(tmp_path, fill, context):
    """gpt-oss with fewer layers: windows are filled, held and counted beside topkv's own."""
    few = {"num_hidden_layers": 4, "num_local_experts": 4, "hidden_size": 128, "vocab_size": 256}
    few |= {"intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
    file = tmp_path / "config.json"
    file.write_text(json.dumps({**geometry.GEOMETRIES["gpt-oss-20b"], **few}))
    out, grid = tmp_path / "out.json", ("--context", context, "--requests", 2, "--fill", fill)
    names = ("--contestants", "dense,topkv-resident,topkv", "--steps", 3, "--warmup", 1)
    where = ("--device", "cpu", "--json", out)
    sets = [f"--set={name}={value}" for name, value in SPARSE.items()]
    given = map(str, ("--config", file, *grid, *names, *where, *sets))
    result = CliRunner().invoke(topkv, ["bench", *given])
    assert result.exit_code == 0, result.stderr
    dense, resident, sparse = json.loads(out.read_text())["rows"]
    assert {row["status"] for row in (dense, resident, sparse)} == {"ok"}
    row = 2 * 2 * 64 * 4  # keys and values, kv-heads, dim, bytes
    held = min(128, context + 4)
    for each in (resident, sparse):
        assert each["bytes"]["left"] == 2 * 2 * held * row
    assert sparse["capture"] == "off: the model is on cpu, which has no CUDA graphs"


def test_bytes_that_windows_will_hold_are_expected():
    config = geometry.config_of("gpt-oss-20b", None, 1024)
    config.num_hidden_layers, config.num_local_experts, config.hidden_size = 2, 4, 64
    config.layer_types, config.vocab_size = config.layer_types[:2], 256
    made = geometry.build(config, torch.device("cpu"), torch.float32)
    for name in ("topkv", "topkv-resident"):
        cell = Cell(name, 256, 2, 4, True, 0.15, SparseConfig(**SPARSE))
        expected = contestants.expected(made, cell, made.device).device
        entered = contestants.enter(made, cell)
        try:
            held = entered.held(entered.cache(filled=True))["device"]
            token = 2 * 2 * 8 * 64 * 4  # rows, keys and values, kv-heads, dim, bytes
            assert held == expected + token, "a layer lets go of its oldest token with the next"
        finally:
            entered.close()
