"""Train a small byte-level DeepSeek-V3.2 model, its lightning indexer included.

    PYTHONPATH=core/src:plugins/transformers/src:tools/evaluation/src \\
        python tools/evaluation/training/train_dsa.py --minutes 8 3 7 --out build/dsa

Three stages: dense attention without the indexer; the indexer alone, towards the attention of the
frozen model; both, with attention to the indexer's top-k. Each leaves its weights in a file
and as a checkpoint in ``--out``, so that ``--stages`` can go on in another process. ``scores``
measures the last weights and writes the card.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from dsa_card import write_dsa_card
from dsa_model import dsa_config, dsa_layers, set_learning
from dsa_scores import DSA_PLAN, DSA_TINY_PLAN, evaluate_dsa
from dsa_stages import COLUMNS, INDEX_RATE, SCHEDULES, TINY_SCHEDULES, TRAINED, observer, prepare
from retrieval_batches import BatchMaker
from retrieval_loop import BETAS, CLIP, WEIGHT_DECAY, Progress, Row, follow, say
from retrieval_model import save_checkpoint
from torch.nn.attention import SDPBackend, sdpa_kernel
from train_retrieval import compiled_layers, versions
from transformers import DeepseekV32ForCausalLM

from topkv_evaluation.retrieval import standard_library_text

STAGES = (*TRAINED, "scores")
OBSERVED_TOKENS = 16384
CURVE, RECORD = "curve.jsonl", "training.json"


def state_file(folder: Path, name: str) -> Path:
    """Return the file of weights in fp32 as a stage left them; no part of the checkpoint."""
    return folder / f"{name}.pt"


def build(args: argparse.Namespace) -> DeepseekV32ForCausalLM:
    """Make a new model, or read an earlier process's if the first stage is not dense."""
    lengths = [s.length for schedule in args.schedules.values() for s in schedule.stages]
    config = dsa_config(max(*lengths, *args.plan.lengths), args.topk, tiny=args.tiny)
    model = DeepseekV32ForCausalLM(config).to(args.device).train()
    if args.stages[0] != "dense":
        path = state_file(args.out, STAGES[STAGES.index(args.stages[0]) - 1])
        if not path.exists():
            raise FileNotFoundError(
                f"stage {args.stages[0]!r} goes on from {path}, which is missing; run the stages"
                " before it with the same --out first"
            )
        model.load_state_dict(torch.load(path, map_location=args.device, weights_only=True))
    return model


def cut_curve(path: Path, names: tuple[str, ...]) -> None:
    """Keep the lines of these stages alone: the others are to be trained anew."""
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    path.write_text("".join(line for line in lines if json.loads(line)["stage"] in names))


def run_stage(name: str, model: DeepseekV32ForCausalLM, args: argparse.Namespace) -> Row:
    """Train one stage and append its lines to the curve; returns steps and seconds."""
    seed = args.seed + 10 * TRAINED.index(name)
    schedule = args.schedules[name]
    maker = BatchMaker(standard_library_text("train"), model.device, seed)
    watched = BatchMaker(standard_library_text("held_out"), model.device, seed + 1)

    def sink(row: Row) -> None:
        with (args.out / CURVE).open("a") as file:
            file.write(json.dumps({"stage": name, **row}) + "\n")

    dense = None
    if name == "dense" and args.compile:
        set_learning(model, index=False, others=True)
        dense = compiled_layers(model, schedule, maker, dsa_layers(model))
    say(f"stage {name}: {args.minutes[TRAINED.index(name)]:g} minutes")
    observe = observer(name, model, watched, args.topk, args.observed)
    progress = Progress(COLUMNS[:3] if name == "dense" else COLUMNS, observe, sink)
    seconds = 60 * args.minutes[TRAINED.index(name)]
    take = prepare(name, model, args.topk, dense)
    steps, took = follow(schedule, seconds, maker, take, progress)
    return {"steps": steps, "seconds": took, "compiled": dense is not None}


