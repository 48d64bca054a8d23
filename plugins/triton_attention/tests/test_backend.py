"""What the backend refuses when it is made, and its hooks against the specs."""

from __future__ import annotations

import os
import subprocess
import sys
from inspect import getfullargspec

import pytest
import torch
from attrs import evolve

from topkv.errors import CapabilityError
from topkv.hooks import backend as specs
from topkv.kv.rows import KV_FORMATS
from topkv.types import GroupShape, ModelShape
from topkv_triton_attention import entry
from topkv_triton_attention.backend import MAX_UNIT, TritonAttention

MODEL = ModelShape(1, 8, 2, 64, torch.bfloat16, 0.125)
GROUP = GroupShape((0,), 16, 1, 2, 64, torch.bfloat16, 128, 4, 99, 8, 8, 2)


@pytest.mark.parametrize("hook", ["adapt_page_table", "attend", "prefill", "prefill_selected"])
def test_hooks_have_the_arguments_of_the_specs(hook):
    mine = getattr(TritonAttention, hook)
    assert getfullargspec(mine).args[1:] == getfullargspec(getattr(specs, hook)).args
    assert mine.topkv_impl


def test_the_entry_says_what_the_backend_checks():
    [record] = entry.topkv_register_backends()
    capabilities = record.capabilities
    assert capabilities.attention == ("gqa", "mla")
    assert capabilities.kv_formats == KV_FORMATS
    # These depend on the kind of attention, which an entry cannot say: the backend refuses.
    assert capabilities.head_dims is None
    assert capabilities.max_group is None
    assert capabilities.units == (1, MAX_UNIT)
    module, name = record.factory.split(":")
    assert getattr(sys.modules[module], name) is TritonAttention


@pytest.mark.parametrize(
    ("model", "group", "impl", "batch", "reason"),
    [
        ({}, {}, "cuda", 1, "impl"),
        ({"head_dim": 80}, {}, "reference", 1, "head dim"),
        ({"dtype": torch.float64}, {}, "reference", 1, "dtype"),
        ({"num_heads": 34}, {}, "reference", 1, "query heads per kv-head"),
        ({}, {"unit": 48}, "reference", 1, "unit"),
        ({}, {"unit": 256}, "reference", 1, "unit"),
        ({}, {"max_requests": 2**30}, "reference", 1, "page table"),
        ({}, {}, "reference", 0, "max_batch"),
    ],
)
def test_refuses_with_the_reason(model, group, impl, batch, reason):
    with pytest.raises(CapabilityError, match=reason) as caught:
        TritonAttention(
            evolve(MODEL, **model), evolve(GROUP, **group), impl, torch.device("cpu"), batch
        )
    assert len(caught.value.reasons) == 1


def test_gathers_all_reasons():
    with pytest.raises(CapabilityError) as caught:
        TritonAttention(
            evolve(MODEL, head_dim=80), evolve(GROUP, unit=3), "no", torch.device("cpu"), 0
        )
    assert len(caught.value.reasons) == 4


MAKE = """
import torch
from topkv.types import GroupShape, ModelShape
from topkv_triton_attention.backend import TritonAttention
model = ModelShape(1, 8, 2, 64, torch.bfloat16, 0.125)
group = GroupShape((0,), 16, 1, 2, 64, torch.bfloat16, 128, 4, 99, 8, 8, 2)
TritonAttention(model, group, {impl!r}, torch.device("cpu"), 1)
"""


def make_without_interpreter(impl, after=""):
    return subprocess.run(
        [sys.executable, "-c", MAKE.format(impl=impl) + after],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_kernels_on_a_cpu_need_the_interpreter():
    done = make_without_interpreter("triton")
    assert done.returncode
    assert "CapabilityError" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


def test_the_reference_needs_no_triton():
    done = make_without_interpreter("reference", "import sys; print('triton' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
