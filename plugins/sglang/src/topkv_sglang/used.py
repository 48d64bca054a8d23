"""The type of a hook, and the test for whether topkv serves in this process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from topkv_sglang.args import BACKEND

Hook = Callable[..., Any]
"""A function that stands around one of SGLang, and gets that one first."""


def used() -> bool:
    """Return True if this process serves through topkv, once SGLang has published arguments."""
    from sglang.srt.runtime_context import attention_backends

    return BACKEND in attention_backends()
