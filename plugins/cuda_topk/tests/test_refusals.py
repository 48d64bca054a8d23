"""Reasons that the top-k gives where it cannot serve, and its hook against the spec."""

from __future__ import annotations

import sys
from importlib.resources import files
from inspect import getfullargspec
from types import SimpleNamespace

import pytest
import torch

from topkv.errors import CapabilityError
from topkv.hooks.topk import TopK, TopKSetup
from topkv.plugins import registry
from topkv_cuda_topk import compiler, entry
from topkv_cuda_topk.shapes import MAX_COLUMNS
from topkv_cuda_topk.topk import CudaTopK

CPU = torch.device("cpu")


def reasons(rows=2, columns=4096, select=64, device=CPU):
    with pytest.raises(CapabilityError) as caught:
        CudaTopK(TopKSetup(rows, columns, select, device))
    return "\n".join(caught.value.reasons)


@pytest.fixture
def no_library(monkeypatch):
    """No ``cuda.bindings`` can be imported."""
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    compiler.find.cache_clear()
    yield
    compiler.find.cache_clear()


def test_the_hook_has_the_arguments_of_the_spec():
    assert getfullargspec(CudaTopK.topk).args == getfullargspec(TopK.topk).args
    assert CudaTopK.topk.topkv_impl


def test_the_entry_names_what_it_offers():
    (record,) = entry.topkv_register_topks()
    for path in (*record.factories.values(), record.doctor):
        module, name = path.split(":")
        assert callable(getattr(sys.modules[module], name))


@pytest.mark.usefixtures("no_library")
def test_every_reason_at_once():
    said = reasons(columns=MAX_COLUMNS + 1)
    for words in ("at most 294912 scores, got 294913", "CUDA device, got cpu", "pip install cuda"):
        assert words in said


def test_too_many_candidates_are_refused():
    assert "lower budget" in reasons(columns=200_000, select=12_000)
    assert "lower budget" not in reasons(columns=12_000, select=12_000)


@pytest.mark.usefixtures("no_library")
def test_doctor_says_what_is_missing():
    (line,) = compiler.describe()
    assert "cuda.bindings" in line
    assert "pip install cuda-bindings" in line
    with pytest.raises(RuntimeError, match="pip install cuda-bindings"):
        compiler.compile_for(None, "sm_90")


def test_an_old_compiler_is_refused(monkeypatch):
    old = SimpleNamespace(nvrtcVersion=lambda: (0, 12, 4))
    monkeypatch.setattr(compiler, "import_module", lambda name: old)
    found, (reason,) = compiler.find.__wrapped__()
    assert found is None
    assert "NVRTC 12.4: NVRTC must be 12.9 or later" in reason


def test_doctor_knows_the_plugin():
    (record,) = (r for r in registry().records() if (r.kind, r.name) == ("topk", "cuda"))
    assert registry().load(record, record.entry.doctor)() == compiler.describe()


def test_failed_calls_are_errors():
    class Status(int):
        name = "CUDA_ERROR_UNKNOWN"

    assert compiler.taken((Status(0), 7), sys) == 7
    assert compiler.taken((Status(0), 7, 8), sys) == (7, 8)
    with pytest.raises(RuntimeError, match="sys: CUDA_ERROR_UNKNOWN"):
        compiler.taken((Status(999), 7), sys)


def test_the_sources_are_in_the_package():
    names = {path.name for path in files("topkv_cuda_topk").iterdir()}
    assert compiler.SOURCE in names
    for path in files("topkv_cuda_topk").iterdir():
        if path.name.endswith((".cu", ".cuh")):
            lines = path.read_text().splitlines()
            included = {line.split('"')[1] for line in lines if line.startswith("#include")}
            assert included <= names
