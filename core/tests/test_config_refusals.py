"""Values, plugins, models and sizes that lowering refuses, with every reason at once."""

from __future__ import annotations

import pytest
from attrs import evolve
from config_cases import (
    ANY,
    CUDA,
    MODEL,
    PAGES,
    TOKENS,
    Entries,
    low,
    make,
    origin,
    reason,
    refused,
)

from topkv.entries import Capabilities
from topkv.kv.layout import lay_out
from topkv.plugins import PluginRegistry

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
        ({"dense_residency": "sparse"}, "dense_residency must be one of 'resident', 'streamed'"),
        ({"prefill_buffer_tokens": -1}, "prefill_buffer_tokens must be an int from 0 on"),
        ({"poison": 1}, "poison must be true or false, got 1"),
        ({"resident_fast_path": "yes"}, "resident_fast_path must be true or false"),
        ({"algorithm": 3}, "algorithm must be the name of a plugin, got 3"),
        (
            {"observers": "log"},
            "observers must be a list of names, or of mappings with name and params, got 'log'",
        ),
        ({"observers": ["log", "log"]}, "observers must name each plugin once"),
        ({"observers": [""]}, "observers[0] name must be the name of a plugin, got ''"),
        ({"observers": [["log"]]}, "observers[0] must be a name or a mapping with name"),
        ({"observers": {"log": 1}}, "observers must be a list of names, or of mappings"),
        ({"host_memory": "lots"}, "host_memory must be a positive number of bytes or a size"),
        ({"device_memory": 0}, "device_memory must be a positive number of bytes or a size"),
        ({"dense_layers": 3}, "dense_layers must be a list of layer numbers from 0, got 3"),
        ({"dense_layers": [-1]}, "dense_layers must be a list of layer numbers from 0"),
        ({"dense_layers": [7, 8]}, "dense_layers names [8], and the model has 8 layers, 0 to 7"),
        ({"params": ["sinks"]}, "params must map names of parameters to values"),
        (
            {"params": {"sink": 1}},
            "unknown parameter 'sink' of topkv-fake 0.3 (algorithm 'pages'); did you",
        ),
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
        (
            {"host_format": "fp4"},
            "unknown host_format 'fp4': installed of kind host_format: model",
        ),
        ({"transfer": "dma"}, "unknown transfer 'dma': installed of kind transfer: zero_copy"),
        ({"eviction": "fifo"}, "unknown eviction 'fifo': installed of kind eviction: lru"),
        (
            {"unit": 24, "page_tokens": 48, "ring_tokens": 48},
            "unit must be a power of two, got 24",
        ),
        ({"unit": 32, "page_tokens": 48}, "unit must divide page_tokens, got unit 32 and page"),
        ({"budget": 31}, "budget must be at least two units (32 tokens"),
        ({"ring_tokens": 16}, "ring_tokens must be a multiple of the unit and hold the open unit"),
        ({"ring_tokens": 40}, "behind it: at least 32, got 40 with unit 16"),
        ({"max_queries": 0}, "max_queries must be"),
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
    assert size == lay_out(shapes, low().num_pages)[1]
    assert low(host_memory=size).host_memory == size
    reported = reason(host_memory=size - 1)
    assert f"the host pool needs {size} bytes" in reported
    # The fix that the error names is one.
    tokens = int(reported.rsplit(" ", 1)[1])
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
    reported = reason(registry=PluginRegistry(broken))
    assert reported.startswith(
        "backend is not set and none is installed that can be used; the doc"
    )
    assert "did not load: topkv-broken 2: it implements none" in reported
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
    reported = reason(registry=registry, scope="kv_head")
    assert reported == f"topkv-fake 0.3 ({kind} 'narrow') {expected} (layers 0-7, sparse)"


def test_negotiation_of_dense_layers():
    def registry(**caps):
        return make([PAGES], [("b", {"capabilities": Capabilities(**caps)})])

    reported = reason(registry=registry(units=(1, 32)), dense_layers=[3])
    assert (
        "takes units of 1 to 32 tokens, got 64: change page_tokens (layers 3, resident)"
        in reported
    )
    streamed = {"dense_layers": [3], "dense_residency": "streamed"}
    assert low(registry=registry(), **streamed).groups[1].shape.residency == "streamed"
    reported = reason(registry=registry(), device=CUDA, **streamed)
    assert "cannot read mapped host memory" in reported
    assert low(registry=registry(host_memory=True), device=CUDA, **streamed)


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
    reported = reason(
        model=small, unit=1, layers={"0-": "sparse"}, registry=make([TOKENS]), scope="kv_head"
    )
    assert "an entry must be a multiple of 16 bytes, got 8" in reported
    assert low(model=small, unit=2, layers={"0-": "sparse"})


def test_the_checkpoint_and_plugins_are_checked_too():
    assert reason(checkpoint={"budgets": 3}).startswith("checkpoint: unknown key 'budgets'; did")
    reported = reason(registry=make([("pages", {"defaults": {"unit": 0, "dense_layers": ()}})]))
    assert reported == (
        "defaults of topkv-fake 0.3 (algorithm 'pages'): unit must be a positive int, got 0"
    )


def test_all_reasons_come_at_once():
    reported = refused(
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
    assert len(reported) == len(set(reported))
    for start in starts:
        assert any(text.startswith(start) for text in reported), start
    assert {text for text in reported if not text.startswith(starts)} <= {
        "unknown algorithm 'pages'"
    }
