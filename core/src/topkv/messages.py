"""Parts of error messages: a value or an error in few words, and names close to a wrong one."""

from __future__ import annotations

import reprlib
from collections.abc import Iterable
from difflib import get_close_matches

LONGEST = 200
"""Characters of a value that is shown."""

_REPR = reprlib.Repr()
_REPR.maxstring = _REPR.maxother = 100
_REPR.maxlevel = 3
_REPR.maxlist = _REPR.maxtuple = _REPR.maxset = _REPR.maxdict = 8


def shown(value: object) -> str:
    """A value as Python writes it, in at most ``LONGEST`` characters. Never fails."""
    try:
        text = _REPR.repr(value)
    except Exception:  # An int of too many digits, or somebody's own __len__.
        text = f"<{type(value).__name__}>"
    return text if len(text) <= LONGEST else f"{text[: LONGEST - 3]}..."


def raised(error: BaseException) -> str:
    """Type and text of an error. Never fails."""
    try:
        return f"{type(error).__name__}: {error}"
    except Exception:  # An error whose own text fails.
        return type(error).__name__


def close(name: object, known: Iterable[str]) -> str:
    """A question that proposes the known names closest to ``name``; empty if none is close."""
    matches = get_close_matches(str(name)[:LONGEST], sorted(known))
    return f"did you mean {' or '.join(map(repr, matches))}?" if matches else ""
