"""The command ``topkv calibrate double_sparsity``. Torch is imported when it is run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from topkv.errors import ConfigError
from topkv_double_sparsity.calibration import write


@click.group("calibrate", short_help="Measure what an algorithm has to know about a model.")
def calibrate() -> None:
    """Measure what an algorithm has to know about a model, once, offline."""


@calibrate.command("double_sparsity")
@click.option("--model", type=Path, required=True, help="Directory of a model and its tokenizer.")
@click.option(
    "--trust-remote-code",
    is_flag=True,
    help="Run Python code that comes with the model. Off by default: read that code first.",
)
@click.option("--text", type=Path, required=True, help="A text file, UTF-8.")
@click.option(
    "--samples",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Most blocks; they are spread evenly over the text.",
)
@click.option(
    "--block", type=click.IntRange(2), default=512, show_default=True, help="Tokens of a block."
)
@click.option("--device", help="A torch device; by default the GPU if there is one.")
@click.option("--output", type=Path, required=True, help="JSON file to write.")
def double_sparsity(
    model: Path,
    trust_remote_code: bool,
    text: Path,
    samples: int,
    block: int,
    device: str | None,
    output: Path,
) -> None:
    """Rank the key channels of a local model, for the parameter `calibration`."""
    try:
        content = text.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {text}", [f"cannot be read: {error}"]) from error
    if not output.parent.is_dir():
        raise ConfigError(f"--output {output}", ["there is no such directory; make it first"])
    collect = _collect()
    import torch

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    loaded, tokenizer = collect.load(model, device, trust_remote_code=trust_remote_code)
    tokens = torch.tensor(tokenizer(content)["input_ids"], dtype=torch.int64)
    blocks = collect.blocks_of(tokens, block, samples) if len(tokens) else []
    _check(loaded, blocks, block)
    importance, ranges = collect.importance_of(loaded, blocks)
    try:
        write(output, importance, ranges)
    except OSError as error:
        raise ConfigError(f"--output {output}", [str(error)]) from error
    measured = sum(map(len, blocks))
    done = f"{len(importance)} layers, measured on {measured} tokens, written to {output}"
    click.echo(done, err=True)


def _collect() -> Any:
    try:
        from topkv_double_sparsity import collect
    except ImportError as error:
        raise ConfigError(
            "calibrating needs Transformers",
            [f"{error}; pip install 'topkv-double-sparsity[calibrate]'"],
        ) from error
    return collect


def _check(model: Any, blocks: list[Any], block: int) -> None:
    reasons = []
    tokens = sum(map(len, blocks))
    if tokens < 2:
        reasons.append(f"the text has {tokens} tokens; expected at least 2, better thousands")
    positions = getattr(model.config.get_text_config(), "max_position_embeddings", None)
    if positions is not None and block > positions:
        reasons.append(f"--block {block} exceeds the {positions} positions of the model")
    if reasons:
        raise ConfigError("nothing was calibrated", reasons)
