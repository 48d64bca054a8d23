"""Train the small byte-level Llama that answers questions about facts far back in its context.

    PYTHONPATH=plugins/transformers/src python plugins/transformers/training/train_retrieval.py \\
        --minutes 6 --out build/checkpoint

Writes weights, configuration, tokenizer, model card and ``training.json`` (settings, curve,
versions, scores) to ``--out``. Evaluation follows the training and adds less than a minute.
"""

from __future__ import annotations

import argparse
import json
import platform
import sys
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from model_card import write_model_card
from retrieval_batches import Batch, BatchMaker
from retrieval_model import causal_logits, retrieval_config, save_checkpoint
from retrieval_schedule import LONG, STANDARD, TINY, Schedule
from retrieval_scores import PLAN, TINY_PLAN, answer_hits, evaluate, nats
from torch import Tensor
from transformers import LlamaForCausalLM

from topkv_transformers.retrieval import standard_library_text

LOG_SECONDS = 10.0
STEPS_IN_FLIGHT = 2
CLIP = 1.0
BETAS = (0.9, 0.95)
WEIGHT_DECAY = 0.1
Layers = Sequence[Callable[..., Tensor]]


def make_optimizer(model: LlamaForCausalLM, rate: float) -> torch.optim.AdamW:
    """AdamW that decays matrices and leaves the gains of the norms alone."""
    parameters = list(model.parameters())
    groups = [
        {"params": [p for p in parameters if p.ndim > 1], "weight_decay": WEIGHT_DECAY},
        {"params": [p for p in parameters if p.ndim < 2], "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=rate, betas=BETAS, fused=True)


def losses(model: LlamaForCausalLM, batch: Batch, layers: Layers) -> tuple[Tensor, Tensor]:
    """The loss, and [3] fp32: loss of all bytes, loss of the answers, share of exact answers."""
    device = batch.tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits = causal_logits(model, batch.tokens, layers)
    each = nats(logits, batch.tokens)
    text = each.mean()
    answer = each.gather(1, batch.answers.flatten(1) - 1).mean()
    exact = answer_hits(logits.detach(), batch.tokens, batch.answers).float().mean()
    return text + answer, torch.stack([text.detach(), answer.detach(), exact])


def step(
    model: LlamaForCausalLM, optimizer: torch.optim.AdamW, batch: Batch, layers: Layers
) -> Tensor:
    """One update; returns what ``losses`` reports, on the device."""
    loss, report = losses(model, batch, layers)
    loss.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
    # One overflow would spoil the weights for good: a gradient that is not finite becomes zero.
    for parameter in model.parameters():
        parameter.grad.nan_to_num_(nan=0.0, posinf=0.0, neginf=0.0)
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return report


class Progress:
    """Means of the reports since the last line; prints one every ten seconds and keeps it.

    Reports are added up on the device and read only when a line is printed.
    """

    def __init__(self) -> None:
        self.curve: list[dict[str, float]] = []
        self._began = self._printed = time.monotonic()
        self._sum: Tensor | float = 0.0
        self._count = 0

    def add(self, report: Tensor) -> None:
        self._sum = self._sum + report
        self._count += 1

    def due(self) -> bool:
        return time.monotonic() - self._printed >= LOG_SECONDS

    def line(self, number: int, length: int, rate: float) -> None:
        """Print and keep the means, and begin anew."""
        if not isinstance(self._sum, Tensor):
            return
        text, answer, exact = (self._sum / self._count).tolist()
        now = time.monotonic()
        speed = self._count / (now - self._printed)
        row = {"seconds": now - self._began, "step": number, "length": length, "rate": rate}
        row |= {"text_nats": text, "answer_nats": answer, "exact": exact, "steps_per_s": speed}
        self.curve.append({key: round(value, 6) for key, value in row.items()})
        say(
            f"{now - self._began:6.0f} s  step {number:6d}  length {length:5d}  rate {rate:.1e}"
            f"  text {text:.3f}  answers {answer:.3f}  exact {exact:6.1%}  {speed:5.1f} steps/s"
        )
        self._printed, self._sum, self._count = now, 0.0, 0


def say(text: str) -> None:
    print(text, flush=True)


def compiled_layers(
    model: LlamaForCausalLM, schedule: Schedule, maker: BatchMaker
) -> Layers | None:
    """Compiled decoder layers, made for every stage's shape; None, said aloud, if that fails."""
    began = time.monotonic()
    # One entry for each stage's shape and mode; beyond the limit layers would run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    layers = [torch.compile(layer, dynamic=False) for layer in model.model.layers]
    try:
        for stage in schedule.stages:
            loss, _ = losses(model, maker(stage.rows, stage.length), layers)
            loss.backward()
            say(f"compiled for length {stage.length}: {time.monotonic() - began:.0f} s")
    except Exception as error:
        # Whatever the compiler raises, the run is worth more than the speed.
        say(f"going on uncompiled, because compiling failed: {type(error).__name__}: {error}")
        return None
    finally:
        model.zero_grad(set_to_none=True)
    return layers


def train(
    model: LlamaForCausalLM,
    schedule: Schedule,
    maker: BatchMaker,
    seconds: float,
    layers: Layers | None = None,
) -> tuple[list[dict[str, float]], int, float]:
    """Train for ``seconds``; returns the curve, the number of steps and the seconds it took."""
    layers = model.model.layers if layers is None else layers
    optimizer = make_optimizer(model, schedule.peak)
    progress, in_flight, number = Progress(), deque[torch.cuda.Event](), 0
    began = time.monotonic()
    stage = schedule.stage(0.0)
    while (fraction := (time.monotonic() - began) / seconds) < 1:
        rate = schedule.rate(fraction)
        if progress.due() or schedule.stage(fraction) is not stage:
            progress.line(number, stage.length, rate)
            stage = schedule.stage(fraction)
        for group in optimizer.param_groups:
            group["lr"] = rate
        progress.add(step(model, optimizer, maker(stage.rows, stage.length), layers))
        number += 1
        if model.device.type == "cuda":
            in_flight.append(torch.cuda.Event())
            in_flight[-1].record()
            # The clock drives the schedule, so the host may be only a few steps ahead.
            if len(in_flight) > STEPS_IN_FLIGHT:
                in_flight.popleft().synchronize()
    progress.line(number, stage.length, schedule.rate(1.0))
    return progress.curve, number, time.monotonic() - began


def settings(args: argparse.Namespace, schedule: Schedule, parameters: int) -> dict[str, Any]:
    flags = [f"--{flag}" for flag in ("long", "compile", "tiny") if getattr(args, flag)]
    command = " ".join(["train_retrieval.py --out DIR", *flags])
    command += f" --minutes {args.minutes:g} --seed {args.seed}"
    return {
        "minutes": args.minutes,
        "seed": args.seed,
        "parameters": parameters,
        "schedule": asdict(schedule),
        "optimizer": "AdamW",
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "gradient_clip": CLIP,
        "text_bytes": len(standard_library_text("train")),
        "command": command,
    }


def versions(device: torch.device) -> dict[str, str]:
    on_gpu = device.type == "cuda"
    return {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "device": torch.cuda.get_device_name(device) if on_gpu else "CPU",
    }


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument("--minutes", type=float, default=6.0, help="of training (default 6)")
    parser.add_argument("--long", action="store_true", help="add a stage of 32768 tokens")
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    device = torch.device(args.device)
    torch.manual_seed(args.seed)
    schedule = Schedule(TINY if args.tiny else LONG if args.long else STANDARD)
    max_length = max(32768, *(stage.length for stage in schedule.stages))
    model = LlamaForCausalLM(retrieval_config(max_length, tiny=args.tiny)).to(device).train()
    maker = BatchMaker(standard_library_text("train"), device, args.seed)
    count = sum(parameter.numel() for parameter in model.parameters())
    say(f"{count / 1e6:.2f} M parameters on {versions(device)['device']}")
    layers = compiled_layers(model, schedule, maker) if args.compile else None
    curve, steps, seconds = train(model, schedule, maker, 60 * args.minutes, layers)
    record = {"settings": settings(args, schedule, count), "versions": versions(device)}
    record |= {"compiled": layers is not None, "steps": steps, "seconds": seconds, "curve": curve}
    saved = save_checkpoint(model, args.out)
    target = args.out / "training.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    record["scores"] = evaluate(saved, args.seed, TINY_PLAN if args.tiny else PLAN)
    target.write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "README.md").write_text(write_model_card(record))
    say(f"written to {args.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