def settings(args: argparse.Namespace, model: DeepseekV32ForCausalLM) -> dict[str, Any]:
    flags = [f"--{flag}" for flag in ("compile", "tiny") if getattr(args, flag)]
    minutes = " ".join(f"{value:g}" for value in args.minutes)
    command = ["train_dsa.py --out DIR", *flags, f"--minutes {minutes}", f"--topk {args.topk}"]
    return {
        "minutes": args.minutes,
        "seed": args.seed,
        "topk": args.topk,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "layers": model.config.num_hidden_layers,
        "schedules": {name: asdict(schedule) for name, schedule in args.schedules.items()},
        "optimizer": "AdamW",
        "betas": BETAS,
        "weight_decay": WEIGHT_DECAY,
        "gradient_clip": CLIP,
        "index_rate": INDEX_RATE,
        "text_bytes": len(standard_library_text("train")),
        "command": " ".join([*command, f"--seed {args.seed}"]),
    }


def attention_kernels(device: str) -> AbstractContextManager[None]:
    """Allow only kernels whose choice follows from shapes, on a GPU, with any version of torch."""
    if not device.startswith("cuda"):
        return nullcontext()
    kernels = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(kernels)


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="folder of the checkpoint")
    parser.add_argument(
        "--minutes",
        type=float,
        nargs=3,
        default=[8.0, 3.0, 7.0],
        metavar=("DENSE", "WARM_UP", "SPARSE"),
        help="of each stage (default 8 3 7)",
    )
    parser.add_argument("--stages", nargs="+", choices=STAGES, default=list(STAGES))
    parser.add_argument("--topk", type=int, help="tokens a row attends to (default 256)")
    parser.add_argument("--compile", action="store_true", help="compile layers of dense attention")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--tiny", action="store_true", help="a toy, to try the script")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args(arguments)
    if args.stages != [name for name in STAGES if name in args.stages]:
        parser.error(f"--stages go in this order, each once: {' '.join(STAGES)}")
    args.topk = args.topk or (16 if args.tiny else 256)
    args.schedules = TINY_SCHEDULES if args.tiny else SCHEDULES
    args.plan = DSA_TINY_PLAN if args.tiny else DSA_PLAN
    args.observed = 384 if args.tiny else OBSERVED_TOKENS
    return args


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    torch.manual_seed(args.seed)
    # Index scores are products of fp32, as in Transformers; TF32 is finer than the bf16 that the
    # weights are saved in.
    torch.set_float32_matmul_precision("high")
    args.out.mkdir(parents=True, exist_ok=True)
    model, target = build(args), args.out / RECORD
    began = time.monotonic()
    record: dict[str, Any] = {"settings": settings(args, model), "stages": {}}
    earlier = STAGES[: STAGES.index(args.stages[0])]
    if earlier:
        known = json.loads(target.read_text())["stages"]
        record["stages"] = {name: known[name] for name in earlier if name in known}
    cut_curve(args.out / CURVE, earlier)
    record["versions"] = versions(model.device)
    say(f"{record['settings']['parameters'] / 1e6:.2f} M parameters")
    with attention_kernels(args.device):
        for name in (stage for stage in args.stages if stage != "scores"):
            record["stages"][name] = run_stage(name, model, args)
            torch.save(model.state_dict(), state_file(args.out, name))
            save_checkpoint(model, args.out)
            target.write_text(json.dumps(record, indent=1) + "\n")
        if "scores" in args.stages:
            saved = save_checkpoint(model, args.out)
            topks = (args.topk, 2 * args.topk)
            record["scores"] = evaluate_dsa(saved, args.seed, args.plan, topks)
            target.write_text(json.dumps(record, indent=1) + "\n")
            (args.out / "README.md").write_text(write_dsa_card(args.out))
    say(f"written to {args.out} after {time.monotonic() - began:.0f} s")


if __name__ == "__main__":
    main(sys.argv[1:])
