"""Memory under a mixed load that goes on: requests arrive, are aborted, preempted and found again.

    python plugins/vllm/benchmarks/soak.py --minutes 120 --device cpu --out soak.jsonl

Prompts of all lengths, half of which begin like others, arrive at random; some clients go away,
and the host pool holds fewer tokens than they ask for. Weights are random. A row a minute:
requests that ended, steps, and bytes of the process on the host, in pinned memory and on the GPU.
Nothing is held when the load pauses for it.
"""

from __future__ import annotations

import argparse
import json
import os
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Any

import psutil
import torch

os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the engine is in this process
from vllm import LLM, SamplingParams

from topkv_bench import geometry
from topkv_bench.engine_bench import save_config
from topkv_testing.integrity import check_integrity
from topkv_vllm import engine_args

LONGEST, PAGE, CHUNK, RUNNING = 1024, 32, 256, 8
"""Tokens of a request, of a page and of a step; requests that run at a time."""

DRAFTS = {
    "method": "ngram",
    "num_speculative_tokens": 3,
    "prompt_lookup_max": 2,
    "prompt_lookup_min": 1,
}


class Load:
    """A load on an engine.

    Args:
        options: of the command.
        folder: for the configuration of the model.

    Attributes:
        ended, aborted, steps: how many so far.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        self.draw, self.names = random.Random(options.seed), 0
        self.ended = self.aborted = self.steps = 0
        config = geometry.config_of(options.model, None, LONGEST)
        save_config(config, folder)
        self.words = config.vocab_size
        self.heads = [self._prompt(LONGEST // 3) for _ in range(4)]
        self.llm = LLM(**self._arguments(options, str(folder)))
        self.engine = self.llm.llm_engine
        (self.session,) = self.llm.collective_rpc(lambda worker: worker.session)
        self.running: dict[str, int] = {}

    def _arguments(self, options: argparse.Namespace, folder: str) -> dict[str, Any]:
        settings = {"algorithm": "quest", "backend": "triton_attention", "budget": 256, "unit": 16}
        settings |= {"max_requests": RUNNING, "page_tokens": PAGE, "max_tokens": 4 * LONGEST}
        arguments: dict[str, Any] = {
            "model": folder,
            "load_format": "dummy",
            "skip_tokenizer_init": True,
            "dtype": "float32" if options.device == "cpu" else "bfloat16",
            "max_model_len": LONGEST,
            "max_num_batched_tokens": CHUNK,
            "enable_prefix_caching": True,
            "gpu_memory_utilization": 0.5,
        }
        if options.device == "cpu":
            arguments |= {"enforce_eager": True, "kv_cache_memory_bytes": 2**20}
        if options.drafts:
            arguments["speculative_config"] = DRAFTS
        return engine_args(settings, **arguments)

    def _prompt(self, tokens: int) -> list[int]:
        return [self.draw.randrange(self.words) for _ in range(tokens)]

    def arrive(self) -> None:
        """Hand over a request."""
        prompt = self._prompt(self.draw.randint(1, LONGEST // 2))
        if self.draw.random() < 0.5:
            prompt = [*self.draw.choice(self.heads), *prompt[: LONGEST // 8]]
        most = self.draw.randint(1, LONGEST // 4)
        how = SamplingParams(max_tokens=most, temperature=0, ignore_eos=True, detokenize=False)
        name = str(self.names)
        self.names += 1
        self.engine.add_request(name, {"prompt_token_ids": prompt}, how)
        self.running[name] = 0

    def step(self) -> None:
        """Run a step; a request that has ended makes room for another one."""
        if len(self.running) < 2 * RUNNING and self.draw.random() < 0.5:
            self.arrive()
        if self.running and self.draw.random() < 0.01:
            name = self.draw.choice([*self.running])
            self.engine.abort_request([name])
            del self.running[name]
            self.aborted += 1
        self._step()

    def _step(self) -> None:
        for output in self.engine.step():
            if output.finished and self.running.pop(output.request_id, None) is not None:
                self.ended += 1
        self.steps += 1

    def pause(self) -> None:
        """Run until nothing is left; see that nothing is held."""
        while self.engine.has_unfinished_requests():
            self._step()
        self.engine.step()
        self.running.clear()
        check_integrity(self.session.coordinator)
        used = self.session.coordinator.manager.host.used
        if used or self.session.requests.held:
            raise RuntimeError(f"{used} pages are held and nothing runs")

    def row(self) -> dict[str, Any]:
        """Return what it has done, and the bytes that the process holds."""
        on_gpu = torch.cuda.is_available()
        return {
            "steps": self.steps,
            "ended": self.ended,
            "aborted": self.aborted,
            "resident_bytes": psutil.Process().memory_info().rss,
            "pinned_bytes": torch.cuda.host_memory_stats()["allocated_bytes.current"]
            if on_gpu
            else 0,
            "gpu_bytes": torch.cuda.memory_allocated() if on_gpu else 0,
            "gpu_reserved_bytes": torch.cuda.memory_reserved() if on_gpu else 0,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="tiny", help="a geometry of topkv bench")
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--drafts", action="store_true", help="vLLM looks up drafts")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        load, begun, minutes = Load(options, Path(folder)), perf_counter(), 0.0
        while minutes < options.minutes:
            minutes = min(minutes + 1, options.minutes)
            while perf_counter() - begun < 60 * minutes:
                load.step()
            load.pause()
            row = {"minute": minutes, "device": options.device, "drafts": options.drafts}
            line = json.dumps(row | load.row())
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(line + "\n")


if __name__ == "__main__":
    main()
