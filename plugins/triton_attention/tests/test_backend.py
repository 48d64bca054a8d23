"""Refusals of the backend when it is made, and its hooks against the specs."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from attrs import evolve

from plugins.triton_attention.tests.making import made
from topkv.entries import IMPLS
from topkv.errors import CapabilityError
from topkv.hooks import backend as specs
from topkv.hooks.backend import BackendSetup
from topkv.plugins.contract import check_instance
from topkv.types import GroupShape, ModelShape
from topkv_triton_attention import entry
from topkv_triton_attention.backend import MAX_UNIT, TritonAttention
from topkv_triton_attention.kernel_backend import TritonAttentionKernels

MODEL = ModelShape(1, 8, 2, 64, torch.bfloat16, 0.125)
GROUP = GroupShape((0,), 16, 1, 2, 64, torch.bfloat16, 128, 4, 99, 8, 8, 2)
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")


@pytest.mark.parametrize("impl", IMPLS)
def test_hooks_have_the_arguments_of_the_specs(impl):
    check_instance(made(MODEL, GROUP, impl, DEVICE, 1), specs, "topkv-triton-attention")


def test_the_entry_says_what_the_backend_checks():
    [record] = entry.topkv_register_backends()
    capabilities = record.capabilities
    assert capabilities.attention == ("gqa", "mla")
    assert capabilities.kv_formats == ("model", "fp8")
    # These depend on the kind of attention, which an entry cannot say: the backend refuses.
    assert capabilities.head_dims is None
    assert capabilities.max_group is None
    assert capabilities.units == (1, MAX_UNIT)
    for impl, made_by in (("reference", TritonAttention), ("triton", TritonAttentionKernels)):
        module, name = record.factories[impl].split(":")
        assert getattr(sys.modules[module], name) is made_by


@pytest.mark.parametrize(
    ("model", "group", "batch", "reason"),
    [
        ({"head_dim": 80}, {}, 1, "head dim"),
        ({"dtype": torch.float64}, {}, 1, "dtype"),
        ({"num_heads": 34}, {}, 1, "query heads per kv-head"),
        ({}, {"unit": 48}, 1, "unit"),
        ({}, {"unit": 256}, 1, "unit"),
        ({}, {"max_requests": 2**30}, 1, "page table"),
        ({}, {}, 0, "max_batch"),
    ],
)
@pytest.mark.parametrize("impl", IMPLS)
def test_refuses_with_the_reason(model, group, batch, reason, impl):
    with pytest.raises(CapabilityError, match=reason) as caught:
        made(evolve(MODEL, **model), evolve(GROUP, **group), impl, DEVICE, batch)
    assert len(caught.value.reasons) == 1


@pytest.mark.parametrize("impl", IMPLS)
def test_what_attend_gets_counts_and_not_the_heads_of_the_model(impl):
    setup = BackendSetup(MODEL, GROUP, DEVICE, 1, group_size=17)
    factory = TritonAttention if impl == "reference" else TritonAttentionKernels
    with pytest.raises(CapabilityError, match="query heads per kv-head: expected 1 to 16, got 17"):
        factory(setup)


def test_gathers_all_reasons():
    with pytest.raises(CapabilityError) as caught:
        made(evolve(MODEL, head_dim=80), evolve(GROUP, unit=3), "reference", DEVICE, 0)
    assert len(caught.value.reasons) == 3


MAKE = """
import torch
from topkv.hooks.backend import BackendSetup
from topkv.types import GroupShape, ModelShape
from {module} import {factory}
model = ModelShape(1, 8, 2, 64, torch.bfloat16, 0.125)
group = GroupShape((0,), 16, 1, 2, 64, torch.bfloat16, 128, 4, 99, 8, 8, 2)
{factory}(BackendSetup(model, group, torch.device("cpu"), 1, model.group_size))
"""


def make_without_interpreter(factory, after=""):
    code = MAKE.format(module=factory.__module__, factory=factory.__name__)
    return subprocess.run(
        [sys.executable, "-c", code + after],
        env={**os.environ, "TRITON_INTERPRET": "0"},
        capture_output=True,
        text=True,
        check=False,
    )


def test_kernels_on_a_cpu_need_the_interpreter():
    done = make_without_interpreter(TritonAttentionKernels)
    assert done.returncode
    assert "CapabilityError" in done.stderr
    assert "TRITON_INTERPRET=1" in done.stderr


def test_the_reference_needs_no_triton():
    done = make_without_interpreter(TritonAttention, "import sys; print('triton' in sys.modules)")
    assert done.stdout.strip() == "False", done.stderr
