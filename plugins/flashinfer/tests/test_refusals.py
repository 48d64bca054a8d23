"""Refusals of the backend where it cannot serve, and its hooks against the specs."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest
import torch
from attrs import evolve

from topkv.errors import CapabilityError
from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape
from topkv_flashinfer import entry, providers
from topkv_flashinfer.backend import FlashInfer

MODEL = ModelShape(1, 8, 2, 128, torch.bfloat16, 128**-0.5)
GROUP = GroupShape((0,), 16, 1, 2, 128, torch.bfloat16, 128, 4, 99, 8, 8, 2)
LATENT = ModelShape(1, 128, 1, 576, torch.bfloat16, 576**-0.5, "mla", 512)
ROWS = GroupShape(*((0,), 1, 1, 1, 576, torch.bfloat16, 64, 2, 256, 64, 128, 32), planes=1)


def reasons(model=MODEL, group=GROUP, batch=2):
    setup = BackendSetup(model, group, torch.device("cpu"), batch, model.group_size)
    with pytest.raises(CapabilityError) as caught:
        FlashInfer(setup)
    return "\n".join(caught.value.reasons)


def test_the_entry_names_what_it_offers():
    (record,) = entry.topkv_register_backends()
    assert record.impls == ("triton",)
    module, name = record.factories["triton"].split(":")
    assert getattr(sys.modules[module], name) is FlashInfer


def test_every_reason_at_once():
    said = reasons(
        evolve(MODEL, head_dim=80, dtype=torch.float32),
        evolve(GROUP, max_requests=2**28, select=2**27),
        0,
    )
    for words in ("head dim", "float16 or bfloat16", "CUDA device", "max_batch"):
        assert words in said
    assert "int32 ids" in said


def test_positions_beyond_32_bits_are_refused():
    assert "32-bit positions" in reasons(group=evolve(GROUP, select=2**27 - 1))
    assert "32-bit positions" not in reasons()
    # Dense layers list all of their pages.
    dense = evolve(GROUP, residency="resident", max_units=2**27, select=0)
    assert "32-bit positions" in reasons(group=dense)


def test_latent_rows_of_other_kinds_are_refused():
    said = reasons(
        evolve(LATENT, value_dim=576), evolve(ROWS, lane_heads=2, dtype=torch.uint8), batch=1
    )
    for words in ("512 + 64", "kv_format", "2 lanes"):
        assert words in said
    assert "512 + 64" not in reasons(LATENT, ROWS)


@pytest.mark.skipif(
    providers.PARTS["gqa"].first()[0] is not None, reason="FlashInfer is installed"
)
@pytest.mark.parametrize(("model", "group"), [(MODEL, GROUP), (LATENT, ROWS)])
def test_a_missing_library_is_named_with_what_was_tried(model, group):
    said = reasons(model, group)
    assert "pip install flashinfer-python" in said
    assert "flashinfer: ModuleNotFoundError" in said or "flashinfer.mla: Module" in said


def test_logits_of_latent_attention_are_not_capped():
    assert "does not cap logits" in reasons(evolve(LATENT, softcap=30.0), ROWS)
    assert "does not cap logits" not in reasons(evolve(MODEL, softcap=30.0))


class Old:
    """A wrapper of before ``workspace_size``, whose ``run`` takes no ``lse``."""

    def run(self, q, out, enable_pdl):
        raise NotImplementedError

    def reset_workspace_buffer(self):
        raise NotImplementedError


def test_an_older_library_is_refused_by_what_it_lacks(monkeypatch):
    module = ModuleType("flashinfer")
    module.__version__ = "0.1"
    module.BatchDecodeWithPagedKVCacheWrapper = Old
    monkeypatch.setitem(sys.modules, "flashinfer", module)
    library, lacking = providers.PARTS["gqa"].first()
    assert library is None
    assert lacking == [
        "flashinfer: BatchDecodeWithPagedKVCacheWrapper.run takes no 'lse'",
        "flashinfer: it has no BatchDecodeWithPagedKVCacheWrapper.workspace_size",
        "flashinfer: it has no single_prefill_with_kv_cache",
    ]
    assert all(reason in reasons() for reason in lacking)
    described = providers.describe()
    assert [line.split(":")[0] for line in described] == ["gqa", "mla"]
    assert lacking[0] in described[0]
