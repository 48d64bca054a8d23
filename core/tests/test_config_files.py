"""Configurations from files; values that are written twice, nested or repeated without end are
refused in few words."""

from __future__ import annotations

import builtins
import json

import pytest
from config_cases import low
from hypothesis import given
from hypothesis import strategies as st

from topkv.config import SparseConfig
from topkv.config.settings import CHECKS
from topkv.errors import ConfigError
from topkv.messages import LONGEST, close, shown


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
    assert SparseConfig.load(values) == expected
    assert SparseConfig.load(tmp_path / "a.json") == expected
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


# Values that are written twice, nested or repeated.


def refused(path, name, text):
    file = path / name
    file.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        SparseConfig.load(file)
    assert len(str(caught.value)) < 2000
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "text", "key"),
    [
        ("a.json", '{"unit": 16, "budget": 64, "unit": 32}', "'unit'"),
        ("a.json", '{"layers": {"5": {"unit": 16, "unit": 32}}}', "'unit'"),
        ("a.yaml", "unit: 16\nbudget: 64\nunit: 32\n", "'unit'"),
        ("a.yaml", "layers: {'5': {unit: 16, unit: 32}}\n", "'unit'"),
        ("a.yaml", "layers: {5: resident, 0x5: sparse}\n", "5"),
        ("a.yaml", f"? {'k' * 10**5}\n: 1\n? {'k' * 10**5}\n: 2\n", "'kkk"),
    ],
    ids=range(6),
)
def test_a_key_that_is_written_twice_is_named(tmp_path, name, text, key):
    assert f"the key {key}" in refused(tmp_path, name, text)


def test_keys_of_one_name_in_two_mappings_are_not_the_same(tmp_path):
    text = "layers:\n  '5': {unit: 16}\n  5: {unit: 32}\n  '6': {unit: 16}\n"
    (tmp_path / "a.yaml").write_text(text)
    layers = SparseConfig.load(tmp_path / "a.yaml").layers
    assert layers == {"5": {"unit": 16}, 5: {"unit": 32}, "6": {"unit": 16}}


KEYS = st.sampled_from(["unit", "budget", "buffer", "ring_tokens"])


@given(written=st.lists(st.tuples(KEYS, st.integers(1, 9)), max_size=6), quote=st.booleans())
def test_what_is_read_is_what_is_written_or_refused(tmp_path_factory, written, quote):
    twice = len({key for key, _ in written}) < len(written)
    folder = tmp_path_factory.mktemp("files")
    mark = '"' if quote else ""
    pairs = ", ".join(f'"{key}": {value}' for key, value in written)
    (folder / "a.json").write_text(f"{{{pairs}}}")
    lines = "".join(f"{mark}{key}{mark}: {value}\n" for key, value in written)
    (folder / "a.yaml").write_text(lines)
    for name in ("a.json", "a.yaml"):
        if twice:
            with pytest.raises(ConfigError, match="is written twice"):
                SparseConfig.load(folder / name)
        else:
            assert SparseConfig.load(folder / name).as_dict() == dict(written)


@pytest.mark.parametrize(
    ("name", "head", "left", "right"),
    [
        ("a.json", '{"params": ', '{"a": ', "}"),
        ("a.json", '{"params": ', '{"a": [', "]}"),
        ("a.yaml", "{params: ", "{a: ", "}"),
        ("a.yaml", "{params: ", "{a: [", "]}"),
    ],
)
def test_deep_nesting_is_refused(tmp_path, name, head, left, right):
    text = head + left * 10**5 + "1" + right * 10**5 + "}"
    assert "nested" in refused(tmp_path, name, text)


def bomb(width, depth):
    lines = ["a0: &a0 [x, x]"]
    for level in range(1, depth):
        inner = ", ".join([f"*a{level - 1}"] * width)
        lines.append(f"a{level}: &a{level} [{inner}]")
    return "\n".join([*lines, f"dense_layers: *a{depth - 1}", ""])


@pytest.mark.parametrize(("width", "depth"), [(1, 1), (9, 7), (10, 40)])
def test_aliases_are_refused(tmp_path, width, depth):
    text = bomb(width, depth)
    assert len(text) < 3000
    reported = refused(tmp_path, "a.yaml", text)
    assert "write the value out" in reported
    assert "line 2" in reported or depth > 1


def test_an_anchor_that_nothing_repeats_is_harmless(tmp_path):
    (tmp_path / "a.yaml").write_text("unit: &u 16\nparams: {sinks: '*u'}\n")
    assert SparseConfig.load(tmp_path / "a.yaml").as_dict() == {
        "unit": 16,
        "params": {"sinks": "*u"},
    }


# Values in messages.


class Loud:
    def __repr__(self):
        raise RuntimeError("no text")

    def __len__(self):
        raise RuntimeError("no length")


ENDLESS: list = []
ENDLESS.append(ENDLESS)
LARGE = {
    "text": "x" * 10**6,
    "list": ["x" * 1000] * 10**5,
    "nested": [[[["x" * 100] * 100] * 100] * 100] * 100,
    "mapping": {"x" * 10**5: ["x" * 100] * 10**4},
    "int": 10**5000,
    "loud": Loud(),
    "endless": ENDLESS,
    "bytes": b"x" * 10**5,
}


@pytest.mark.parametrize("name", LARGE)
def test_a_value_of_any_size_is_shown_in_few_words(name):
    value = LARGE[name]
    assert 0 < len(shown(value)) <= LONGEST
    for key in CHECKS:
        with pytest.raises(ConfigError) as caught:
            low(SparseConfig(**{key: value}))
        assert len(str(caught.value)) < 4000, key
    wrong = {"layers": {"5": value}, name * 10**5: value, "params": value}
    with pytest.raises(ConfigError) as caught:
        SparseConfig.load(wrong)
    assert len(str(caught.value)) < 4000
    with pytest.raises(ConfigError) as caught:
        low(SparseConfig(layers={"x" * 10**6: "sparse", "9" * 10**4: "sparse", "1": value}))
    assert len(str(caught.value)) < 4000
    with pytest.raises(ConfigError) as caught:
        low(checkpoint={"dense_layers": value, "params": {"x" * 10**6: value}})
    assert len(str(caught.value)) < 4000


@given(st.one_of(st.integers(), st.text(max_size=50), st.booleans(), st.none(), st.floats()))
def test_a_small_value_is_shown_as_it_is(value):
    if len(repr(value)) <= 40:
        assert shown(value) == repr(value)


@given(name=st.text(), known=st.lists(st.text(max_size=8), max_size=5))
def test_a_close_name_is_a_known_one(name, known):
    reported = close(name, known)
    assert reported == "" or any(repr(each) in reported for each in known)


# Checkpoints.


NO_MAPPING = (5, "quest", ["unit"], [], 0, "", True, [("unit", 16)], "x" * 10**6)


@pytest.mark.parametrize("value", NO_MAPPING, ids=shown)
def test_what_a_checkpoint_recommends_is_a_mapping(value):
    with pytest.raises(ConfigError) as caught:
        low(checkpoint=value)
    (reason,) = caught.value.reasons
    assert reason.startswith("checkpoint: topkv must be a mapping, got ")
    assert len(reason) < 500


def test_a_checkpoint_may_recommend_nothing():
    assert low(checkpoint=None).groups == low(checkpoint={}).groups


def test_json_of_other_kinds_is_read_as_before(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"params": {"a": {"unit": 1}, "b": {"unit": 2}}}))
    assert SparseConfig.load(tmp_path / "a.json").params == {"a": {"unit": 1}, "b": {"unit": 2}}
