"""Lowering: precedence and origins, groups and sizes, and every reason at once."""

from __future__ import annotations

import builtins
import json
from itertools import pairwise

import pytest
import torch
from attrs import evolve, fields
from hypothesis import given
from hypothesis import strategies as st

from topkv import hookimpl
from topkv.config import LoweredConfig, SparseConfig, lower
from topkv.config.checks import byte_size
from topkv.config.layers import parse_ranges, show_ranges
from topkv.config.settings import CHECKS, DEFAULTS, SHARED
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError
from topkv.kv.layout import lay_out
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape

MODEL = ModelShape(8, 8, 2, 64, torch.bfloat16, 0.125)
CPU, CUDA = torch.device("cpu"), torch.device("cuda", 0)
WIDE = Capabilities(units=(1, 128), host_memory=True)


def _entry(name, kind, factories="x:Y", **values):
    return PluginEntry(name, kind, factories, **values)


class Entries:
    """Entries of one package; nothing here imports their factories."""

    def __init__(self, algorithms=(), backends=(), observers=()):
        self.algorithms = [_entry(name, "algorithm", **v) for name, v in algorithms]
        self.backends = [_entry(name, "backend", **v) for name, v in backends]
        self.observers = [_entry(name, "observer", **v) for name, v in observers]

    @hookimpl
    def topkv_register_algorithms(self):
        return self.algorithms

    @hookimpl
    def topkv_register_backends(self):
        return self.backends

    @hookimpl
    def topkv_register_observers(self):
        return self.observers


PAGES = (
    "pages",
    {"defaults": {"dense_layers": (0, 1, 99)}, "parameters": {"sinks": 1, "bits": 8}},
)
TOKENS = ("tokens", {"defaults": {"unit": 1, "scope": "shared"}})
ANY = ("any", {"capabilities": WIDE})


def make(algorithms=(PAGES,), backends=(ANY,), observers=()):
    return PluginRegistry([("topkv-fake", "0.3", Entries(algorithms, backends, observers))])


def low(
    config=None, model=MODEL, device=CPU, registry=None, checkpoint=None, positions=None, **more
):
    config = config or SparseConfig(**more)
    registry = registry or make()
    return lower(
        *(config, model),
        device=device,
        registry=registry,
        checkpoint=checkpoint,
        max_positions=positions,
    )


def refused(*args, **options):
    with pytest.raises(ConfigError) as caught:
        low(*args, **options)
    return list(caught.value.reasons)


def reason(*args, **options):
    (only,) = refused(*args, **options)
    return only


def origin(lowered, name):
    (setting,) = (setting for setting in lowered.settings if setting.name == name)
    return setting.value, setting.origin


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
    assert sparse.params == {"sinks": 1, "bits": 8}
    assert (lowered.backend, lowered.transfer, lowered.eviction) == ("any", "zero_copy", "lru")
    assert (lowered.max_requests, lowered.max_tokens, lowered.page_tokens) == (8, 32768, 64)
    assert lowered.num_pages == 512 + 8 + 1
    assert (lowered.impl, lowered.host_layout) == ("reference", "page_head")
    assert (lowered.host_memory, lowered.device_memory) == (None, None)
    assert (lowered.resident_fast_path, lowered.poison) == (True, False)
    assert lowered.prefill_block_tokens == 8192
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
    assert origin(lowered, "ring_tokens") == (64, "topkv default: two of the largest unit")


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
        {"sinks": 2, "bits": 4},
        {"sinks": 2, "bits": 2},
    ]
    assert origin(lowered, "params.sinks") == (2, "user")
    assert origin(lowered, "params.bits") == (4, "checkpoint")
    assert origin(lowered, "layers[7].params.bits") == (2, "user, layers['7']")


