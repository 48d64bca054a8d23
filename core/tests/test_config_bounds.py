"""Sizes that no step could take are refused before anything is allocated."""

from __future__ import annotations

from contextlib import suppress

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from topkv import hookimpl
from topkv.checks import byte_size
from topkv.config import SparseConfig, lower
from topkv.entries import Capabilities, PluginEntry
from topkv.errors import ConfigError
from topkv.messages import shown
from topkv.ops.topk import MAX_COLUMNS, topk
from topkv.plugins import PluginRegistry
from topkv.types import ModelShape

MODEL = ModelShape(2, 4, 2, 64, torch.bfloat16, 0.125)
COUNTS = (
    *("unit", "budget", "buffer", "ring_tokens", "page_tokens", "max_requests", "max_tokens"),
    *("max_request_tokens", "prefill_block_tokens"),
)


class Entries:
    def __init__(self, kinds):
        caps = {kind: Capabilities(**values) for kind, values in kinds.items()}
        self.algorithms = [
            PluginEntry("units", "algorithm", "x:Y", capabilities=caps["algorithm"]),
            PluginEntry("tokens", "algorithm", "x:Y", capabilities=Capabilities(units=(1, 1))),
        ]
        self.backends = [PluginEntry("any", "backend", "x:Y", capabilities=caps["backend"])]
        self.others = {
            kind: [PluginEntry("its", kind, "x:Y", capabilities=caps[kind])]
            for kind in ("transfer", "eviction", "topk")
        }

    @hookimpl
    def topkv_register_algorithms(self):
        return self.algorithms

    @hookimpl
    def topkv_register_backends(self):
        return self.backends

    @hookimpl
    def topkv_register_transfers(self):
        return self.others["transfer"]

    @hookimpl
    def topkv_register_evictions(self):
        return self.others["eviction"]

    @hookimpl
    def topkv_register_topks(self):
        return self.others["topk"]

    @hookimpl
    def topkv_register_stages(self):
        return [PluginEntry("turns", "stage", "x:Y", capabilities=Capabilities(regrains=True))]


KINDS = ("algorithm", "backend", "transfer", "eviction", "topk")
ITS = dict.fromkeys(("transfer", "eviction", "topk"), "its")


def low(kinds=None, **options):
    entries = Entries({**{kind: {} for kind in KINDS}, **(kinds or {})})
    registry = PluginRegistry([("topkv-fake", "0.3", entries)])
    config = SparseConfig(**{"algorithm": "units", "max_requests": 1, **options})
    return lower(config, MODEL, device=torch.device("cpu"), registry=registry)


def refused(**options):
    with pytest.raises(ConfigError) as caught:
        low(**options)
    return list(caught.value.reasons)


# Rows of scores.

ROWS = f"an algorithm ranks at most {MAX_COLUMNS} units"


def test_the_bound_is_that_of_the_op():
    def rank(columns):
        scores = torch.empty(0, columns)
        topk(scores, torch.empty(0).int(), torch.empty(0, 1).int(), impl="reference")

    rank(MAX_COLUMNS)
    with pytest.raises(ValueError, match="columns"):
        rank(MAX_COLUMNS + 1)


@pytest.mark.parametrize(
    ("options", "fits"),
    [
        ({"unit": 1, "max_request_tokens": 2**20}, True),
        ({"unit": 1, "max_request_tokens": 2**20 + 1}, False),
        ({"unit": 1, "max_request_tokens": 2**21}, False),
        ({"unit": 16, "max_request_tokens": 2**24}, True),
        ({"unit": 16, "max_request_tokens": 2**24 + 1}, False),
        # The algorithm is given tokens, whatever the unit of the group.
        ({"algorithm": "tokens", "unit": 16, "stages": ["turns"], "max_tokens": 2**20}, True),
        ({"algorithm": "tokens", "unit": 16, "stages": ["turns"], "max_tokens": 2**21}, False),
        # Dense layers rank nothing.
        ({"dense_layers": [0, 1], "max_request_tokens": 2**24}, True),
    ],
)
def test_a_request_has_no_more_units_than_a_row_has_scores(options, fits):
    options = {"budget": 64, "buffer": 2048, **options}
    if fits:
        for group in low(**options).groups:
            assert group.shape.residency != "sparse" or group.selected_as.max_units <= MAX_COLUMNS
        return
    (reason,) = refused(**options)
    assert ROWS in reason
    assert "(layers 0-1)" in reason
    assert "lower max_request_tokens" in reason


