"""Keys of other dtypes than a selector reads are refused by its entry, before it is made."""

from __future__ import annotations

import pytest
import torch

from tests.packaging.packages import ROOT
from topkv.config import SparseConfig, lower
from topkv.errors import ConfigError
from topkv.plugins import registry
from topkv.types import ModelShape
from topkv_authoring.parameters import FLOATS

PLACES = {"streaming_llm", "regranulate", "skip_softmax"}
"""Algorithms and stages that look at positions or scores and read no keys."""

OURS = {folder.name for folder in (ROOT / "plugins").iterdir()} - PLACES
READERS = [
    record.entry
    for record in registry().records()
    if record.kind in ("algorithm", "stage") and record.name in OURS
]


@pytest.mark.parametrize("entry", READERS, ids=lambda entry: entry.name)
def test_every_reader_of_keys_says_of_which(entry):
    assert entry.capabilities.dtypes == FLOATS


def test_other_keys_are_refused_by_name():
    model = ModelShape(4, 4, 2, 64, torch.float64, 0.125)
    config = SparseConfig(algorithm="quest", stages=["residual"], backend="triton_attention")
    with pytest.raises(ConfigError) as refused:
        lower(config, model, device=torch.device("cpu"), registry=registry())
    for name in ("quest", "residual"):
        assert any(name in reason and "float64" in reason for reason in refused.value.reasons)
