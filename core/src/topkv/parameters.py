"""Parameters of a plugin: an instance of the attrs class that its entry names.

A field of the class is a parameter: its annotation says the type, its validator which values are
taken, its default what holds where nobody sets it, and ``Attributes:`` in the docstring of the
class what it means. A field of a further such class is a mapping of parameters for people.
Neither torch nor triton is imported here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from itertools import repeat
from os import PathLike, fsdecode
from types import NoneType, UnionType
from typing import Any, Union, get_args, get_origin, get_type_hints

from attrs import NOTHING, Attribute, asdict, fields, has
from attrs.exceptions import FrozenInstanceError

from topkv.checks import Refused, near
from topkv.messages import raised, shown

_WORDS = {bool: "true or false", int: "an int", float: "a number", str: "a text", NoneType: "None"}
_ADVICE = "an attrs class that is frozen, whose fields are the parameters"


def passes(check: Callable[[Any], Any]) -> Callable[[Any, Any, Any], None]:
    """Make the validator of a field from a check of values, such as ``topkv.checks`` has.

    Args:
        check: raises ValueError, which begins with "must be".
    """

    def validator(_: Any, __: Any, value: Any) -> None:
        check(value)

    return validator


def values(params: object) -> dict[str, Any]:
    """The parameters of an instance by name."""
    return asdict(params, recurse=False)  # type: ignore[arg-type]  # of any attrs class


def make(cls: type, given: Mapping[str, Any], who: str) -> Any:
    """Make the instance with some values given; the others have their defaults.

    Args:
        cls: what an entry names, for which ``class_reasons`` has none.
        given: values by name. An int is taken for a float, a list for a tuple, a path for a
            text.
        who: whose they are, for messages.

    Raises:
        Refused: with every reason; its ``good`` is an instance with those that are right.
    """
    known, hints = {each.name: each for each in fields(cls)}, get_type_hints(cls)
    reasons, good = [], {}
    for name, value in given.items():
        if name not in known:
            unknown = f"unknown parameter {shown(name)} of {who}"
            reasons.append(f"{unknown}; {near(name, known)}")
            continue
        try:
            typed = _typed(hints[name], value, f"{name} of {who}")
            _validate(known[name], typed)
            good[name] = typed
        except Refused as error:  # of a mapping of parameters
            reasons += error.reasons
            good[name] = error.good
        except (TypeError, ValueError) as error:
            text, got = str(error), shown(value)
            if known[name].repr is not True:  # a secret, or one in it, must not be shown
                text, got = f"must be {_words(hints[name])} that it takes", type(value).__name__
            got = "" if "got " in text else f", got {got}"
            reasons.append(f"parameter {name} of {who} {text}{got}")
    try:
        made = cls(**good)
    except Exception as error:  # several together, which mean nothing if one is wrong
        made = cls()
        if not reasons:
            reasons.append(f"parameters of {who}: {_text(error)}")
    if reasons:
        raise Refused(reasons, made)
    return made


def _typed(hint: Any, value: Any, who: str) -> Any:
    """A value as its annotation has it; raises TypeError with what it must be, and Refused with
    what is wrong in a mapping of parameters."""
    kind, inside = get_origin(hint), get_args(hint)
    with suppress(TypeError):  # of a part, which the words for the whole say too
        if kind in (Union, UnionType):
            for each in inside:  # the first that takes it
                with suppress(TypeError):
                    return _typed(each, value, who)
        if kind is tuple and isinstance(value, (list, tuple)):
            items = inside[:1] * len(value) if inside[-1] is ... else inside
            if len(items) == len(value):
                return tuple(map(_typed, items, value, repeat(who)))
        if kind is Mapping and isinstance(value, Mapping):
            return {_typed(inside[0], key, who): each for key, each in value.items()}
    if has(hint) and isinstance(value, Mapping):
        return make(hint, value, who)
    if type(value) is hint:
        return value
    if hint is float and type(value) is int and abs(value) < 2**1000:
        return float(value)
    if hint is str and isinstance(value, PathLike):
        return fsdecode(value)
    raise TypeError(f"must be {_words(hint)}")


def _words(hint: Any) -> str:
    """The type of a parameter, for people; raises KeyError if there is no such parameter."""
    kind, inside = get_origin(hint), get_args(hint)
    if kind in (Union, UnionType):
        return " or ".join(map(_words, inside))
    if kind is tuple:
        words = ", ".join(_words(each) for each in inside if each is not ...)
        return f"a list, each {words}" if inside[-1] is ... else f"a list of {words}"
    if kind is Mapping and inside[0] is str:
        return "a mapping with names for keys"
    if has(hint) and not class_reasons(hint):
        return f"a mapping of {', '.join(each.name for each in fields(hint))}"
    return _WORDS[hint]


def _validate(each: Attribute[Any], value: Any) -> None:
    """Raise ValueError with what a value must be, unless the validator of its field takes it."""
    if each.validator is None:
        return
    try:
        # No instance: one validator sees one value. Several are for ``__attrs_post_init__``.
        each.validator(None, each, value)
    except Exception as error:
        text = _text(error).removeprefix(f"'{each.name}' ").removesuffix(f": {value}")
        raise ValueError(text) from error


def _text(error: Exception) -> str:
    """The reason in an error; one that is no refusal is named."""
    if not isinstance(error, (ValueError, TypeError)):
        return raised(error)
    # Errors of the validators of attrs have the attribute behind the text.
    of_attrs = len(error.args) > 1 and isinstance(error.args[1], Attribute)
    return str(error.args[0] if of_attrs else error)[:500]


def class_reasons(cls: Any) -> list[str]:
    """Reasons against what an entry names as the class of its parameters."""
    if isinstance(cls, Mapping):
        written = ", ".join(
            f"{name}: {type(value).__name__} = {value!r}" for name, value in cls.items()
        )
        fixed = f"write @frozen class Parameters with the fields {shown(written)}"
        return [f"must be {_ADVICE}, got a mapping: {fixed}, and parameters=Parameters"]
    if not isinstance(cls, type) or not has(cls):
        return [f"must be {_ADVICE}, got {shown(cls)}"]
    found = [
        f"must have a default for each field, and {each.name} has none"
        for each in fields(cls)
        if each.default is NOTHING
    ]
    try:
        hints = get_type_hints(cls)
    except Exception as error:
        return [*found, f"must have annotations that can be read: {raised(error)}"]
    for each in fields(cls):
        try:
            _words(hints.get(each.name))
        except (KeyError, IndexError):
            found.append(
                "must have fields of bool, int, float, str, None, tuples, unions, mappings of "
                f"names and such classes, and {each.name} is {shown(hints.get(each.name))}"
            )
    return found or _instance_reasons(cls)


def _instance_reasons(cls: type) -> list[str]:
    """Reasons against the instance with all defaults."""
    try:
        made = cls()
        make(cls, values(made), cls.__name__)
    except Refused as error:
        return [f"must have defaults that it takes itself: {reason}" for reason in error.reasons]
    except Exception as error:
        return [f"must have defaults that it takes itself: {_text(error)}"]
    if not _is_frozen(made):
        return [f"must be frozen, and {cls.__name__} is not"]
    try:
        same = hash(made) == hash(cls()) and made == cls()
    except TypeError as error:
        return [f"must have defaults that do not change: {error}"]
    return [] if same else ["must have instances that are equal where their fields are"]


def _is_frozen(made: Any) -> bool:
    try:
        made.topkv = None  # frozen classes refuse any name, others with slots this one
    except AttributeError as error:
        return isinstance(error, FrozenInstanceError)
    return False
