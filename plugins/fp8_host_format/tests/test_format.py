"""The host format in a configuration: bytes of its entries, groups that have it, refusals."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.errors import ConfigError
from topkv.kv.host_format import Plain
from topkv.types import ModelShape
from topkv_fp8_host_format.format import Fp8
from topkv_testing.machines.lifecycle_model import doubles
from topkv_testing.models.host_formats import coding
from topkv_testing.transfer.bench import group_shape

MODEL = ModelShape(8, 8, 2, 64, torch.bfloat16, 0.125)


def test_entries_and_their_bytes():
    """An entry is codes, then words of 8 bytes, then exponents, then padding to 16 bytes."""
    shape = {"unit": 16, "lane_heads": 8, "dim": 128, "dtype": torch.bfloat16}
    group = group_shape(host_format="fp8", **shape)
    assert (group.entry_bytes, group.host_entry_bytes) == (8192, 4384)
    assert group_shape(**shape).host_entry_bytes == 8192
    odd = group_shape(host_format="fp8", unit=2, heads_per_lane=2, dim=4)
    assert odd.host_entry_bytes == 112  # 8 rows of 4 + 8 + 1
    entry = torch.arange(112, dtype=torch.uint8)
    codes, words, exponents = coding(odd).parts(entry)
    assert codes.flatten().tolist() == list(range(32))
    assert codes.shape == odd.entry_shape
    assert words.flatten().tolist() == list(range(32, 96))
    assert exponents.flatten().tolist() == list(range(96, 104))
    filled = group_shape(host_format="fp8", unit=3, dim=2, dtype=torch.float32)
    assert filled.host_entry_bytes == 80  # 6 rows of 2, 4 bytes, 6 of 8 + 1, 10 bytes
    _, words, exponents = coding(filled).parts(torch.arange(80))
    assert (words.flatten()[0], exponents.flatten()[0]) == (16, 64)


def config_of(model=MODEL, **settings):
    options = {"algorithm": "scripted", "backend": "gather", "max_tokens": 256, **settings}
    registry = doubles()
    config = SparseConfig(**options)
    return lower(config, model, device=torch.device("cpu"), registry=registry), registry


def test_sparse_groups_alone_are_coded():
    layers = {"0": "resident", "1": "streamed"}
    config, registry = config_of(host_format="fp8", unit=16, layers=layers)
    coded = {group.shape.residency: group.shape.coded_bytes for group in config.groups}
    assert coded == {"resident": 0, "streamed": 0, "sparse": 2336}  # 32 rows of 64 + 8 + 1
    assert [type(group.host) for group in config.groups] == [Plain, Plain, Fp8]
    plain, _ = config_of(unit=16, layers=layers)
    required = SparseCoordinator.required_bytes(config, registry)
    beside = SparseCoordinator.required_bytes(plain, registry)
    assert (required.buffer, required.resident) == (beside.buffer, beside.resident)
    (sparse,) = (group.shape for group in config.groups if group.shape.residency == "sparse")
    entries = len(sparse.layers) * sparse.lane_heads * sparse.units_per_page * config.num_pages
    saved = entries * (sparse.entry_bytes - sparse.host_entry_bytes)
    assert beside.host - required.host == saved > 0


def refusal_of(model=MODEL, **settings):
    with pytest.raises(ConfigError) as caught:
        config_of(model, host_format="fp8", **settings)
    return str(caught.value)


def test_what_is_refused():
    latent = evolve(MODEL, num_kv_heads=1, attention="mla", value_dim=4)
    assert "(host_format 'fp8') takes attention gqa, got mla" in refusal_of(latent)
    double = refusal_of(evolve(MODEL, dtype=torch.float64))
    assert "takes dtype float16, bfloat16, float32, got float64" in double
    wide = refusal_of(evolve(MODEL, head_dim=520))
    assert "takes keys and values of at most 512 elements, got 520; set host_format to" in wide
    config_of(evolve(MODEL, head_dim=512), host_format="fp8")
