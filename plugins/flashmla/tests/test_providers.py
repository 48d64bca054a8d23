"""Choice of a build by what its functions take: signatures alone, nothing is called."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from topkv_flashmla import providers


def hopper(q, indices=None, is_fp8_kvcache=False):
    raise NotImplementedError


def both(q, indices=None, is_fp8_kvcache=None, use_legacy=False):
    raise NotImplementedError


def blackwell(q, indices=None, is_fp8_kvcache=True, enable_batch_invariant=False):
    raise NotImplementedError


def without_indices(q, is_fp8_kvcache=False):
    raise NotImplementedError


def holder(*args, **kwargs):
    raise NotImplementedError


def at_once(cache_seqlens, heads):
    raise NotImplementedError


def build(decode, metadata=holder, **more):
    module = ModuleType("flash_mla")
    module.flash_mla_with_kvcache = decode
    module.get_mla_metadata = metadata
    module.flash_mla_sparse_fwd = lambda q, topk_length=None: None
    for name, value in more.items():
        setattr(module, name, value)
    return module


@pytest.fixture
def find(monkeypatch):
    def find(first, second=None):
        for name, module in zip(providers.MODULES, (first, second), strict=True):
            monkeypatch.setitem(sys.modules, name, module)
        return providers.BUILDS.first()

    return find


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (build(hopper), {}),
        (build(both, has_legacy=lambda: True), {"use_legacy": True}),
        (build(both), {"use_legacy": True}),
    ],
)
def test_builds_with_kernels_for_hopper_are_taken(find, module, options):
    provider, reasons = find(module)
    assert provider.decode is module.flash_mla_with_kvcache
    assert provider.options == options
    assert reasons == []


@pytest.mark.parametrize(
    ("module", "lacking"),
    [
        (build(blackwell), "kernels for Hopper"),
        (build(both, has_legacy=lambda: False), "kernels for Hopper"),
        (build(without_indices), "argument indices of decode"),
        (build(hopper, at_once), "metadata that is filled by the first call"),
        (ModuleType("flash_mla"), "flash_mla_with_kvcache, flash_mla_sparse_fwd"),
    ],
)
def test_others_are_passed_over_by_name(find, module, lacking):
    provider, (reason,) = find(module, build(hopper, __version__="7"))
    assert reason.startswith(f"flash_mla: it has no {lacking}")
    assert provider.name == f"{providers.MODULES[1]} 7"


def test_nothing_installed_says_what_was_tried(find):
    provider, reasons = find(None)
    assert provider is None
    assert [reason.split(":")[0] for reason in reasons] == list(providers.MODULES)
