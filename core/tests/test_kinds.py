"""Kinds of plugins that packages bring, and keepers of pages."""

from __future__ import annotations

import sys
from importlib.metadata import EntryPoint
from types import ModuleType, SimpleNamespace

import pytest
import torch

from topkv import SparseConfig
from topkv.config import lower
from topkv.entries import KINDS, PluginEntry
from topkv.errors import ConfigError, PluginError
from topkv.plugins import PluginRegistry, kinds
from topkv.plugins.discovery import hookimpl, hookspec
from topkv.types import ModelShape


class Sampler:
    """Hook specs of a kind that the core does not know."""

    @hookspec
    def sample(self, rows):
        """Give a token for each row."""


class Greedy:
    def __init__(self, setup):
        self.setup = setup

    @hookimpl
    def sample(self, rows):
        return rows


class Wrong:
    def __init__(self, setup):
        """Has no hook."""


@pytest.fixture
def brought(monkeypatch):
    """Two packages bring the kind ``sampler``, and one an ``algorithm`` of its own."""
    page = ModuleType("sampler_page")
    page.Sampler = Sampler
    monkeypatch.setattr(Sampler, "__module__", page.__name__)
    monkeypatch.setitem(sys.modules, page.__name__, page)

    def point(kind, value, package):
        made = EntryPoint(kind, value, kinds.GROUP)
        vars(made)["dist"] = SimpleNamespace(name=package)
        return made

    points = [
        point("sampler", "elsewhere", "topkv-z"),
        point("sampler", page.__name__, "topkv-a"),
        point("algorithm", "elsewhere", "topkv-a"),
    ]
    monkeypatch.setattr(kinds, "entry_points", lambda group: points)
    kinds.kinds.cache_clear()
    yield
    kinds.kinds.cache_clear()


def registry(*entries):
    hook = hookimpl(lambda: [*entries])
    return PluginRegistry([("topkv-own", "1", SimpleNamespace(topkv_register_samplers=hook))])


def test_a_package_brings_a_kind_with_its_hook_specs(brought):
    assert [*kinds.kinds()] == [*KINDS, "sampler"]
    assert kinds.kinds()["algorithm"] == "topkv.hooks.algorithm", "the core's stay the core's"
    found = registry(
        PluginEntry("greedy", "sampler", f"{__name__}:Greedy"),
        PluginEntry("wrong", "sampler", f"{__name__}:Wrong"),
    )
    assert found.create("sampler", "greedy", 7).setup == 7
    with pytest.raises(PluginError, match="the method sample of sampler_page is missing"):
        found.create("sampler", "wrong", None)


def test_a_kind_that_nobody_brings_is_unknown():
    (record,) = (each for each in registry().records() if each.package == "topkv-own")
    assert "unknown hook 'topkv_register_samplers'" in record.problem


@pytest.mark.parametrize(
    ("pages", "reason"),
    [
        ("cores", "unknown keeper 'cores': installed of kind keeper: none"),
        ("cores", "pages must be 'core', 'engine' or a keeper that can be used, got 'cores'"),
        ({"params": {}}, "pages must be 'core', 'engine', the name of a plugin, or a mapping"),
        (7, "pages must be 'core', 'engine', the name of a plugin, or a mapping with name, got 7"),
        ({"name": "x", "keep": 1}, "pages: unknown key 'keep'; known: name, params"),
        ({"name": "x", "params": 1}, "pages: params must map names of parameters to values"),
    ],
    ids=str,
)
def test_pages_that_cannot_be_are_refused(pages, reason):
    model = ModelShape(2, 4, 2, 64, torch.bfloat16, 0.125)
    config = SparseConfig(pages=pages)
    with pytest.raises(ConfigError) as refused:
        lower(config, model, device=torch.device("cpu"), registry=PluginRegistry([]))
    assert any(each.startswith(reason) for each in refused.value.reasons), refused.value.reasons
