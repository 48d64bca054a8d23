"""SGLang's server, as ``topkv serve`` starts it."""

from __future__ import annotations

from topkv_engines.serve import Server
from topkv_sglang.args import OWNED, engine_args
from topkv_sglang.versions import missing

SERVER = Server(
    module="sglang.launch_server",
    model="--model-path",
    engine_args=engine_args,
    read=(*OWNED.values(), "attention_backend", "json_model_override_args"),
    objects=(),
    reasons=missing,
)
