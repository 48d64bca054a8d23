"""vLLM's OpenAI server, as ``topkv serve`` starts it."""

from __future__ import annotations

from topkv_engines.serve import Server
from topkv_vllm.args import OWNED, engine_args
from topkv_vllm.versions import missing

SERVER = Server(
    module="vllm.entrypoints.openai.api_server",
    model="--model",
    engine_args=engine_args,
    read=(*OWNED.values(), "attention_backend", "worker_cls", "kv_transfer_config"),
    objects=("additional_config", "compilation_config", "speculative_config"),
    reasons=missing,
)
