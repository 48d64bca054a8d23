"""Refusals of the backend where it cannot serve."""

from __future__ import annotations

import pytest
import torch
from attrs import evolve

from topkv.errors import CapabilityError, PluginError
from topkv.hooks.backend import BackendSetup
from topkv.plugins import registry
from topkv.types import GroupShape, ModelShape
from topkv_flash_attention import providers
from topkv_flash_attention.backend import FlashAttention

MODEL = ModelShape(1, 32, 8, 128, torch.bfloat16, 128**-0.5)
GROUP = GroupShape(*((0,), 16, 8, 1, 128, torch.bfloat16, 64, 2, 256, 64, 128, 4))
LATENT = ModelShape(1, 128, 1, 576, torch.bfloat16, 576**-0.5, "mla", 512)
NOTHING = providers.BUILDS.first()[0] is None


def reasons(model=MODEL, group=GROUP):
    setup = BackendSetup(model, group, torch.device("cpu"), 2, model.group_size)
    with pytest.raises(CapabilityError) as caught:
        FlashAttention(setup)
    return "\n".join(caught.value.reasons)


def test_every_reason_at_once():
    model = evolve(MODEL, dtype=torch.float32)
    group = evolve(GROUP, residency="streamed", max_requests=2**16, buffer_slots=2**15)
    said = reasons(model, group)
    for words in ("CUDA device", "float32", "host memory", "int32 ids", "kv_format"):
        assert words in said


def test_packed_rows_are_refused():
    packed = evolve(GROUP, dtype=torch.uint8, head_dim=656, lane_heads=1, planes=1)
    assert "set kv_format to model" in reasons(LATENT, group=packed)
    assert "kv_format" not in reasons()


def test_logits_of_latent_attention_are_not_capped():
    assert "does not cap logits" in reasons(evolve(LATENT, softcap=30.0))
    assert "does not cap logits" not in reasons(evolve(MODEL, softcap=30.0))


@pytest.mark.skipif(not NOTHING, reason="a build of FlashAttention is installed")
def test_a_missing_library_is_named_with_what_was_tried():
    said = reasons()
    assert "no build of FlashAttention" in said
    assert "pip install" in said
    assert providers.LIBRARY in said
    for place in providers.BUILDS.loads:
        assert f"{place}: " in said


def test_the_entry_is_there_all_the_same():
    """Listing plugins needs no library, and other backends are none the worse."""
    record = registry().get("backend", "flash_attention")
    assert record.problem is None
    assert registry().get("backend", "triton_attention").problem is None


def test_there_is_no_reference():
    setup = BackendSetup(MODEL, GROUP, torch.device("cpu"), 2, MODEL.group_size)
    with pytest.raises(PluginError, match="offers triton, got reference"):
        registry().create("backend", "flash_attention", setup, "reference")
