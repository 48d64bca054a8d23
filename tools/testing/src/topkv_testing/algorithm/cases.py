"""Cases that a subject's entry and options allow: what the algorithm suite draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import pytest
from hypothesis import strategies as st

from topkv_testing.algorithm.case import WEIGHTS, Case
from topkv_testing.algorithm.options import options_of
from topkv_testing.algorithm.sizes import Sizes, find
from topkv_testing.kit import Subject
from topkv_testing.strategies import KEYS, geometries, seeds

# Hypothesis tries the first values first and shrinks to them: a shape in which all parts count.
_SHAPES: Mapping[str, Sequence[Any]] = {
    "kv_heads": (2, 1, 3),
    "groups": (2, 1, 4),
    "dims": (4, 12, 16),
    "units": (4, 1, 2, 16),
    "page_units": (2, 1, 4),
    "dtypes": ("float32", "bfloat16", "float16"),
}

# With weights the heads of an indexer select together, and one token after another.
_WEIGHED_SHAPES: Mapping[str, Sequence[Any]] = {"kv_heads": (1,), "units": (1,)}

# Each shape compiles its kernels anew on a GPU, which takes longer than a test does.
_GPU_SHAPES: Mapping[str, Sequence[Any]] = {
    "kv_heads": (2,),
    "groups": (2,),
    "dims": (12,),
    "units": (4, 1),
    "page_units": (2,),
    "dtypes": ("bfloat16", "float32"),
}


def _weights(subject: Subject) -> tuple[str, ...] | None:
    """Kinds of weights of an algorithm that uses an index with weights, else None."""
    stated = subject.entry.capabilities
    return tuple(WEIGHTS) if stated.needs_index and "mla" in stated.attention else None


def sizes_of(subject: Subject) -> Sizes:
    """The sizes at which an algorithm is tested; they are looked for once."""
    if "sizes" not in subject.found:
        wanted = dict(_GPU_SHAPES if subject.tier.name == "gpu" else _SHAPES)
        weights = _weights(subject)
        wanted |= _WEIGHED_SHAPES if weights else {}
        subject.found["sizes"] = find(subject, wanted, weights[0] if weights else None)
    found: Sizes = subject.found["sizes"]
    return found


def cases(
    subject: Subject,
    *,
    keys: Sequence[str] = ("normal", *sorted(set(KEYS) - {"normal"})),
    exact: bool = True,
    **geometry: Any,
) -> st.SearchStrategy[Case]:
    """Cases that the subject's entry and options allow.

    Args:
        subject: the plugin.
        keys: kinds of keys.
        exact: data on the grid.
        geometry: keyword arguments of ``strategies.geometries``; those of the options win.
    """
    options, sizes, weights = options_of(subject), sizes_of(subject), _weights(subject)
    drawn = {}
    for name, values in {**sizes.wanted, **geometry}.items():
        drawn[name] = sizes.taken(name, values)
        if not drawn[name] and name in geometry and name != "units":
            who = subject.entry.name
            pytest.skip(f"{who} takes none of the {name} {tuple(values)} of this test")
        drawn[name] = drawn[name] or [sizes.point[name]]
    return st.builds(
        Case,
        geometry=geometries(sizes.capabilities, **{**drawn, **options.geometry}),
        params=options.params,
        select=st.sampled_from(sizes.selects),
        ring=st.sampled_from((2, 3)),
        keys=st.sampled_from(keys),
        seed=seeds(),
        least_units=st.just(sizes.units),
        stale=st.sampled_from((96.0, math.nan)),
        exact=st.just(exact),
        weights=st.sampled_from(weights) if weights else st.none(),
        index=st.just(subject.entry.capabilities.needs_index),
    )


rounded_cases = partial(cases, keys=("normal", "heavy"), exact=False)
"""Cases whose data are not on the grid."""
