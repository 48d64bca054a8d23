"""Overrides by layer range, and the groups of layers that they make."""

from __future__ import annotations

from itertools import pairwise

import pytest
from config_cases import PAGES, TOKENS, low, make, origin
from hypothesis import given
from hypothesis import strategies as st

from topkv.config.layers import parse_ranges, show_ranges


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


def test_each_value_of_a_layer_has_the_override_that_it_comes_from():
    layers = {"0-": "sparse", "2-": {"budget": 512, "params": {"bits": 4}}, "5": {"unit": 32}}
    lowered = low(layers={**layers, "5-": {"params": {"sinks": 3}}})
    assert origin(lowered, "layers[5].budget") == (512, "user, layers['2-']")
    assert origin(lowered, "layers[5].params.bits") == (4, "user, layers['2-']")
    assert origin(lowered, "layers[5].unit") == (32, "user, layers['5']")
    assert origin(lowered, "layers[5].params.sinks") == (3, "user, layers['5-']")


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
        reported = str(error)
    else:
        assert all(b is None or a <= b for a, b in ranges)
        return
    assert repr(text) in reported


@pytest.mark.parametrize("text", ["", "-", "-3", "a", "1--2", "1,", "1.5", "*", True])
def test_what_is_no_range(text):
    with pytest.raises(ValueError, match="must look like"):
        parse_ranges(text)
