"""Train the small byte-level Llama that answers questions about facts far back in its context.

    PYTHONPATH=tools/evaluation/src python tools/evaluation/training/train_retrieval.py \\
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
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
import transformers
from model_card import write_model_card
from retrieval_batches import Batch, BatchMaker
from retrieval_loop import (
    BETAS,
    CLIP,
    WEIGHT_DECAY,
    Progress,
    adamw,
    follow,
    say,
    set_rate,
    update,
)
from retrieval_model import Layers, causal_logits, retrieval_config, save_checkpoint
from retrieval_schedule import LONG, STANDARD, TINY, Schedule
from retrieval_scores import PLAN, TINY_PLAN, answer_hits, evaluate, nats
from torch import Tensor
from transformers import LlamaForCausalLM, PreTrainedModel

from topkv_evaluation.retrieval import standard_library_text

COLUMNS = ("text_nats", "answer_nats", "exact")


def make_optimizer(model: PreTrainedModel, rate: float) -> torch.optim.AdamW:
    return adamw(model.parameters(), rate)


def losses(model: PreTrainedModel, batch: Batch, layers: Layers) -> tuple[Tensor, Tensor]:
    """Return the loss, and [3] fp32: loss of all bytes, of answers, share of exact answers."""
    device = batch.tokens.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits = causal_logits(model, batch.tokens, layers)
    each = nats(logits, batch.tokens)
    text = each.mean()
    answer = each.gather(1, batch.answers.flatten(1) - 1).mean()
    exact = answer_hits(logits.detach(), batch.tokens, batch.answers).float().mean()
    return text + answer, torch.stack([text.detach(), answer.detach(), exact])


def step(
    model: PreTrainedModel, optimizer: torch.optim.AdamW, batch: Batch, layers: Layers
) -> Tensor:
    """Make one update; return the report of ``losses``, on the device."""
    loss, report = losses(model, batch, layers)
    loss.backward()
    update(optimizer)
    return report


def compiled_layers(
    model: PreTrainedModel, schedule: Schedule, maker: BatchMaker, layers: Layers
) -> Layers | None:
    """Compile decoder layers for every stage's shape; None, with a message, if that fails."""
    began = time.monotonic()
    # One entry for each stage's shape and mode; beyond the limit layers would run uncompiled.
    torch._dynamo.config.recompile_limit = 64
    layers = [torch.compile(layer, dynamic=False) for layer in layers]
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
    model: PreTrainedModel,
    schedule: Schedule,
    maker: BatchMaker,
    seconds: float,
    layers: Layers,
    progress: Progress,
) -> tuple[int, float]:
    """Train for ``seconds``; returns the number of steps and the seconds it took."""
    optimizer = make_optimizer(model, schedule.peak)

    def take(batch: Batch, rate: float) -> Tensor:
        set_rate(optimizer, rate)
        return step(model, optimizer, batch, layers)

    return follow(schedule, seconds, maker, take, progress)


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
    own, progress = model.model.layers, Progress(COLUMNS)
    layers = compiled_layers(model, schedule, maker, own) if args.compile else None
    steps, seconds = train(model, schedule, maker, 60 * args.minutes, layers or own, progress)
    record: dict[str, Any] = {"settings": settings(args, schedule, count)}
    record |= {"versions": versions(device), "compiled": layers is not None}
    record |= {"steps": steps, "seconds": seconds, "curve": progress.curve}
    saved = save_checkpoint(model, args.out)
    target = args.out / "training.json"
    target.write_text(json.dumps(record, indent=1) + "\n")
    record["scores"] = evaluate(saved, args.seed, TINY_PLAN if args.tiny else PLAN)
    target.write_text(json.dumps(record, indent=1) + "\n")
    (args.out / "README.md").write_text(write_model_card(record))
    say(f"written to {args.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