def test_the_scope_follows_what_the_algorithm_can():
    shared = ("pages", {"capabilities": Capabilities(scopes=("shared",))})
    lowered = low(registry=make([shared]))
    assert origin(lowered, "scope") == ("shared", "topkv-fake 0.3")
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
    assert origin(lowered, "observers") == (("other", "counts"), "user")
    assert lowered.observers == ("other", "counts")
    assert lowered.capturable  # they have no part in a decode step
    assert origin(lowered, "poison") == (True, "topkv-fake 0.3")
    advised = low(registry=registry, checkpoint={"observers": ["other"]})
    assert origin(advised, "observers") == (("other",), "checkpoint")


def test_each_observer_must_be_installed_and_usable():
    broken = Entries(observers=[("counts", {"hook_api": (99, 0)})])
    whole = Entries([PAGES], [ANY], [("log", {})])
    found = [("topkv-fake", "0.3", whole), ("topkv-late", "7", broken)]
    told = refused(registry=PluginRegistry(found), observers=["loog", "log", "counts"])
    (unknown, why, unusable) = told
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
    assert low(page_tokens=48).prefill_block_tokens == 8160
    wide = make(backends=[("wide", {})])
    assert low(page_tokens=16384, registry=wide).prefill_block_tokens == 16384


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


# Layers.


def test_overrides_beat_dense_layers_and_later_ones_win():
    lowered = low(
        registry=make([PAGES, TOKENS]),
        dense_layers=[0, 1, 6],
        dense_residency="streamed",
        layers={
            "0": "sparse",
            "2-": "tokens",
            "5": {"algorithm": "pages", "budget": 512},
            7: "resident",
        },
        algorithm="pages",
    )
    found = {
        group.shape.layers: (group.algorithm, group.shape.residency) for group in lowered.groups
    }
    assert found == {
        (0,): ("pages", "sparse"),
        (1,): (None, "streamed"),
        (2, 3, 4, 6): ("tokens", "sparse"),
        (5,): ("pages", "sparse"),
        (7,): (None, "resident"),
    }
    assert [group.shape.unit for group in lowered.groups] == [16, 64, 1, 16, 64]
    assert lowered.groups[2].shape.lane_heads == 1
    assert lowered.groups[3].budget == 512


def test_an_override_of_values_alone_leaves_dense_layers_dense():
    lowered = low(layers={"0-": {"budget": 512}})
    assert [group.shape.residency for group in lowered.groups] == ["resident", "sparse"]
    assert lowered.groups[1].budget == 512


def test_no_algorithm_is_needed_where_overrides_name_all():
    registry = make([PAGES, TOKENS])
    lowered = low(registry=registry, layers={"0-1": "resident", "2-": "pages"})
    assert origin(lowered, "algorithm") == ("pages", "the only one in layers")
    both = low(registry=registry, layers={"0-3": "tokens", "4-": "pages"})
    assert [group.algorithm for group in both.groups] == ["tokens", "pages"]
    dense = low(registry=make([]), dense_layers=range(8))
    assert [group.algorithm for group in dense.groups] == [None]


def test_equal_layers_share_a_group_whatever_made_them_equal():
    lowered = low(layers={"3": {"budget": 2048}, "5": {"params": {"bits": 8}}})
    assert [group.shape.layers for group in lowered.groups] == [(0, 1), (2, 3, 4, 5, 6, 7)]


def covers(layer, ranges, count):
    return any(a <= layer <= (count - 1 if b is None else b) for a, b in ranges)


RANGES = st.lists(
    st.tuples(st.integers(0, 40), st.integers(0, 10) | st.none()).map(
        lambda pair: (pair[0], None if pair[1] is None else pair[0] + pair[1])
    ),
    min_size=1,
    max_size=5,
)


@given(ranges=RANGES, blank=st.sampled_from(["", " "]))
def test_ranges_are_read_back(ranges, blank):
    parts = [f"{a}-" if b is None else f"{a}" if a == b else f"{a}-{b}" for a, b in ranges]
    assert parse_ranges(f"{blank},{blank}".join(parts)) == tuple(ranges)


