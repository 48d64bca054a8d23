"""State of a run on disk: all that it needs to go on to the bit, weights, and curve."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import PreTrainedModel

STATE, CURVE, WEIGHTS = "state.pt", "curve.jsonl", "weights-{part}.safetensors"
PART_BYTES = 15 << 20
"""Most bytes of a file of weights."""


def save_state(
    folder: Path, model: PreTrainedModel, optimizer: torch.optim.Optimizer, run: dict[str, Any]
) -> None:
    """Write everything, so that an interrupt leaves the old or the new state.

    Beside the whole state the weights are kept, in parts and with the number of steps, for
    another machine that gets the weights alone.
    """
    folder.mkdir(parents=True, exist_ok=True)
    whole = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), **run}
    beside = folder / f"{STATE}.tmp"
    torch.save(whole, beside)
    os.replace(beside, folder / STATE)
    parts: list[dict[str, torch.Tensor]] = [{}]
    room = PART_BYTES
    for name, value in model.named_parameters():
        room -= value.nbytes
        if room < 0:
            parts.append({})
            room = PART_BYTES - value.nbytes
        parts[-1][name] = value.detach().cpu().contiguous()
    about = {"step": str(run["step"]), "parts": str(len(parts)), "plan": json.dumps(run["plan"])}
    for part, held in enumerate(parts):
        path = folder / WEIGHTS.format(part=part)
        save_file(held, path.with_suffix(".tmp"), metadata=about)
        os.replace(path.with_suffix(".tmp"), path)


def read_state(folder: Path, plan: Any, device: torch.device) -> dict[str, Any] | None:
    """Read the whole state; if it is not there the weights and their step; else None.

    Raises:
        ValueError: it is of another plan, or the parts are of different steps.
    """
    found = _whole(folder, device) or _parts(folder)
    if found is not None and found["plan"] != plan:
        raise ValueError(
            f"{folder} holds a run of other settings; name another folder, or give the same"
            f" --shape, --stages, --scale, --rate and --seed: {found['plan']}, not {plan}"
        )
    return found


def _whole(folder: Path, device: torch.device) -> dict[str, Any] | None:
    path = folder / STATE
    return torch.load(path, map_location=device, weights_only=True) if path.exists() else None


def _parts(folder: Path) -> dict[str, Any] | None:
    from safetensors import safe_open

    paths = sorted(folder.glob(WEIGHTS.format(part="*")))
    if not paths:
        return None
    model: dict[str, torch.Tensor] = {}
    abouts = []
    for path in paths:
        with safe_open(path, "pt") as opened:
            abouts.append(opened.metadata())
        model |= load_file(path)
    steps = {about["step"] for about in abouts}
    if len(steps) != 1 or len(paths) != int(abouts[0]["parts"]):
        raise ValueError(
            f"{folder}: the parts of the weights are of the steps {sorted(steps)}, and"
            f" {len(paths)} of {abouts[0]['parts']} are there; bring all of one call"
        )
    return {"model": model, "step": int(steps.pop()), "plan": json.loads(abouts[0]["plan"])}


def read_curve(folder: Path) -> list[dict[str, Any]]:
    """Read the lines of the curve so far."""
    path = folder / CURVE
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def write_curve(folder: Path, rows: list[dict[str, Any]]) -> None:
    """Write the curve anew: without lines of steps that are made again."""
    folder.mkdir(parents=True, exist_ok=True)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    (folder / CURVE).write_text(text)


def add_to_curve(folder: Path, row: dict[str, Any]) -> None:
    with (folder / CURVE).open("a") as file:
        file.write(json.dumps(row) + "\n")
