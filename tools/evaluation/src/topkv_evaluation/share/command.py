"""The command ``topkv share``. Torch is imported when it is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.progress import Progress

from topkv.errors import ConfigError
from topkv_cli import options as shared
from topkv_cli.options import answering, device_or_default, quiet_transformers
from topkv_evaluation.commands import model_option

DEFAULTS = {"algorithm": "quest", "backend": "triton_attention"}


@click.command("share", short_help="Find which layers should share a selection.")
@model_option
@shared.TRUST
@click.option(
    "--tasks",
    multiple=True,
    show_default="facts for a model of bytes, such as that checkpoint",
    help="Questions to calibrate by, as of topkv eval: those that you will ask, or alike.",
)
@click.option("--text", type=Path, help="Instead of questions, a file in UTF-8 to go on with.")
@click.option(
    "--selecting", type=click.IntRange(1), help="Layers that select; one of four by default."
)
@click.option(
    "--tokens", type=click.IntRange(2), default=4096, show_default=True, help="Of a context."
)
@click.option(
    "--prompts",
    type=click.IntRange(1),
    default=8,
    show_default=True,
    help="Questions of each task, or pieces that are spread over the text.",
)
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=64,
    show_default=True,
    help="Last tokens of a piece of --text, which are decoded one by one.",
)
@shared.CONFIG
@click.option(
    "--out", type=shared.NewFile(), help="For the configuration with the pattern, as JSON."
)
@shared.sparse
@shared.JSON
def share(
    model: Path | None,
    trust_remote_code: bool,
    tasks: tuple[str, ...],
    text: Path | None,
    selecting: int | None,
    tokens: int,
    prompts: int,
    steps: int,
    config_file: Path | None,
    out: Path | None,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Find which layers should select, and which should share the selection of a layer before.

    Questions and right answers are decoded with every layer selecting for itself, by your
    settings. The attention mass that each layer would hold with the selection of another one,
    and the effect of its attention, say which pattern loses least for each number of selecting
    layers. By default quest over triton_attention.
    """
    with answering() as stdout:
        click.echo("loading torch and the model ...", err=True)
        from topkv_evaluation.share.calibrate import Job, calibrate

        job = Job(
            config=shared.config_of(config_file, options, DEFAULTS),
            model=model,
            tasks=tasks,
            text=text,
            tokens=tokens,
            prompts=prompts,
            steps=steps,
            selecting=selecting,
            device=device_or_default(device),
            trust_remote_code=trust_remote_code,
        )
        with quiet_transformers(), Progress(console=Console(stderr=True)) as progress:
            task = progress.add_task("prompts", total=None)
            result = calibrate(job, lambda done: progress.advance(task, done))
        if out is not None:
            _write(result["config"], out)
        if as_json:
            click.echo(json.dumps(result, indent=2), file=stdout)
        else:
            from topkv_evaluation.share.view import show

            show(result, Console(file=stdout))


def _write(config: dict[str, Any], path: Path) -> None:
    try:
        path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"--out {path}", [str(error)]) from error
