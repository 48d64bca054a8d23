"""Train the block indexes of a small MiniMax-M3 that ``train_mixture.py`` made without.

    PYTHONPATH=core/src:plugins/transformers/src:tools/evaluation/src \\
        python tools/evaluation/training/train_gate.py \\
        --base build/mixture-blocks/checkpoint --out build/gate

The model is frozen; the indexes learn where its attention falls. The checkpoint, its curve and
``training.json`` are in ``--out`` then: a model that selects for itself, in prompts too.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from gate_model import GateLayer, with_index
from mixture_plan import TINY, WHOLE, Batches, Plan, Stage
from retrieval_loop import adamw, say, set_rate, update
from retrieval_model import causal_logits, save_checkpoint
from torch import Tensor
from torch.utils.data import DataLoader
from train_retrieval import versions
from transformers import MiniMaxM3VLForCausalLM

STAGES = (Stage(2048, 32, 600, WHOLE), Stage(4096, 16, 600, WHOLE), Stage(8192, 8, 200, WHOLE))
LINE_STEPS = 25
REPORT = ("loss", "held", "best")
"""Figures of a line: loss, attention mass of the selected blocks, and of the best blocks; means
over layers with an index, and over documents that were not trained on before."""


def some_rows(count: int, block: int, length: int, seed: int) -> Tensor:
    """Draw positions ``[count]`` that have a block before them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(block, length, (count,), generator=generator)


def train(model: MiniMaxM3VLForCausalLM, plan: Plan, args: argparse.Namespace) -> list[Any]:
    """Run all steps of the plan; return lines of the curve, each of the steps since the last."""
    learning = [p for p in model.parameters() if p.requires_grad]
    optimizer, device = adamw(learning, plan.peak), model.device
    loader = DataLoader(
        Batches(plan), batch_size=None, sampler=range(plan.steps),
        num_workers=args.workers, pin_memory=device.type == "cuda",
    )  # fmt: skip
    layers = [GateLayer(layer, torch.empty(0)) for layer in model.model.layers]
    curve, since = [], torch.zeros(len(REPORT), device=device)
    for step, (text, *_) in enumerate(loader):
        rows = some_rows(args.rows, args.block, text.shape[1], plan.seed + step).to(device)
        for layer in layers:
            layer.rows = rows
        set_rate(optimizer, plan.rate(step))
        with torch.autocast(device.type, dtype=torch.bfloat16, enabled=device.type == "cuda"):
            causal_logits(model, text.to(device).long(), layers)
        report = torch.stack([each.report for each in layers if each.report is not None]).mean(0)
        report[0].backward()
        update(optimizer)
        since = since + report.detach()
        if (step + 1) % LINE_STEPS == 0 or step + 1 == plan.steps:
            past = step % LINE_STEPS + 1
            means = dict(zip(REPORT, (since / past).tolist(), strict=True))
            row = {"step": step + 1, "length": text.shape[1]}
            curve.append(row | {name: round(value, 5) for name, value in means.items()})
            say(json.dumps(curve[-1]))
            since = torch.zeros_like(since)
    return curve


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--base", type=Path, required=True, help="checkpoint without indexes")
    parser.add_argument("--out", type=Path, required=True, help="folder of the new checkpoint")
    parser.add_argument("--block", type=int, default=16, help="tokens of a block")
    parser.add_argument("--blocks", type=int, default=16, help="that a row attends to")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps of all stages")
    parser.add_argument("--rate", type=float, default=2e-3, help="the peak")
    parser.add_argument("--rows", type=int, default=128, help="of a document that teach, a step")
    parser.add_argument("--seed", type=int, default=100, help="of documents; not the base's")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--tiny", action="store_true", help="a few steps, to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def main(arguments: Sequence[str]) -> None:
    args = parse(arguments)
    torch.manual_seed(args.seed)
    torch.set_float32_matmul_precision("high")
    stages = TINY if args.tiny else STAGES
    plan = Plan(stages, args.seed, args.rate, warmup=min(50, *(s.steps for s in stages)))
    plan = plan.scaled(args.scale)
    base = MiniMaxM3VLForCausalLM.from_pretrained(
        args.base, dtype=torch.float32, local_files_only=True
    )
    model = with_index(base.to(args.device), args.block, args.blocks)
    learning = sum(p.numel() for p in model.parameters() if p.requires_grad)
    say(f"{learning / 1e3:.0f} thousand parameters of indexes, {plan.steps} steps")
    began = time.monotonic()
    curve = train(model, plan, args)
    record = {
        "base": hashlib.sha256((args.base / "model.safetensors").read_bytes()).hexdigest(),
        "block": args.block,
        "blocks": args.blocks,
        "rows": args.rows,
        "scale": args.scale,
        "rate": args.rate,
        "seed": args.seed,
        "parameters": learning,
        "seconds": round(time.monotonic() - began, 1),
        "versions": versions(model.device),
        "curve": curve,
    }
    save_checkpoint(model, args.out)
    (args.out / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    say(f"written to {args.out}")


if __name__ == "__main__":
    main(sys.argv[1:])
