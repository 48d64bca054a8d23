"""SGLang as an engine of topkv: its scheduler and server, KV in topkv's host pool."""

from __future__ import annotations

from topkv_sglang.args import engine_args as engine_args

__all__ = ["engine_args"]
