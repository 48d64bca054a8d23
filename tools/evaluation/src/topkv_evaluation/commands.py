"""The commands ``topkv demo`` and ``topkv generate``. Torch is imported when one is run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, TextIO

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from topkv.errors import ConfigError
from topkv_cli import options as shared
from topkv_cli.options import answering, device_or_default, quiet_transformers


class ModelFolder(click.ParamType):
    """A directory with a model, or ``smollm2``, which is fetched once; see ``smollm2.py``."""

    name = "path"

    def convert(self, value: Any, param: Any, ctx: Any) -> Path:
        """Return the directory."""
        from topkv_evaluation import smollm2

        return smollm2.folder() if value == smollm2.NAME else Path(value)


NAMED = "; smollm2 is SmolLM2-135M-Instruct, fetched once"

model_option = click.option(
    "--model",
    type=ModelFolder(),
    help=f"Directory of a model, the checkpoint of this package by default{NAMED}.",
)

dtype_option = click.option(
    "--dtype",
    type=click.Choice(["auto", "float16", "bfloat16", "float32"]),
    default="auto",
    help="Of weights and cache; auto is what the checkpoint has.",
)

stats_option = click.option(
    "--stats",
    is_flag=True,
    help="Hits, misses and bytes of each sparse layer, and what is held of the host pool.",
)


@click.command("demo", short_help="Find a fact far back in a prompt, dense and through topkv.")
@click.option(
    "--tokens", type=click.IntRange(4096, 32763), help="Length of the prompt; 12288 by default."
)
@click.option("--seed", type=click.IntRange(0), help="Of the text and its facts; 0 by default.")
@stats_option
@shared.sparse
@shared.JSON
def demo(stats: bool, as_json: bool, device: str | None, **options: Any) -> None:
    """Ask a small trained model for a fact far back, dense and through topkv.

    The prompt is source code with facts planted in it. Two controls stand beside the answer of
    topkv: dense attention, and a window of recent tokens of the same budget. By default quest
    over triton_attention with a budget of 512 tokens, a buffer of 1024, and no dense layers.
    """
    console = Console(stderr=True)
    with answering() as stdout:
        console.print("loading torch and the model ...", style="dim")
        from topkv_evaluation import demo as runs

        given = {name: value for name, value in options.items() if value is not None}
        settings = runs.Settings(device=device_or_default(device), **given)
        columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
        with quiet_transformers(), Progress(*columns, console=console) as progress:
            total = settings.tokens + runs.VALUE_DIGITS - 1
            tasks: dict[str, TaskID] = {}

            def advance(name: str, tokens: int) -> None:
                if name not in tasks:
                    tasks[name] = progress.add_task(name.ljust(6), total=total)
                progress.advance(tasks[name], tokens)

            result = runs.run_demo(settings, advance)
        if not stats:
            del result["stats"]
        if as_json:
            click.echo(json.dumps(result, indent=2), file=stdout)
        else:
            from topkv_evaluation.demo_view import show

            show(result, Console(file=stdout))


@click.command("generate", short_help="Continue a prompt with a local model.")
@click.option(
    "--model",
    type=ModelFolder(),
    required=True,
    help=f"Directory of a model and its tokenizer{NAMED}.",
)
@click.option("--prompt", help="The prompt itself.")
@click.option(
    "--prompt-file", type=click.File(encoding="utf-8"), help="A file with the prompt; - for stdin."
)
@click.option("--max-new-tokens", type=click.IntRange(1), default=128, show_default=True)
@shared.CONFIG
@dtype_option
@shared.TRUST
@stats_option
@shared.sparse
@shared.JSON
def generate(
    model: Path,
    prompt: str | None,
    prompt_file: TextIO | None,
    max_new_tokens: int,
    config_file: Path | None,
    dtype: str,
    trust_remote_code: bool,
    stats: bool,
    device: str | None,
    as_json: bool,
    **options: Any,
) -> None:
    """Continue a prompt with a local model, greedily, through topkv."""
    if (prompt is None) == (prompt_file is None):
        raise click.UsageError("give the prompt by --prompt or by --prompt-file, one of the two")
    with answering() as stdout:
        text = _prompt(prompt, prompt_file)
        click.echo("loading torch and the model ...", err=True)
        from topkv_evaluation.generate import Job, run_generate

        job = Job(
            model=model,
            prompt=text,
            config=shared.config_of(config_file, options),
            new_tokens=max_new_tokens,
            dtype=dtype,
            device=device_or_default(device),
            stream=None if as_json else stdout,
            trust_remote_code=trust_remote_code,
        )
        with quiet_transformers():
            result = run_generate(job, lambda line: click.echo(line, err=True))
        if not stats:
            del result["stats"]
        if as_json:
            click.echo(json.dumps(result, indent=2), file=stdout)
        else:
            left_out = ("text", "stats")
            summary = {name: value for name, value in result.items() if name not in left_out}
            click.echo(", ".join(f"{name} {value}" for name, value in summary.items()), err=True)
            if stats:
                from topkv_evaluation.stats_view import show_stats

                show_stats(result["stats"], Console(stderr=True))


def _prompt(text: str | None, file: TextIO | None) -> str:
    where = f"--prompt-file {file.name}" if file else "--prompt"
    try:
        text = file.read() if file else str(text)
        # Of the command line, and at times of stdin, other bytes come as lone surrogates.
        text.encode("utf-8")
    except UnicodeError as error:
        raise ConfigError(where, [f"expected a prompt in UTF-8; {error}"]) from error
    return text
