"""Lowering: precedence and origins, observers and sizes."""

from __future__ import annotations

import pytest
import torch
from attrs import fields
from config_cases import (
    ANY,
    CPU,
    CUDA,
    PAGES,
    TOKENS,
    Entries,
    PagesParams,
    low,
    make,
    origin,
    refused,
)

from topkv.checks import byte_size
from topkv.config import LoweredConfig, SparseConfig
from topkv.config.settings import CHECKS, DEFAULTS, SHARED
from topkv.config.stages import Named
from topkv.entries import Capabilities, NoParameters
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape

# Defaults, precedence, origins.


def test_defaults():
    lowered = low()
    assert isinstance(lowered, LoweredConfig)
    dense, sparse = lowered.groups
    assert (dense.algorithm, dense.budget, dense.shape.residency) == (None, 0, "resident")
    assert dense.shape.layers == (0, 1)
    assert (dense.shape.unit, dense.shape.lane_heads, dense.shape.heads_per_lane) == (64, 1, 2)
    assert (dense.shape.select, dense.shape.buffer_slots, dense.shape.ring_slots) == (0, 0, 0)
    assert (dense.shape.max_units, sparse.shape.max_units) == (512, 2048)
    assert (sparse.algorithm, sparse.budget, sparse.shape.layers) == (
        "pages",
        2048,
        (2, 3, 4, 5, 6, 7),
    )
    assert (sparse.shape.unit, sparse.shape.lane_heads, sparse.shape.heads_per_lane) == (16, 2, 1)
    assert (sparse.shape.select, sparse.shape.buffer_slots, sparse.shape.ring_slots) == (
        127,
        256,
        2,
    )
    assert sparse.params == PagesParams(sinks=1, bits=8)
    assert (lowered.backend, lowered.transfer, lowered.eviction) == ("any", "zero_copy", "lru")
    assert (lowered.max_requests, lowered.max_tokens, lowered.page_tokens) == (8, 32768, 64)
    assert lowered.num_pages == 512 + 8 + 1
    assert lowered.impl == "reference"
    assert (lowered.host_memory, lowered.device_memory) == (None, None)
    assert (lowered.resident_fast_path, lowered.poison) == (True, False)
    assert lowered.prefill_block_tokens == 32768
    assert low(device=CUDA).impl == "triton"
    assert low(device="cpu").device == CPU


def test_a_user_who_names_dense_layers_beats_the_overrides_of_a_checkpoint():
    advice = {"layers": {"0-": "resident"}}
    assert [group.shape.residency for group in low(checkpoint=advice).groups] == ["resident"]
    lowered = low(checkpoint=advice, dense_layers=[1])
    residency = {group.shape.residency: group.shape.layers for group in lowered.groups}
    assert residency["resident"] == (1,)
    assert 0 in residency["sparse"]


def test_precedence_and_origins():
    registry = make([("pages", {"defaults": {"unit": 32, "budget": 512, "page_tokens": 128}})])
    lowered = low(
        registry=registry,
        checkpoint={"budget": 1024, "max_requests": 4},
        positions=4096,
        max_requests=2,
    )
    assert origin(lowered, "max_requests") == (2, "user")
    assert origin(lowered, "budget") == (1024, "checkpoint")
    assert origin(lowered, "unit") == (32, "topkv-fake 0.3")
    assert origin(lowered, "page_tokens") == (128, "topkv-fake 0.3")
    assert origin(lowered, "buffer") == (2048, "topkv default: 2 x budget")
    assert origin(lowered, "scope") == ("kv_head", "topkv default")
    assert origin(lowered, "algorithm") == ("pages", "only one installed")
    assert origin(lowered, "max_tokens") == (4096, "positions of the model")
    assert origin(lowered, "impl") == ("reference", "topkv default on cpu")
    why = "topkv default: the open unit and the tokens of a step"
    assert origin(lowered, "ring_tokens") == (64, why)


def test_every_setting_has_an_origin_and_is_shown():
    lowered = low(layers={"5": {"budget": 512}, "6-": "streamed"})
    names = {setting.name for setting in lowered.settings}
    assert {field.name for field in fields(SparseConfig)} - names == {"layers", "params"}
    assert {"params.sinks", "params.bits", "num_pages", "host_pool_bytes"} <= names
    assert origin(lowered, "layers[5].budget") == (512, "user, layers['5']")
    assert all(setting.origin for setting in lowered.settings)
    shown = lowered.describe()
    for text in ("origin", "only one installed", "2-4", "streamed", "layers[5].budget"):
        assert text in shown
    assert not any(line.endswith(" ") for line in shown.splitlines())


def test_params_are_merged_by_name():
    lowered = low(
        checkpoint={"params": {"bits": 4, "sinks": 3}},
        params={"sinks": 2},
        layers={"7": {"params": {"bits": 2}}},
    )
    assert [group.params for group in lowered.groups[1:]] == [
        PagesParams(sinks=2, bits=4),
        PagesParams(sinks=2, bits=2),
    ]
    assert origin(lowered, "params.sinks") == (2, "user")
    assert origin(lowered, "params.bits") == (4, "checkpoint")
    assert origin(lowered, "layers[7].params.bits") == (2, "user, layers['7']")


