"""The settings that the README gives for a checkpoint, on their way into the pool of keys."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch

from topkv.config import SparseConfig, lower
from topkv.plugins import PluginRegistry
from topkv.types import IndexerShape, ModelShape
from topkv_deepseek_dsa.entry import topkv_register_algorithms
from topkv_testing.doubles import Entries

README = Path(__file__).parent.parent / "README.md"
DEEPSEEK, STOCK = (
    json.loads(text)["topkv"]
    for text in re.findall(r"```json\n(.*?)```", README.read_text("utf-8"), re.DOTALL)
)
V32 = ModelShape(
    num_layers=61,
    num_heads=128,
    num_kv_heads=1,
    head_dim=576,
    dtype=torch.bfloat16,
    scale=192**-0.5,
    attention="mla",
    value_dim=512,
    indexer=IndexerShape(64, 128),
)


def params_of(checkpoint, **own):
    """Parameters of the keys, as a checkpoint recommends them and a user sets ``own``."""
    registry = PluginRegistry([("t", "1", Entries(*topkv_register_algorithms()))])
    config = SparseConfig(
        algorithm="deepseek_dsa", backend="gather", topk="radix", max_tokens=4096, **own
    )
    cpu = torch.device("cpu")
    lowered = lower(config, V32, device=cpu, registry=registry, checkpoint=checkpoint)
    given = lowered.groups[0].params
    return {name: getattr(given, name) for name in ("keys", "hadamard", "scale_format")}


def test_what_a_checkpoint_says_stands_below_what_a_user_sets():
    assert params_of(None) == {"keys": "fp8", "hadamard": False, "scale_format": "fp32"}
    assert params_of(DEEPSEEK) == {"keys": "fp8", "hadamard": True, "scale_format": "ue8m0"}
    assert params_of(STOCK)["keys"] == "bf16"
    assert params_of(DEEPSEEK, params={"hadamard": False}) == {
        "keys": "fp8", "hadamard": False, "scale_format": "ue8m0"
    }  # fmt: skip


def rotated(keys):
    """``H_D k / sqrt(D)`` by the matrix, float64."""
    at = torch.arange(keys.shape[-1])
    common = at[:, None] & at  # entry (i, j) of Sylvester's matrix is -1 to the bits in common
    odd = sum(common >> bit & 1 for bit in range(8)) % 2
    return keys.double() @ (1.0 - 2.0 * odd).double() * keys.shape[-1] ** -0.5


def test_keys_are_stored_as_deepseeks_code_stores_them(world, impl, device, encode):
    w = world(impl, device, dim=128, **params_of(DEEPSEEK))
    w.prefill(0, w.random(200))
    codes, scales = w.stored(0, torch.arange(200))
    wanted, scale = encode(rotated(w.keys[0]).float(), True)
    assert torch.equal(scales.double(), scale)
    assert torch.equal(scale.log2(), scale.log2().round())
    # Sums in fp32 may round to the neighbour where a value is between two codes.
    assert (codes.long() == wanted).double().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_keys_are_stored_as_the_stock_model_makes_them(world, impl, device, dtype):
    w = world(impl, device, dim=128, dtype=dtype, **params_of(STOCK))
    w.prefill(0, w.random(200))
    assert torch.equal(w.decoded(0), w.keys[0].double())
