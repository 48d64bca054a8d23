"""Memory under a mixed load that goes on: requests arrive, are aborted, retracted and found again.

    python plugins/sglang/benchmarks/soak.py --minutes 120 --device cpu --out soak.jsonl

Prompts of all lengths, half of which begin like others, arrive at random; some clients go away,
and the host pool holds fewer tokens than they ask for. Weights are random. A row a minute:
requests that ended, their tokens, and bytes of the scheduler's process on the host and on the GPU.
Nothing is held when the load pauses for it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic
from typing import Any

import psutil
import torch

LONGEST, PAGE, CHUNK, RUNNING, WORDS = 1024, 32, 256, 8, 4096
"""Tokens of a request, of a page and of a chunk; requests that run at a time; the vocabulary."""

SETTINGS = {
    "algorithm": "quest",
    "backend": "triton_attention",
    "budget": 256,
    "unit": 16,
    "max_requests": RUNNING,
    "page_tokens": PAGE,
    "max_request_tokens": LONGEST,
    "max_tokens": 4 * LONGEST,
}


def save_config(folder: Path) -> None:
    """Save the configuration of a small Llama."""
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=WORDS,
        hidden_size=256,
        intermediate_size=512,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        head_dim=64,
        max_position_embeddings=LONGEST,
        architectures=["LlamaForCausalLM"],
    ).save_pretrained(folder)


class Load:
    """A load on an engine, which has a process of its own.

    Args:
        options: of the command.
        folder: with the configuration of the model.

    Attributes:
        ended, aborted, tokens: how many so far.
    """

    def __init__(self, options: argparse.Namespace, folder: Path) -> None:
        import sglang

        from topkv_sglang import engine_args

        self.draw = random.Random(options.seed)
        self.ended = self.aborted = self.tokens = 0
        self.heads = [self._prompt(LONGEST // 3) for _ in range(4)]
        on_cpu = options.device == "cpu"
        self.engine = sglang.Engine(
            **engine_args(
                SETTINGS,
                model_path=str(folder),
                load_format="dummy",
                skip_tokenizer_init=True,
                device=options.device,
                dtype="float32" if on_cpu else "bfloat16",
                chunked_prefill_size=CHUNK,
                enable_mixed_chunk=True,
                schedule_conservativeness=0.01,  # so that requests are retracted
                disable_cuda_graph=on_cpu,
                sampling_backend="pytorch",
                random_seed=0,
                log_level="error",
            )
        )
        children = psutil.Process().children(recursive=True)
        (self.scheduler,) = (each for each in children if "scheduler" in _title(each))

    def _prompt(self, tokens: int) -> list[int]:
        return [self.draw.randrange(WORDS) for _ in range(tokens)]

    async def client(self, until: float) -> None:
        """Send one request after another."""
        while monotonic() < until:
            await asyncio.sleep(self.draw.random() * 0.2)
            prompt = self._prompt(self.draw.randint(1, LONGEST // 2))
            if self.draw.random() < 0.5:
                prompt = [*self.draw.choice(self.heads), *prompt[: LONGEST // 8]]
            most = self.draw.randint(1, LONGEST // 4)
            leaves = self.draw.randint(0, most) if self.draw.random() < 0.15 else None
            await self._run(prompt, most, leaves)

    async def _run(self, prompt: list[int], most: int, leaves: int | None) -> None:
        name = f"{self.draw.getrandbits(64):x}"
        how = {"temperature": 0, "max_new_tokens": most}
        stream = await self.engine.async_generate(
            input_ids=prompt, sampling_params=how, rid=name, stream=True
        )
        got: list[int] = []
        async for answer in stream:
            got = answer["output_ids"]
            if leaves is not None and len(got) >= leaves:
                self.engine.tokenizer_manager.abort_request(name)
        self.tokens += len(got)
        self.aborted += leaves is not None
        self.ended += leaves is None

    def run(self, seconds: float) -> None:
        """Run clients for a time, and until what they asked for is answered."""
        until = monotonic() + seconds

        async def all_clients() -> None:
            await asyncio.gather(*(self.client(until) for _ in range(2 * RUNNING)))

        self.engine.loop.run_until_complete(all_clients())

    def row(self) -> dict[str, Any]:
        """Return what it has done, and the bytes that the scheduler's process holds.

        Raises:
            RuntimeError: something is held, and nothing runs.
        """
        end = monotonic() + 30
        while (state := self._state())["used_pages"] or state["requests"]:
            if monotonic() > end:
                raise RuntimeError(f"held, and nothing runs: {state}")
        memory = self.scheduler.memory_info()
        return {
            "ended": self.ended,
            "aborted": self.aborted,
            "tokens": self.tokens,
            "found_tokens": state["found_tokens"],
            "replaced_pages": state["replaced_pages"],
            "resident_bytes": memory.rss,
            "gpu_bytes": _gpu_bytes(self.scheduler.pid),
        }

    def _state(self) -> dict[str, Any]:
        (state,) = self.engine.get_server_info()["internal_states"]
        found: dict[str, Any] = state["topkv"]
        return found


def _title(process: psutil.Process) -> str:
    return " ".join(process.cmdline())


def _gpu_bytes(process: int) -> int:
    """Bytes of the first GPU that a process has; 0 where there is none."""
    if not torch.cuda.is_available():
        return 0
    import pynvml

    pynvml.nvmlInit()
    running = pynvml.nvmlDeviceGetComputeRunningProcesses(pynvml.nvmlDeviceGetHandleByIndex(0))
    return sum(int(each.usedGpuMemory or 0) for each in running if each.pid == process)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=9)
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="append JSON lines here")
    options = parser.parse_args()
    with TemporaryDirectory() as folder:
        save_config(Path(folder))
        load, minutes = Load(options, Path(folder)), 0.0
        begun = monotonic()
        while minutes < options.minutes:
            minutes = min(minutes + 1, options.minutes)
            load.run(begun + 60 * minutes - monotonic())
            row = {"engine": "sglang", "minute": minutes, "device": options.device}
            line = json.dumps(row | load.row())
            print(line, flush=True)
            if options.out:
                with options.out.open("a") as out:
                    out.write(line + "\n")
        load.engine.shutdown()


if __name__ == "__main__":
    main()
