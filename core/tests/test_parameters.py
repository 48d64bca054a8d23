"""Parameters: values that are taken and refused, and classes that an entry may not name."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from attrs import define, field, frozen
from attrs.validators import ge, in_, min_len, optional

from topkv.checks import Refused, byte_size
from topkv.entries import NoParameters, PluginEntry
from topkv.parameters import class_reasons, make, passes
from topkv.plugins.entry_checks import reasons as entry_reasons


def odd(_: object, __: Any, value: int) -> None:
    if value % 2 == 0:
        raise ValueError("must be odd")


@frozen
class Base:
    """Parameters that several have.

    Attributes:
        seed: of what is drawn.
    """

    seed: int = 0


@frozen
class Params(Base):
    """Parameters.

    Attributes:
        count, kernel: numbers
            of two lines.
        kind: one of two.
    """

    count: int = field(default=1, validator=ge(1))
    kernel: int = field(default=3, validator=[ge(1), odd])
    kind: str = field(default="a", validator=in_(("a", "b")))
    share: float = 0.5
    flag: bool = False
    path: str | None = field(default=None, validator=optional(min_len(1)))
    size: int | str = field(default="1GiB", validator=passes(byte_size))
    steps: tuple[int, ...] = ()
    pair: tuple[str, float] = ("x", 1.0)
    secret: str | None = field(default=None, repr=False, validator=optional(min_len(4)))

    def __attrs_post_init__(self) -> None:
        if self.count > self.kernel:
            raise ValueError(f"count must be at most kernel, got {self.count} and {self.kernel}")


def reasons_of(**given):
    with pytest.raises(Refused) as error:
        make(Params, given, "mine")
    return list(error.value.reasons)


def test_values_are_taken_as_their_annotations_have_them():
    given = {"share": 1, "path": Path("here"), "steps": [1, 2], "pair": ["y", 2], "size": 7}
    made = make(Params, given, "mine")
    assert made == Params(share=1.0, path="here", steps=(1, 2), pair=("y", 2.0), size=7)
    assert [type(each) for each in (made.share, made.path, made.pair[1])] == [float, str, float]
    assert make(Params, {}, "mine") == Params()
    assert make(Params, {"path": None}, "mine") == Params()


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"count": True}, "must be an int, got True"),
        ({"count": 1.0}, "must be an int, got 1.0"),
        ({"count": None}, "must be an int, got None"),
        ({"flag": 1}, "must be true or false, got 1"),
        ({"share": True}, "must be a number, got True"),
        ({"share": "1"}, "must be a number, got '1'"),
        ({"share": 10**400}, "must be a number, got"),
        ({"kind": 1}, "must be a text, got 1"),
        ({"path": 1}, "must be a text or None, got 1"),
        ({"size": None}, "must be an int or a text, got None"),
        ({"steps": [1, True]}, "must be a list, each an int, got [1, True]"),
        ({"steps": 1}, "must be a list, each an int, got 1"),
        ({"pair": ["y"]}, "must be a list of a text, a number, got ['y']"),
        ({"count": 0}, "must be >= 1, got 0"),
        ({"kernel": 4}, "must be odd, got 4"),
        ({"kind": "c"}, "must be in ('a', 'b') (got 'c')"),
        (
            {"size": "much"},
            "must be a positive number of bytes or a size like '64GiB', got 'much'",
        ),
    ],
)
def test_each_wrong_value_is_named_with_what_was_expected(given, expected):
    (name,), (why,) = given, reasons_of(**given)
    assert why.startswith(f"parameter {name} of mine {expected}")


def test_everything_that_is_wrong_is_reported_at_once_and_the_rest_is_kept():
    with pytest.raises(Refused) as error:
        make(Params, {"count": 0, "kernel": "x", "coun": 1, "share": 0.25}, "mine")
    assert len(error.value.reasons) == 3
    assert "unknown parameter 'coun' of mine; did you mean 'count'?" in error.value.reasons
    assert error.value.good == Params(share=0.25)


def test_several_together_are_judged_where_each_is_right():
    assert reasons_of(count=5) == ["parameters of mine: count must be at most kernel, got 5 and 3"]
    assert reasons_of(count=5, kernel=4) == ["parameter kernel of mine must be odd, got 4"]


def test_a_secret_is_not_shown():
    for secret in (12345678, "abc"):
        (why,) = reasons_of(secret=secret)
        assert str(secret) not in why
        assert type(secret).__name__ in why


@define
class Thawed:
    count: int = 1


@define(unsafe_hash=True)
class Alike:
    count: int = 1


@frozen
class Lacking:
    count: int


@frozen
class Untyped:
    count = field(default=1)


@frozen
class Complex:
    count: complex = 1j


@frozen
class Unknown:
    count: Nowhere = 1  # noqa: F821


@frozen
class Mutable:
    steps: tuple[int, ...] = field(factory=list)


@frozen
class Unlike:
    count: int = "x"


@frozen
class Strict:
    count: int = field(default=0, validator=ge(1))


@frozen(eq=False)
class Apart:
    count: int = 1


@pytest.mark.parametrize(
    ("cls", "expected"),
    [
        ({"sinks": 1}, "got a mapping: write @frozen class Parameters with the fields 'sinks: in"),
        (["a"], "must be an attrs class that is frozen"),
        (int, "must be an attrs class that is frozen"),
        (Params(), "must be an attrs class that is frozen"),
        (Thawed, "must be frozen, and Thawed is not"),
        (Alike, "must be frozen, and Alike is not"),
        (Lacking, "must have a default for each field, and count has none"),
        (Untyped, "and count is None"),
        (Complex, "and count is <class 'complex'>"),
        (Unknown, "must have annotations that can be read: NameError"),
        (Mutable, "must have defaults that"),
        (Unlike, "parameter count of Unlike must be an int, got 'x'"),
        (Strict, "that it takes itself: 'count' must be >= 1: 0"),
        (Apart, "must have instances that are equal where their fields are"),
    ],
)
def test_each_class_that_cannot_be_used_is_named(cls, expected):
    (why,) = class_reasons(cls)
    assert expected in why
    entry = PluginEntry("mine", "algorithm", "x:Y", parameters=cls)
    assert entry_reasons(entry, "algorithm", "topkv_register_algorithms") == [f"parameters {why}"]


def test_classes_that_can_be_used_are():
    for cls in (Params, Base, NoParameters):
        assert class_reasons(cls) == []


@frozen
class Inner:
    """Parameters inside of others."""

    name: str = ""
    secret: str = field(default="", repr=False, validator=min_len(0))
    quotas: Mapping[str, int] | None = None


@frozen
class Outer:
    """Parameters with others inside."""

    inner: Inner | None = field(default=None, repr=repr)
    count: int = 1


def test_a_mapping_of_parameters_becomes_an_instance():
    given = {"inner": {"name": "x", "quotas": {"a": 1}}}
    made = make(Outer, given, "mine")
    assert made == Outer(Inner("x", quotas={"a": 1}))
    assert make(Outer, {"inner": made.inner}, "mine") == made
    assert make(Outer, {"inner": None}, "mine") == Outer()
    assert class_reasons(Outer) == []


def test_all_that_is_wrong_in_a_mapping_is_reported_with_the_rest():
    inner = {"nam": 1, "secret": 5, "name": "y", "quotas": {3: 1}}
    with pytest.raises(Refused) as error:
        make(Outer, {"inner": inner, "count": "x"}, "mine")
    assert list(error.value.reasons) == [
        "unknown parameter 'nam' of inner of mine; did you mean 'name'?",
        "parameter secret of inner of mine must be a text that it takes, got int",
        "parameter quotas of inner of mine must be a mapping with names for keys or None, "
        "got {3: 1}",
        "parameter count of mine must be an int, got 'x'",
    ]
    assert error.value.good == Outer(Inner("y"))


def test_what_may_hold_a_secret_is_not_shown():
    with pytest.raises(Refused) as error:
        make(Outer, {"inner": [{"secret": "swordfish"}]}, "mine")
    (why,) = error.value.reasons
    assert why.endswith("a mapping of name, secret, quotas or None that it takes, got list")


@frozen
class Wrong:
    """Parameters with wrong ones inside."""

    inner: Lacking | None = None
    numbers: Mapping[int, int] | None = None


def test_classes_inside_are_judged_too():
    inner, numbers = class_reasons(Wrong)
    assert "and inner is" in inner
    assert "and numbers is" in numbers
