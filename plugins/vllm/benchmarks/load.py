"""Latencies through vLLM under a mixed load, and of a prompt that is asked for twice.

    python plugins/vllm/benchmarks/load.py --contestant topkv --drift 0.15 --out load.jsonl
    python plugins/vllm/benchmarks/load.py --contestant dense --out load.jsonl

See ``topkv_bench.load``.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from vllm import LLM, SamplingParams

from topkv_bench.load import Watched, run
from topkv_bench.vllm_cell import arguments_of


class Engine(Watched):
    """An engine of vLLM in this process.

    Args:
        asked: as of a cell.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        asked["engine_args"] = {"max_model_len": asked["tokens"]} | asked["engine_args"]
        self.engine = LLM(**arguments_of(asked) | {"enable_prefix_caching": True}).llm_engine

    def add(self, prompt: list[int], tokens: int) -> str:
        """See ``Watched``, here and below."""
        name = str(len(self.times))
        how = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False)
        self.engine.add_request(name, {"prompt_token_ids": prompt}, how)
        self.times[name] = []
        return name

    def run(self) -> None:
        while self.engine.has_unfinished_requests():
            for output in self.engine.step():
                self.tokens[output.request_id] = [*output.outputs[0].token_ids]
                self.times[output.request_id].append(perf_counter())


if __name__ == "__main__":
    run(Engine)
