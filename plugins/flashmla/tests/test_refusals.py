"""Refusals of the backend where it cannot serve."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.errors import CapabilityError
from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape
from topkv_flashmla import providers
from topkv_flashmla.backend import FlashMLA

MODEL = ModelShape(1, 128, 1, 576, torch.bfloat16, 576**-0.5, "mla", 512)
GROUP = GroupShape(*((0,), 1, 1, 1, 656, torch.uint8, 64, 2, 256, 64, 128, 32), planes=1)


def reasons(model=MODEL, group=GROUP):
    setup = BackendSetup(model, group, torch.device("cpu"), 2, model.group_size)
    with pytest.raises(CapabilityError) as caught:
        FlashMLA(setup)
    return "\n".join(caught.value.reasons)


def test_every_reason_at_once():
    said = reasons(evolve(MODEL, dtype=torch.float16, num_heads=200, value_dim=576))
    for words in ("512 + 64", "at most 128", "bfloat16", "CUDA device"):
        assert words in said


@pytest.mark.skipif(
    providers.BUILDS.first()[0] is not None, reason="a build of FlashMLA is installed"
)
def test_a_missing_library_is_named_with_what_was_tried():
    said = reasons()
    assert "no build of FlashMLA" in said
    assert "pip install" in said
    for module in providers.MODULES:
        assert module in said


def test_a_buffer_beyond_int32_indices_is_refused():
    assert "int32 indices" in reasons(group=evolve(GROUP, max_requests=2**16, buffer_slots=2**15))
    assert "int32 indices" not in reasons()
