"""The format as configurations name it: what it takes, what it refuses, and its two packers."""

from __future__ import annotations

import os

import pytest
import torch
from attrs import evolve

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from topkv.errors import ConfigError
from topkv.hooks.kv_format import KVFormatSetup
from topkv.plugins import registry
from topkv.types import ModelShape

LATENT = ModelShape(2, 16, 1, 576, torch.bfloat16, 192**-0.5, "mla", 512)


def make(model, impl="reference"):
    return registry().create("kv_format", "fp8", KVFormatSetup(model), impl)


def test_both_implementations_pack_the_same_bytes():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(5, 1, 576, generator=generator).bfloat16()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    plain, kernels = make(LATENT), make(LATENT, "triton")
    (packed, same), room = plain.pack(rows, rows), torch.full((5, 1, 656), 7, dtype=torch.uint8)
    assert packed is same
    written, _ = kernels.pack(rows.to(device), rows.to(device), [room.to(device)])
    assert torch.equal(written.cpu(), packed)
    assert (plain.row().dim, plain.row().dtype, plain.row().planes) == (656, torch.uint8, 1)
    keys, values = plain.unpack(packed, packed, torch.bfloat16)
    assert (keys.shape, values.shape) == ((5, 1, 576), (5, 1, 512))
    assert torch.equal(keys[..., 512:], rows[..., 512:])


@pytest.mark.parametrize(
    "change", [{"head_dim": 320}, {"value_dim": 256}, {"attention": "gqa", "value_dim": None}]
)
def test_other_rows_are_refused(change):
    with pytest.raises(ConfigError, match=r"512 \+ 64 elements.*set kv_format to 'model'"):
        make(evolve(LATENT, **change))
