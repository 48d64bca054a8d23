"""The command ``topkv bench``. Torch is imported when it is run."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from topkv.errors import ConfigError
from topkv_cli.options import (
    DEVICE,
    NewFile,
    Numbers,
    Size,
    answering,
    device_or_default,
    quiet_transformers,
)

MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "tiny")
CONTESTANTS = ("dense", "offloaded", "topkv-resident", "topkv")
COMPILED = "topkv-compiled"
"""A further contestant, on a GPU alone."""
MOST_QUERIES = 8
"""The most tokens of a row in a step."""
DTYPES = ("float16", "bfloat16", "float32")


class Names(click.ParamType):
    """Parameter type: contestants with commas between them, in any order, each once."""

    name = "name,name"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, ...]:
        if isinstance(value, tuple):
            return value
        names = tuple(value.split(","))
        unknown = [name for name in names if name not in CONTESTANTS]
        if unknown or len({*names}) < len(names):
            self.fail(f"expected some of {', '.join(CONTESTANTS)}, each once, got {value!r}")
        return names


class DriftType(click.ParamType):
    """Parameter type: a share, a file, or none."""

    name = "share|trace.npz|none"

    def convert(self, value: Any, param: Any, ctx: Any) -> float | str | None:
        if value is None or value == "none":
            return None
        if isinstance(value, str) and value.endswith(".npz"):
            if not Path(value).is_file():
                self.fail(f"expected a trace of topkv record, and there is no file {value!r}")
            return value
        try:
            drift = float(value)
        except ValueError:
            drift = -1.0
        if not 0 <= drift <= 1:
            self.fail(f"expected a share between 0 and 1, a trace, or none, got {value!r}")
        return drift


class Shares(click.ParamType):
    """Parameter type: shares with commas between them, each once."""

    name = "share,share"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[float, ...]:
        if isinstance(value, tuple):
            return value
        try:
            shares = tuple(map(float, value.split(",")))
        except ValueError:
            shares = ()
        if len({*shares}) < max(1, len(shares)) or not all(0 <= share <= 1 for share in shares):
            self.fail(f"expected shares between 0 and 1 like 0.5,0.75, each once, got {value!r}")
        return shares


class Pair(click.ParamType):
    """Parameter type: ``KEY=VALUE``, the value as JSON or else as text."""

    name = "key=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        key, sign, text = value.partition("=")
        if not (key and sign):
            self.fail(f"expected KEY=VALUE such as budget=1024, got {value!r}")
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text


@click.command("bench", short_help="Measure decoding with random weights and a stated drift.")
@click.option("--model", type=click.Choice(MODELS), help="A geometry by name.")
@click.option("--config", "config_path", type=Path, help="A config.json, or its directory.")
@click.option(
    "--engine",
    type=click.Choice(["transformers", "vllm", "sglang"]),
    default="transformers",
    show_default=True,
    help="Calls of generate, or requests that vLLM or SGLang serves.",
)
@click.option(
    "--engine-arg", "engine_args", type=Pair(), multiple=True, help="An argument of the engine."
)
@click.option("--contestants", type=Names(), default=",".join(CONTESTANTS), show_default=True)
@click.option("--compile", is_flag=True, help=f"Add {COMPILED}: captured and compiled steps.")
@click.option(
    "--context", "contexts", type=Numbers(), default="32768", show_default=True, help="Tokens."
)
@click.option(
    "--requests", type=Numbers(), default="1", show_default=True, help="Rows of a batch."
)
@click.option(
    "--fill",
    type=click.Choice(["prompt", "pool"]),
    default="prompt",
    show_default=True,
    help="Read prompts, or fill caches at random and measure decoding alone.",
)
@click.option(
    "--drift",
    type=DriftType(),
    default="0.15",
    show_default=True,
    help="Share of a selection that each step replaces, or a trace of topkv record, whose "
    "selections are made; none for the algorithm's own. A step of several tokens replaces as many "
    "shares.",
)
@click.option(
    "--queries",
    type=Numbers(most=MOST_QUERIES),
    help="Tokens of a row that a step verifies, in a loop of the bench's own; give 1 besides to "
    "compare. By default one, in the loop of generate.",
)
@click.option(
    "--accept",
    "accepts",
    type=Shares(),
    default="0.5",
    show_default=True,
    help="Share of the drafted tokens that steps of --queries accept; the rest is taken back.",
)
@click.option("--steps", type=click.IntRange(1), default=64, show_default=True)
@click.option("--warmup", type=click.IntRange(1), default=8, show_default=True)
@click.option("--profile", is_flag=True, help="Profile further steps: where the time goes.")
@click.option(
    "--kv-limit", type=Size(), help="Bytes on the device, such as 16GiB: how many requests fit?"
)
@click.option(
    "--prefill-chunk",
    "chunk",
    type=click.IntRange(1),
    default=2048,
    show_default=True,
    help="Tokens of a prompt in one forward.",
)
@click.option("--settings", "settings_file", type=Path, help="topkv's, as YAML or JSON.")
@click.option("--set", "pairs", type=Pair(), multiple=True, help="A setting; beats the file.")
@DEVICE
@click.option(
    "--dtype", type=click.Choice(DTYPES), help="bfloat16 on a GPU and float32 on a CPU by default."
)
@click.option("--json", "json_file", type=NewFile(), help="File.")
@click.option("--plot", "plot_file", type=NewFile("topkv-bench"), help="File.")
def bench(json_file: Path | None, plot_file: Path | None, profile: bool, **given: Any) -> None:
    """Decode with random weights: caches on the GPU, offloaded, and topkv.

    Weights that were never trained select nearly at random, so the selection of topkv is written
    over by one whose drift is stated; the algorithm still runs and costs its time. Every cell is
    one call of generate. Cells that do not fit, or are refused, are rows with the reason.
    """
    if (given["model"] is None) == (given["config_path"] is None):
        raise click.UsageError("give the geometry by --model or by --config, one of the two")
    if given["engine_args"] and given["engine"] == "transformers":
        raise click.UsageError("--engine-arg is of --engine vllm and --engine sglang")
    with answering() as stdout:
        click.echo("loading torch and making the model ...", err=True)
        from topkv_bench import document, report
        from topkv_bench.rows import OK

        with quiet_transformers():
            bench = _bench(_options(profiled=4 if profile else 0, **given))
            rows: list[dict[str, Any]] = []
            result = document.document(bench, rows, sys.argv)
            for row in bench.run():
                rows.append(row)
                click.echo(_line(row), err=True)
                result = document.document(bench, rows, sys.argv)
                _write(result, json_file)  # an interrupted run keeps what is done
        report.show(result, Console(file=stdout))
        if plot_file is not None:
            from topkv_bench.plot import draw

            draw(result, plot_file)
        if not any(row["status"] == OK for row in rows):
            raise ConfigError("nothing was measured", [_line(row) for row in rows])


def _bench(options: Any) -> Any:
    """Make the object that runs the grid."""
    if options.engine == "vllm":
        from topkv_bench.vllm_bench import VllmBench

        return VllmBench(options)
    if options.engine == "sglang":
        from topkv_bench.sglang_bench import SglangBench

        return SglangBench(options)
    from topkv_bench.runs import Bench

    return Bench(options)


def _options(
    settings_file: Path | None,
    pairs: tuple[tuple[str, Any], ...],
    device: str | None,
    dtype: str | None,
    contestants: tuple[str, ...],
    compile: bool,
    engine_args: tuple[tuple[str, Any], ...],
    **given: Any,
) -> Any:
    import torch

    from topkv.config import SparseConfig
    from topkv_bench.options import Options, settings_of

    written = SparseConfig.load(settings_file) if settings_file else SparseConfig()
    place = torch.empty(0, device=device_or_default(device)).device  # with its number
    name = dtype or ("float32" if place.type == "cpu" else "bfloat16")
    return Options(
        settings=settings_of(written, dict(pairs)),
        contestants=(*contestants, COMPILED) if compile else contestants,
        device=place,
        dtype=getattr(torch, name),
        engine_args=dict(engine_args),
        **given,
    )


def _line(row: dict[str, Any]) -> str:
    where = f"{row['contestant']} {row['context']} x {row['requests']}"
    if "queries" in row:
        where += f", {row['queries']} queries"
    if row.get("accept") is not None:
        where += f", {row['accept']:g} accepted"
    if "reason" in row:
        return f"{where}: {row['status']}: {row['reason']}"
    return f"{where}: {row['tokens_per_second']:.1f} tokens/s"


def _write(document: dict[str, Any], path: Path | None) -> None:
    if path is not None:
        from topkv_bench.document import jsonable

        text = json.dumps(document, indent=2, default=jsonable)
        path.write_text(text + "\n", encoding="utf-8")