def test_the_scope_follows_what_the_algorithm_can():
    shared = ("pages", {"capabilities": Capabilities(scopes=("shared",))})
    lowered = low(registry=make([shared]))
    assert origin(lowered, "scope") == ("shared", "topkv-fake 0.3")
    assert [group.scope for group in lowered.groups] == ["shared"]
    assert (lowered.groups[0].shape.lane_heads, lowered.groups[0].shape.heads_per_lane) == (1, 2)


def test_a_plugin_may_choose_the_backend_and_a_user_another():
    backends = [ANY, ("other", {})]
    registry = make([("pages", {"defaults": {"backend": "other"}})], backends)
    assert origin(low(registry=registry), "backend") == ("other", "topkv-fake 0.3")
    assert low(registry=registry, backend="any").backend == "any"


# Observers.


def test_observers_are_those_that_are_asked_for():
    registry = make(observers=[("counts", {"defaults": {"poison": True}}), ("other", {})])
    assert origin(low(registry=registry), "observers") == ((), "topkv default")
    assert low(registry=registry).observers == ()
    lowered = low(registry=registry, observers=["other", "counts"])
    named = tuple(Named(name, NoParameters()) for name in ("other", "counts"))
    assert origin(lowered, "observers") == (named, "user")
    assert lowered.observers == named
    assert lowered.capturable  # they have no part in a decode step
    assert origin(lowered, "poison") == (True, "topkv-fake 0.3")
    advised = low(registry=registry, checkpoint={"observers": ["other"]})
    assert origin(advised, "observers") == (named[:1], "checkpoint")


def test_each_observer_must_be_installed_and_usable():
    broken = Entries(observers=[("counts", {"hook_api": (99, 0)})])
    whole = Entries([PAGES], [ANY], [("log", {})])
    found = [("topkv-fake", "0.3", whole), ("topkv-late", "7", broken)]
    reported = refused(registry=PluginRegistry(found), observers=["loog", "log", "counts"])
    (unknown, why, unusable) = reported
    assert unknown.startswith("unknown observer 'loog': installed of kind observer: log; did you")
    assert why.startswith("unknown observer 'loog': did not load: topkv-late 7")
    assert unusable.startswith("observer 'counts' is installed and cannot be used: topkv-late 7")
    assert "hook API 99.0" in unusable


# Sizes.


def test_a_selection_never_exceeds_what_a_request_can_reach():
    lowered = low(max_request_tokens=500, max_tokens=4000)
    assert lowered.max_request_tokens == 512
    assert lowered.groups[1].shape.select == 32
    assert lowered.num_pages == 63 + 8 + 1


def test_max_tokens_covers_one_request_that_the_user_asks_for():
    assert low(max_request_tokens=100_000).max_tokens == 100_000
    assert low(positions=131_072).max_request_tokens == 131_072


def test_the_ring_is_a_multiple_of_every_unit():
    lowered = low(
        registry=make([PAGES, TOKENS]),
        algorithm="pages",
        unit=64,
        layers={"4": {"algorithm": "tokens", "unit": 1}},
    )
    assert [group.shape.ring_slots for group in lowered.groups] == [0, 2, 128]


def test_a_prefill_block_is_a_whole_number_of_pages():
    assert low(page_tokens=48).prefill_block_tokens == 32736
    wide = make(backends=[("wide", {})])
    assert low(page_tokens=65536, registry=wide).prefill_block_tokens == 65536


def test_a_prefill_block_has_four_times_the_rows_where_attention_is_latent():
    model = ModelShape(2, 8, 1, 576, torch.bfloat16, 0.1, "mla", 512)
    latent = {"capabilities": Capabilities(attention=("mla",), units=(1, 128))}
    made = {"model": model, "registry": make([("pages", latent)], [("any", latent)])}
    assert low(**made).prefill_block_tokens == 131072
    assert low(page_tokens=48, **made).prefill_block_tokens == 131040
    assert low(prefill_block_tokens=64, **made).prefill_block_tokens == 64


@pytest.mark.parametrize(
    ("text", "size"),
    [("64GiB", 64 * 2**30), ("1.5 KiB", 1536), ("2gb", 2 * 10**9), ("7B", 7), ("9", 9), (5, 5)],
)
def test_sizes_in_bytes(text, size):
    assert byte_size(text) == size


@pytest.mark.parametrize("text", ["", "GiB", "-1", "0", 0, -3, 1.5, True, None, "1 EiB", "one"])
def test_what_is_no_size(text):
    with pytest.raises(ValueError, match="must be"):
        byte_size(text)


@pytest.mark.parametrize("name", [name for name, value in DEFAULTS.items() if value is not None])
def test_a_default_passes_the_check_of_its_setting(name):
    """A default is in lowered form too: defaults are not checked again."""
    assert CHECKS[name](DEFAULTS[name]) == DEFAULTS[name]


def test_what_holds_for_all_layers_is_lowered_under_its_name():
    values = {"page_tokens": 128, "host_memory": "1TiB", "dense_layers": [1, 0], "poison": True}
    lowered = low(**values)
    assert (lowered.page_tokens, lowered.host_memory) == (128, 2**40)
    assert (lowered.dense_layers, lowered.poison) == ((0, 1), True)
    shown = {setting.name: setting.value for setting in lowered.settings}
    assert {name: getattr(lowered, name) for name in SHARED} == {n: shown[n] for n in SHARED}
