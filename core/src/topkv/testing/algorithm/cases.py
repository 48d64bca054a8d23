"""Cases that a subject's entry and options allow: what the algorithm suite draws."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from attrs import evolve
from hypothesis import strategies as st

from topkv.testing.algorithm.bench import options_of
from topkv.testing.algorithm.case import WEIGHTS, Case
from topkv.testing.kit import Subject
from topkv.testing.strategies import KEYS, geometries, seeds

# Hypothesis tries the first values first and shrinks to them: a shape in which all parts count.
_SHAPES: Mapping[str, Any] = {
    "kv_heads": (2, 1, 3),
    "groups": (2, 1, 4),
    "units": (4, 1, 2, 16),
    "page_units": (2, 1, 4),
}

# All heads of an indexer share the key of a token. With weights they select one by one.
_INDEX_SHAPES: Mapping[str, Any] = {"kv_heads": (1,)}
_WEIGHED_SHAPES: Mapping[str, Any] = {"kv_heads": (1,), "units": (1,)}

# Each shape compiles its kernels anew on a GPU, which takes longer than a test does.
_GPU_SHAPES: Mapping[str, Any] = {
    "kv_heads": (2,),
    "groups": (2,),
    "dims": (12,),
    "units": (4, 1),
    "page_units": (2,),
    "dtypes": ("bfloat16", "float32"),
}


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
    options, capabilities = options_of(subject), subject.entry.capabilities
    wide = _GPU_SHAPES if subject.tier.name == "gpu" else _SHAPES
    drawn, weights = {**wide, **geometry, **options.geometry}, st.none()
    if capabilities.needs_index:
        # What the entry says of heads is about the model's, see ``algorithm.memory``.
        capabilities = evolve(capabilities, head_dims=None, max_group=None)
        weighed = "mla" in capabilities.attention
        drawn = {**drawn, **(_WEIGHED_SHAPES if weighed else _INDEX_SHAPES)}
        weights = st.sampled_from(tuple(WEIGHTS)) if weighed else st.none()
    shapes = geometries(capabilities, **drawn)

    return st.builds(
        Case,
        geometry=shapes,
        params=options.params,
        select=st.sampled_from(options.selects),
        ring=st.sampled_from((2, 3)),
        keys=st.sampled_from(keys),
        seed=seeds(),
        least_units=st.just(options.units),
        stale=st.sampled_from((96.0, math.nan)),
        exact=st.just(exact),
        weights=weights,
    )