@given(layers=st.sets(st.integers(0, 60), min_size=1))
def test_shown_ranges_parse_to_the_same_layers(layers):
    ranges = parse_ranges(show_ranges(sorted(layers)))
    assert {layer for layer in range(61) if covers(layer, ranges, 61)} == layers
    # The shortest form: neighbouring ranges do not touch.
    assert all(b + 1 < c for (_, b), (c, _) in pairwise(ranges))


@given(text=st.text(alphabet="0123456789-, ab", max_size=8))
def test_any_text_is_ranges_or_a_reason(text):
    try:
        ranges = parse_ranges(text)
    except ValueError as error:
        told = str(error)
    else:
        assert all(b is None or a <= b for a, b in ranges)
        return
    assert repr(text) in told


@pytest.mark.parametrize("text", ["", "-", "-3", "a", "1--2", "1,", "1.5", "*", True])
def test_what_is_no_range(text):
    with pytest.raises(ValueError, match="must look like"):
        parse_ranges(text)


# Files.


def test_from_yaml_json_and_dict(tmp_path):
    values = {
        "algorithm": "pages",
        "host_memory": "64GiB",
        "dense_layers": [0, 1],
        "layers": {"0-1": "resident", "2-": "pages", "5": {"algorithm": "pages", "budget": 512}},
        "poison": True,
    }
    (tmp_path / "a.json").write_text(json.dumps(values))
    (tmp_path / "a.yaml").write_text(
        "algorithm: pages\nhost_memory: 64GiB\ndense_layers: [0, 1]\npoison: true\n"
        "layers:\n  0-1: resident\n  2-: pages\n  '5': {algorithm: pages, budget: 512}\n"
    )
    expected = SparseConfig(**values)
    assert SparseConfig.from_dict(values) == expected
    assert SparseConfig.from_file(tmp_path / "a.json") == expected
    assert SparseConfig.load(str(tmp_path / "a.yaml")) == expected
    assert SparseConfig.load(expected) is expected
    assert SparseConfig.load(values).as_dict() == values
    (tmp_path / "empty.yml").write_text("")
    assert SparseConfig.load(tmp_path / "empty.yml") == SparseConfig()
    assert low(expected).host_memory == 64 * 2**30


@pytest.mark.parametrize(
    ("name", "text", "expected"),
    [
        ("a.toml", "", r"must end in \.yaml, \.yml or \.json, got '\.toml'"),
        ("a.json", "{", "it cannot be read: Expecting"),
        ("a.yaml", "a: [", "it cannot be read: while parsing"),
        ("a.yaml", "[1]", "it must be a mapping, got list"),
        (
            "a.json",
            '{"bugdet": 1, "unit": 0}',
            "(?s)did you mean 'budget'.*unit must be a positive",
        ),
    ],
)
def test_a_wrong_file_is_refused_by_name(tmp_path, name, text, expected):
    (tmp_path / name).write_text(text)
    with pytest.raises(ConfigError, match=expected) as caught:
        SparseConfig.load(tmp_path / name)
    assert name in str(caught.value)


def test_what_is_no_configuration(tmp_path, monkeypatch):
    with pytest.raises(ConfigError, match="No such file"):
        SparseConfig.load(tmp_path / "absent.json")
    with pytest.raises(ConfigError, match="got int"):
        SparseConfig.load(3)
    (tmp_path / "a.yaml").write_text("unit: 1")
    real = builtins.__import__

    def refuse(name, *args, **kwargs):
        if name == "yaml":
            raise ImportError("no yaml")
        return real(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ConfigError, match=r"pip install 'topkv\[cli\]'"):
        SparseConfig.load(tmp_path / "a.yaml")


@pytest.mark.parametrize("name", [name for name, value in DEFAULTS.items() if value is not None])
def test_a_default_passes_the_check_of_its_setting(name):
    """And is in lowered form: defaults are not checked again."""
    assert CHECKS[name](DEFAULTS[name]) == DEFAULTS[name]


