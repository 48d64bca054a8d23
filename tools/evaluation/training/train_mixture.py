"""Train a small byte-level model on the mixture of tasks, in as many calls as it takes.

    PYTHONPATH=tools/evaluation/src:core/src python tools/evaluation/training/train_mixture.py \\
        --shape small --minutes 8 --out build/mixture-small

Every call goes on where the last one ended: the state is in ``--out``. When the steps of the
plan are done it writes the checkpoint into ``--out/checkpoint``.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import time
from collections import deque
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from gate_model import gate_config
from mixture_card import write_card
from mixture_plan import FURTHER, KINDS, LONG, STANDARD, TINY, Batch, Batches, Plan
from mixture_scores import METHOD, WORDS, scores
from mixture_state import CURVE, add_to_curve, read_curve, read_state, save_state, write_curve
from retrieval_batches import BatchMaker
from retrieval_loop import STEPS_IN_FLIGHT, adamw, say, set_rate, update
from retrieval_model import Layers, LlamaForCausalLM, causal_logits, save_checkpoint
from retrieval_scores import nats
from torch import Tensor
from torch.utils.data import DataLoader
from train_retrieval import compiled_layers, versions
from transformers import AutoConfig, LlamaConfig, MiniMaxM3VLForCausalLM, PreTrainedModel

from topkv_evaluation.retrieval import standard_library_text

STAGES = {"standard": STANDARD, "long": LONG, "further": FURTHER, "tiny": TINY}
LINE_STEPS = 50
SAVE_SECONDS = 120.0
RAMP_STEPS = 100
"""Steps during which the rate rises behind weights that came without their optimizer."""

SHAPES = {
    "small": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
              "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512},
    "deep": {"hidden_size": 128, "num_hidden_layers": 8, "num_attention_heads": 8,
             "num_key_value_heads": 2, "head_dim": 128, "intermediate_size": 384},
    "blocks": {"hidden_size": 256, "num_hidden_layers": 6, "num_attention_heads": 8,
               "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 512},
    "tiny-blocks": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
                    "num_key_value_heads": 2, "head_dim": 64, "intermediate_size": 64},
    "tiny": {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2,
             "num_key_value_heads": 1, "head_dim": 16, "intermediate_size": 64},
}  # fmt: skip
"""Sizes of models by shape. In bfloat16 ``small`` has 8.8 MB, ``deep`` 7.7 MB. Shapes of
``BLOCKS`` are MiniMax-M3s without experts, to which ``train_gate.py`` gives indexes; the others
are Llamas."""

BLOCKS = ("blocks", "tiny-blocks")

WIDTHS = (*SHAPES["small"], "vocab_size")
"""Settings that must be equal in weights to begin from."""

REPORT = ("text", "answer", *(f"{kind} right" for kind in KINDS), *KINDS)
"""Sums in a line: losses, and by kind the shares of right answer bytes and their documents."""


def model_of(shape: str, positions: int) -> PreTrainedModel:
    """Make a model of 256 bytes with random weights.

    Args:
        shape: one of ``SHAPES``.
        positions: tokens that it is made for.
    """
    if shape in BLOCKS:
        return MiniMaxM3VLForCausalLM(gate_config(SHAPES[shape], positions))
    config = LlamaConfig(
        **SHAPES[shape],
        vocab_size=256,
        max_position_embeddings=positions,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=0,
        attn_implementation="sdpa",
    )
    return LlamaForCausalLM(config)


def losses(model: PreTrainedModel, batch: Batch, layers: Layers) -> tuple[Tensor, Tensor]:
    """Return the loss, and a report, see ``REPORT``.

    The loss is the mean of all bytes and, beside it, the mean of the answers: that of each
    document counts alike, however long it is.
    """
    text, marks, kinds = batch
    tokens, device = text.long(), text.device.type
    with torch.autocast(device, dtype=torch.bfloat16, enabled=device == "cuda"):
        logits = causal_logits(model, tokens, layers)
    each, asked = nats(logits, tokens), marks[:, 1:].float()
    count = asked.sum(1)
    has = (count > 0).float()
    answer = ((each * asked).sum(1) / count.clamp(min=1)).sum() / has.sum().clamp(min=1)
    plain = each.mean()
    hits = (logits[:, :-1].detach().argmax(-1) == tokens[:, 1:]).float()
    right = (hits * asked).sum(1) / count.clamp(min=1)
    by_kind = torch.zeros(2, len(KINDS), device=tokens.device)
    by_kind.index_add_(1, kinds, torch.stack([right * has, has]))
    ends = torch.stack([plain.detach(), answer.detach()])
    return plain + answer, torch.cat([ends, by_kind.flatten()])


def line_of(total: Tensor, steps: int, step: int, length: int, rate: float) -> dict[str, Any]:
    """Make a line of the curve, from the sum of the reports of ``steps`` steps."""
    sums = dict(zip(REPORT, total.tolist(), strict=True))
    row = {"step": step, "length": length, "rate": round(rate, 7)}
    row |= {name: round(sums[name] / steps, 4) for name in REPORT[:2]}
    shares = {kind: round(sums[f"{kind} right"] / sums[kind], 4) for kind in KINDS if sums[kind]}
    return {**row, "right": shares}


def begin_from(model: PreTrainedModel, folder: Path) -> str:
    """Take over the weights of a checkpoint; returns its checksum.

    Raises:
        ValueError: it is of another shape.
    """
    found = AutoConfig.from_pretrained(folder, local_files_only=True)
    said = {name: getattr(found, name, None) for name in WIDTHS}
    wanted = {name: getattr(model.config, name) for name in WIDTHS}
    if said != wanted:
        raise ValueError(
            f"{folder} is a model of {said}, not of {wanted}; name its --shape, or no --weights"
        )
    taken = type(model).from_pretrained(folder, dtype=torch.float32, local_files_only=True)
    model.load_state_dict(taken.state_dict())
    return hashlib.sha256((folder / "model.safetensors").read_bytes()).hexdigest()


class Training:
    """A run, from its beginning or from what ``folder`` holds of it.

    Args:
        plan: plan of the steps.
        shape: one of ``SHAPES``.
        folder: folder of state and curve.
        device: where it is trained.
        weights: folder of a checkpoint of this shape to begin from; random weights if None.

    Raises:
        ValueError: the folder holds a run of other settings, or ``weights`` another shape.
    """

    def __init__(
        self,
        plan: Plan,
        shape: str,
        folder: Path,
        device: torch.device,
        weights: Path | None = None,
    ) -> None:
        torch.manual_seed(plan.seed)
        self.plan, self.folder, self.device = plan, folder, device
        positions = max(32768, *(stage.length for stage in plan.stages))
        self.model = model_of(shape, positions).to(device).train()
        begun = begin_from(self.model, weights) if weights else None
        self.optimizer = adamw(self.model.parameters(), plan.peak)
        about = {"shape": shape, "weights": begun, "plan": asdict(plan)}
        self.about = json.loads(json.dumps(about))
        self.step = self.began_at = 0
        self.seconds, self.ramp = 0.0, 0
        self.sums = torch.zeros(len(REPORT), device=device)
        found = read_state(folder, self.about, device)
        if found is not None:
            self._go_on(found)
        kept = [row for row in read_curve(folder) if row["step"] <= self.step]
        write_curve(folder, kept)

    def _go_on(self, found: dict[str, Any]) -> None:
        # The head is the embedding and stands in the state of the whole model alone.
        self.model.load_state_dict(found["model"], strict="optimizer" in found)
        self.step = self.began_at = found["step"]
        if "optimizer" in found:
            self.optimizer.load_state_dict(found["optimizer"])
            self.sums, self.seconds = found["sums"], found["seconds"]
            self.ramp = found["ramp"]
            self.began_at = found["began_at"]
        else:
            self.ramp = RAMP_STEPS
            say("weights alone: the optimizer begins anew, with a ramp")

    def save(self) -> None:
        run = {"step": self.step, "sums": self.sums, "seconds": self.seconds}
        run |= {"ramp": self.ramp, "began_at": self.began_at, "plan": self.about}
        save_state(self.folder, self.model, self.optimizer, run)

    def rate(self) -> float:
        since = self.step - self.began_at
        ramp = min(1.0, (since + 1) / self.ramp) if self.ramp else 1.0
        return ramp * self.plan.rate(self.step)

    def take(self, batch: Batch, layers: Layers) -> None:
        """Take one step, and write a line of the curve where one is due."""
        rate = self.rate()
        set_rate(self.optimizer, rate)
        loss, report = losses(self.model, batch, layers)
        loss.backward()
        update(self.optimizer)
        self.sums += report
        self.step += 1
        if self.step % LINE_STEPS == 0 or self.step == self.plan.steps:
            past = LINE_STEPS if self.step % LINE_STEPS == 0 else self.step % LINE_STEPS
            row = line_of(self.sums, past, self.step, batch[0].shape[1], rate)
            add_to_curve(self.folder, row)
            self.sums = torch.zeros_like(self.sums)
            say(json.dumps(row))

    def go(self, seconds: float, layers: Layers, workers: int) -> None:
        """Take steps until the plan or ``seconds`` end; the state is saved now and then."""
        began = saved = time.monotonic()
        before = self.seconds
        on_gpu = self.device.type == "cuda"
        loader = DataLoader(
            Batches(self.plan), batch_size=None, sampler=range(self.step, self.plan.steps),
            num_workers=workers, pin_memory=on_gpu, prefetch_factor=8 if workers else None,
        )  # fmt: skip
        in_flight = deque[torch.cuda.Event]()
        for batch in loader:
            text, marks, kinds = (each.to(self.device, non_blocking=True) for each in batch)
            self.take((text, marks, kinds), layers)
            if on_gpu:
                in_flight.append(torch.cuda.Event())
                in_flight[-1].record()
                if len(in_flight) > STEPS_IN_FLIGHT:
                    in_flight.popleft().synchronize()
            now = time.monotonic()
            self.seconds = before + now - began
            if now - began >= seconds:
                break
            if now - saved >= SAVE_SECONDS:
                self.save()
                saved = time.monotonic()
        self.save()


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--out", type=Path, required=True, help="of state, curve and checkpoint")
    parser.add_argument("--shape", choices=[*SHAPES], default="small")
    parser.add_argument("--stages", choices=[*STAGES], default="standard")
    parser.add_argument("--scale", type=float, default=1.0, help="of the steps of all stages")
    parser.add_argument("--rate", type=float, default=2e-3, help="the peak")
    parser.add_argument("--weights", type=Path, help="folder of a checkpoint to begin from")
    parser.add_argument("--minutes", type=float, default=8.0, help="of training in this call")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--compile", action="store_true", help="compile the decoder layers")
    parser.add_argument("--workers", type=int, default=0, help="processes that make batches")
    parser.add_argument("--lengths", type=int, nargs="+", default=[2048, 4096], help="of scores")
    parser.add_argument("--questions", type=int, default=32, help="of a task's score")
    parser.add_argument("--score-tasks", nargs="*", default=[*WORDS])
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    return parser.parse_args(arguments)


def _compiled(run: Training, own: Layers) -> Layers | None:
    """Compile layers, for the shapes of the steps that are left; None if that fails."""
    left = {(s.length, s.rows): s for s in run.plan.stages if run.plan.reaches(s) > run.step}
    maker = BatchMaker(standard_library_text("train"), run.device, 0)
    return compiled_layers(run.model, SimpleNamespace(stages=[*left.values()]), maker, own)


def finish(run: Training, args: argparse.Namespace) -> None:
    """Write the checkpoint with its record, card and curve, and score it as it is saved."""
    target = args.out / "checkpoint"
    saved = save_checkpoint(run.model, target)
    flags = f"--shape {args.shape} --stages {args.stages} --scale {args.scale:g}"
    flags += f" --weights {args.weights.name}" if args.weights else ""
    record = {
        **run.about,
        "config": saved.config.to_dict() | {"dtype": "bfloat16"},
        "parameters": sum(parameter.numel() for parameter in saved.parameters()),
        "steps": run.step,
        "tokens": run.plan.tokens,
        "seconds": run.seconds,
        "weights_alone_at_step": run.began_at,
        "versions": versions(run.device),
        "command": f"train_mixture.py {flags} --rate {args.rate:g} --seed {args.seed} --out DIR",
        "method": METHOD,
        "scores": scores(saved, target, args.score_tasks, args.lengths, args.questions),
    }
    (target / "training.json").write_text(json.dumps(record, indent=1) + "\n")
    (target / "README.md").write_text(write_card(record))
    (target / CURVE).write_text((args.out / CURVE).read_text())
    say(f"written to {target}")


def main(arguments: list[str]) -> None:
    args = parse(arguments)
    device = torch.device(args.device)
    plan = Plan(STAGES[args.stages], args.seed, args.rate).scaled(args.scale)
    run = Training(plan, args.shape, args.out, device, args.weights)
    count = sum(parameter.numel() for parameter in run.model.parameters())
    say(f"{count / 1e6:.2f} M parameters, step {run.step} of {plan.steps}, {plan.tokens} tokens")
    own = run.model.model.layers
    layers = _compiled(run, own) if args.compile and run.step < plan.steps else None
    if run.step < plan.steps:
        run.go(60 * args.minutes, layers or own, args.workers)
    say(f"step {run.step} of {plan.steps}, {run.seconds:.0f} seconds of training so far")
    if run.step == plan.steps:
        finish(run, args)


if __name__ == "__main__":
    main(sys.argv[1:])
