"""Parts of entries that several plugins have; entries import them, so no torch is here."""

from __future__ import annotations

import math
from typing import Any

from attrs import Attribute
from attrs.validators import ge, gt, le, lt

FLOATS = ("float16", "bfloat16", "float32")
"""Dtypes of the keys that selectors and stages read, for ``Capabilities.dtypes``."""

RANKED = ("nested", "low_ties", "incremental", "value_free")
"""Traits of algorithms that rank keys, or what they keep of units of keys, by an exact top-k."""

BONUS = [ge(0), lt(math.inf)]
"""Validators of ``sticky``, in natural logarithms (``topkv_authoring.sticky``)."""

SHARE = [gt(0), le(1)]
"""Validators of a share of something."""

PAIRS = [ge(1), le(8)]
"""Validators of the pairs of channels that leave a key (``topkv_authoring.outliers``)."""


def odd(_: object, __: Attribute[Any], value: int) -> None:
    """Validator of a kernel: raise ValueError unless it has a middle."""
    if value % 2 == 0:
        raise ValueError("must be odd, so that it has a middle")