def test_what_holds_for_all_layers_is_lowered_under_its_name():
    values = {"page_tokens": 128, "host_memory": "1TiB", "dense_layers": [1, 0], "poison": True}
    lowered = low(**values)
    assert (lowered.page_tokens, lowered.host_memory) == (128, 2**40)
    assert (lowered.dense_layers, lowered.poison) == ((0, 1), True)
    shown = {setting.name: setting.value for setting in lowered.settings}
    assert {name: getattr(lowered, name) for name in SHARED} == {n: shown[n] for n in SHARED}


# Refusals.

COUNTS = (
    *("unit", "budget", "buffer", "ring_tokens", "page_tokens", "max_requests", "max_tokens"),
    *("max_request_tokens", "prefill_block_tokens"),
)


@pytest.mark.parametrize("value", [0, -1, 1.0, "16", True])
@pytest.mark.parametrize("name", COUNTS)
def test_counts_must_be_positive_ints(name, value):
    assert reason(**{name: value}) == f"{name} must be a positive int, got {value!r}"


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"impl": "cuda"}, "impl must be one of 'reference', 'triton', got 'cuda'"),
        ({"scope": "head"}, "scope must be one of 'kv_head', 'shared', got 'head'"),
        ({"host_layout": "head"}, "host_layout must be one of 'page_head', 'page_first'"),
        ({"dense_residency": "sparse"}, "dense_residency must be one of 'resident', 'streamed'"),
        ({"poison": 1}, "poison must be true or false, got 1"),
        ({"resident_fast_path": "yes"}, "resident_fast_path must be true or false"),
        ({"algorithm": 3}, "algorithm must be the name of a plugin, got 3"),
        (
            {"observers": "log"},
            "observers must be a list of names of plugins, each once, got 'log'",
        ),
        ({"observers": ["log", "log"]}, "observers must be a list of names of plugins, each once"),
        ({"observers": ["log", ""]}, "observers must be a list of names of plugins, each once"),
        ({"observers": [["log"]]}, "observers must be a list of names of plugins, each once"),
        ({"observers": {"log": 1}}, "observers must be a list of names of plugins, each once"),
        ({"host_memory": "lots"}, "host_memory must be a positive number of bytes or a size"),
        ({"device_memory": 0}, "device_memory must be a positive number of bytes or a size"),
        ({"dense_layers": 3}, "dense_layers must be a list of layer numbers from 0, got 3"),
        ({"dense_layers": [-1]}, "dense_layers must be a list of layer numbers from 0"),
        ({"dense_layers": [7, 8]}, "dense_layers names [8], and the model has 8 layers, 0 to 7"),
        ({"params": ["sinks"]}, "params must map names of parameters to values"),
        ({"params": {"sink": 1}}, "unknown parameter 'sink' of topkv-fake 0.3 ('pages'); did you"),
        ({"layers": "resident"}, "layers must map layers such as '0-1' to what they do"),
        ({"layers": {"x": "sparse"}}, "layers key 'x' must look like"),
        ({"layers": {"3-2": "sparse"}}, "layers key '3-2' runs backwards; write '2-3'"),
        ({"layers": {"8": "sparse"}}, "layers['8'] names layer 8, and the model has 8 layers"),
        ({"layers": {"0-9": "sparse"}}, "layers['0-9'] names layer 9"),
        ({"layers": {"9-": "sparse"}}, "layers['9-'] names layer 9"),
        ({"layers": {"1": 5}}, "layers['1'] must be 'sparse', 'resident', 'streamed', an algor"),
        ({"layers": {"1": {"uint": 5}}}, "layers['1'] unknown key 'uint'; did you mean 'unit'?"),
        ({"layers": {"1": {"unit": 0}}}, "layers['1'] unit must be a positive int, got 0"),
        (
            {"layers": {"1": {"residency": "resident", "unit": 8}}},
            "layers['1'] is resident, so it takes no unit",
        ),
        (
            {"layers": {"2": "page"}},
            "unknown algorithm 'page': installed of kind algorithm: pages",
        ),
        ({"algorithm": "page"}, "unknown algorithm 'page': installed of kind algorithm: pages"),
        ({"backend": "an"}, "unknown backend 'an': installed of kind backend: any"),
        ({"transfer": "dma"}, "unknown transfer 'dma': installed of kind transfer: zero_copy"),
        ({"eviction": "fifo"}, "unknown eviction 'fifo': installed of kind eviction: lru"),
        (
            {"unit": 24, "page_tokens": 48, "ring_tokens": 48},
            "unit must be a power of two, got 24",
        ),
        ({"unit": 32, "page_tokens": 48}, "unit must divide page_tokens, got unit 32 and page"),
        ({"budget": 31}, "budget must be at least two units (32 tokens"),
        ({"ring_tokens": 16}, "ring_tokens must be a multiple of the unit and at least two units"),
        ({"ring_tokens": 40}, "ring_tokens must be a multiple of the unit and at least two units"),
        ({"buffer": 2031}, "buffer must hold the selection: 127 units of 16 tokens, got 2031"),
        ({"prefill_block_tokens": 96}, "prefill_block_tokens must be a multiple of page_tokens"),
        ({"max_tokens": 64, "max_request_tokens": 65}, "max_request_tokens must be at most max_t"),
        ({"host_memory": "1MiB"}, "and host_memory allows 1048576 (0.000977 GiB); raise host_m"),
        ({"max_requests": 2**26, "budget": 2048}, "device slots must be fewer than 2**31"),
        (
            {"max_tokens": 2**31 - 1, "max_request_tokens": 512, "unit": 1},
            "host units must be fewer than 2**31",
        ),
    ],
)
def test_each_refusal(values, expected):
    assert expected in reason(**values)