@given(
    unit=st.sampled_from([1, 2, 16, 64]),
    tokens=st.integers(1, 2**26),
    turns=st.booleans(),
)
def test_whatever_is_accepted_can_be_ranked(unit, tokens, turns):
    turns = turns and unit > 1
    options = {"algorithm": "tokens", "stages": ["turns"]} if turns else {"algorithm": "units"}
    sizes = {"unit": unit, "max_request_tokens": tokens, "budget": 128, "buffer": 128 * 64}
    if -(-tokens // 64) * 64 // (1 if turns else unit) > MAX_COLUMNS:
        assert any(ROWS in reason for reason in refused(**options, **sizes))
    else:
        lowered = low(**options, **sizes)
        assert all(group.selected_as.max_units <= MAX_COLUMNS for group in lowered.groups)


# Counts and bytes.


@pytest.mark.parametrize("value", [2**31, 10**30, 10**5000], ids=shown)
@pytest.mark.parametrize("name", COUNTS)
def test_counts_have_an_upper_bound(name, value):
    reported = refused(**{name: value})
    assert any(f"{name} must be at most 2147483647, got " in reason for reason in reported)
    assert len(" ".join(reported)) < 1000


@pytest.mark.parametrize("value", [2**31, 10**5000], ids=shown)
def test_layers_and_overrides_have_one_too(value):
    (reported,) = refused(layers={"1": {"buffer": value}})
    assert "layers['1'] buffer must be at most 2147483647" in reported
    (reported,) = refused(dense_layers=[value])
    assert "dense_layers must be a list of layer numbers from 0" in reported
    (reported,) = refused(dense_layers=range(value))
    assert "dense_layers must be a list of at most" in reported


@pytest.mark.parametrize(
    "value",
    [2**63, 10**30, 10**5000, "9223372036854775808", "9" * 400, "9" * 400 + "GiB", "9999999TiB"],
    ids=shown,
)
@pytest.mark.parametrize("name", ["host_memory", "device_memory"])
def test_bytes_have_an_upper_bound(name, value):
    (reported,) = refused(**{name: value})
    assert f"{name} must be at most 9223372036854775807 bytes, got" in reported
    assert len(reported) < 500


def test_what_is_no_size_is_refused():
    (reported,) = refused(host_memory="9e30GiB")
    assert "host_memory must be a positive number of bytes or a size like '64GiB'" in reported
    assert byte_size(2**63 - 1) == 2**63 - 1
    assert byte_size("8388607TiB") == 8388607 * 2**40


ANY = st.one_of(
    st.integers(),
    st.integers(min_value=2**30, max_value=10**40),
    st.floats(),
    st.text(max_size=5),
    st.from_regex(r"\d{1,400}(\.\d{1,9})?[KMGTkmgt]?i?B?", fullmatch=True),
    st.booleans(),
)


@given(
    values=st.dictionaries(
        st.sampled_from([*COUNTS, "host_memory", "device_memory", "dense_layers"]), ANY
    )
)
def test_any_size_gives_a_configuration_or_reasons(values):
    with suppress(ConfigError):
        assert low(**values).max_requests < 2**31


# Capture.


def test_a_configuration_is_capturable_where_all_of_its_plugins_are():
    assert low(**ITS).capturable
    assert ("capturable", True, "computed") in [
        (setting.name, setting.value, setting.origin) for setting in low(**ITS).settings
    ]
    for kind in KINDS:
        assert not low({kind: {"capture": False}}, **ITS).capturable, kind


def test_what_a_configuration_does_not_use_does_not_count():
    no = {kind: {"capture": False} for kind in ("transfer", "eviction", "topk")}
    assert low(no).capturable
    dense = {"dense_layers": [0, 1], **ITS}
    for kind, asked in (("algorithm", False), ("eviction", False), ("topk", False)):
        assert low({kind: {"capture": False}}, **dense).capturable is not asked
    assert not low({"backend": {"capture": False}}, **dense).capturable
