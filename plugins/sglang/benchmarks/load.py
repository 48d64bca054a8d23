"""Latencies through SGLang under a mixed load, and of a prompt that is asked for twice.

    python plugins/sglang/benchmarks/load.py --contestant topkv --drift 0.15 --out load.jsonl
    python plugins/sglang/benchmarks/load.py --contestant dense --out load.jsonl

See ``topkv_bench.load``.
"""

from __future__ import annotations

from time import perf_counter
from typing import Any

from topkv_bench import sglang_cell
from topkv_bench.load import Watched, run


class Engine(Watched):
    """SGLang's scheduler in this process.

    Args:
        asked: as of a cell.
    """

    def __init__(self, asked: dict[str, Any]) -> None:
        super().__init__()
        mixing = {"disable_radix_cache": False, "enable_mixed_chunk": True}
        asked["engine_args"] = mixing | asked["engine_args"]
        asked["settings"]["max_request_tokens"] = asked["tokens"]
        self.engine = sglang_cell.Engine(sglang_cell.resolved(asked))

    def add(self, prompt: list[int], tokens: int) -> str:
        """See ``Watched``, here and below."""
        name = self.engine.send(prompt, tokens)
        self.times[name], self.tokens[name] = [], []
        return name

    def run(self) -> None:
        self.engine.loop(self._look)

    def _look(self, batch: Any) -> None:
        now = perf_counter()
        for request in batch.reqs:
            tokens = [*request.output_ids]
            if len(tokens) > len(self.tokens[request.rid]):
                self.tokens[request.rid] = tokens
                self.times[request.rid].append(now)


if __name__ == "__main__":
    run(Engine)