def test_the_smallest_of_everything_is_accepted():
    lowered = low(
        budget=32, buffer=16, ring_tokens=32, page_tokens=16, max_requests=1, max_tokens=1
    )
    shape = lowered.groups[1].shape
    assert (shape.select, shape.buffer_slots, shape.ring_slots, shape.max_units) == (1, 1, 2, 1)
    assert lowered.num_pages == 3


def test_host_memory_of_exactly_the_pool_is_enough():
    size = origin(low(), "host_pool_bytes")[0]
    shapes = [group.shape for group in low().groups if group.shape.residency != "resident"]
    assert size == lay_out(shapes, "page_head", low().num_pages)[1]
    assert low(host_memory=size).host_memory == size
    told = reason(host_memory=size - 1)
    assert f"the host pool needs {size} bytes" in told
    # The mend that the error names is one.
    tokens = int(told.rsplit(" ", 1)[1])
    assert low(host_memory=size - 1, max_tokens=tokens).max_tokens == tokens


def test_triton_on_a_cpu_needs_the_interpreter(monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    assert "TRITON_INTERPRET=1" in reason(impl="triton")
    assert low(impl="triton", device=CUDA).impl == "triton"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert low(impl="triton").impl == "triton"


def test_several_plugins_and_none():
    both = make([PAGES, TOKENS], [ANY, ("other", {})])
    assert refused(registry=both) == [
        "algorithm is not set and several are installed: pages, tokens",
        "backend is not set and several are installed: any, other",
    ]
    broken = [("topkv-fake", "1", Entries([PAGES])), ("topkv-broken", "2", object())]
    told = reason(registry=PluginRegistry(broken))
    assert told.startswith("backend is not set and none is installed that can be used; the doc")
    assert "did not load: topkv-broken 2: it implements none" in told
    overrides = {"0-3": "tokens", "4-": "pages"}
    assert "params are set and no single algorithm is" in reason(
        registry=make([PAGES, TOKENS]), layers=overrides, params={"sinks": 1}
    )


def _caps(**values):
    return {"capabilities": Capabilities(**values)}


NARROW = {
    "units": (_caps(units=(1, 8)), "takes units of 1 to 8 tokens, got 16: change unit"),
    "scope": (_caps(scopes=("shared",)), "takes scope shared, got kv_head"),
    "attention": (_caps(attention=("mla",)), "takes attention mla, got gqa"),
    "impl": ({"factories": {"triton": "x:Y"}}, "takes impl triton, got reference"),
    "dtype": (_caps(dtypes=("float16",)), "takes dtype float16, got bfloat16"),
    "head_dim": (_caps(head_dims=(96, 128)), "takes head_dim 96, 128, got 64"),
    "group": (_caps(max_group=2), "takes at most 2 query heads for each kv-head, got 4"),
}


@pytest.mark.parametrize("kind", ["algorithm", "backend"])
@pytest.mark.parametrize("name", NARROW)
def test_negotiation_names_whose_it_is(kind, name):
    values, expected = NARROW[name]
    entry = ("narrow", values)
    registry = make([entry]) if kind == "algorithm" else make([("wide", {})], [entry])
    told = reason(registry=registry, scope="kv_head")
    assert told == f"topkv-fake 0.3 ({kind} 'narrow') {expected} (layers 0-7, sparse)"


def test_negotiation_of_dense_layers():
    def registry(**caps):
        return make([PAGES], [("b", {"capabilities": Capabilities(**caps)})])

    told = reason(registry=registry(units=(1, 32)), dense_layers=[3])
    assert "takes units of 1 to 32 tokens, got 64: change page_tokens (layers 3, resident)" in told
    streamed = {"dense_layers": [3], "dense_residency": "streamed"}
    assert low(registry=registry(), **streamed).groups[1].shape.residency == "streamed"
    told = reason(registry=registry(), device=CUDA, **streamed)
    assert "cannot read mapped host memory" in told
    assert low(registry=registry(host_memory=True), device=CUDA, **streamed)
    assert "log-sum-exp" in reason(registry=registry(lse=False), dense_layers=[])


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"num_heads": 9}, "num_heads must be a multiple of num_kv_heads, got 9 and 2"),
        ({"num_layers": 0}, "num_layers must be a positive int, got 0"),
        ({"head_dim": 2.0}, "head_dim must be a positive int, got 2.0"),
    ],
)
def test_a_model_that_makes_no_sense(changes, expected):
    assert expected in reason(model=evolve(MODEL, **changes))


def test_entries_are_multiples_of_16_bytes():
    small = evolve(MODEL, head_dim=2)
    told = reason(
        model=small, unit=1, layers={"0-": "sparse"}, registry=make([TOKENS]), scope="kv_head"
    )
    assert "an entry must be a multiple of 16 bytes, got 8" in told
    assert low(model=small, unit=2, layers={"0-": "sparse"})


def test_the_checkpoint_and_plugins_are_checked_too():
    assert reason(checkpoint={"budgets": 3}).startswith("checkpoint: unknown key 'budgets'; did")
    told = reason(registry=make([("pages", {"defaults": {"unit": 0, "dense_layers": ()}})]))
    assert told == (
        "defaults of topkv-fake 0.3 (algorithm 'pages'): unit must be a positive int, got 0"
    )


def test_all_reasons_come_at_once():
    told = refused(
        algorithm="pags",
        backend="an",
        scope="x",
        budget=0,
        unit=24,
        ring_tokens=5,
        host_memory="1MiB",
        dense_layers=[9],
        layers={"3-2": "pages", "8": "pages", "2": {"unti": 1}},
        checkpoint={"impls": 1},
    )
    starts = (
        *("scope must", "budget must be a positive", "layers key '3-2'", "layers['2'] unknown"),
        *("checkpoint: unknown key 'impls'", "layers['8'] names", "unknown algorithm 'pags'"),
        *("unknown backend 'an'", "dense_layers names [9]", "unit must be a power of two"),
        *("ring_tokens must be", "the host pool needs"),
    )
    assert len(told) == len(set(told))
    for start in starts:
        assert any(text.startswith(start) for text in told), start
    assert {text for text in told if not text.startswith(starts)} <= {"unknown algorithm 'pages'"}
