"""The command ``topkv serve``: vLLM's OpenAI server, decoding through topkv."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from topkv.errors import CapabilityError, ConfigError
from topkv_vllm.args import OWNED, engine_args
from topkv_vllm.versions import DISTRIBUTIONS, doctor, installed, version_reasons

SERVER = "vllm.entrypoints.openai.api_server"

READ = (*OWNED.values(), "attention_backend", "worker_cls", "kv_transfer_config")
"""Options of vLLM that this command writes, or reads when they are given."""

OBJECTS = ("additional_config", "compilation_config", "speculative_config")
"""Options of vLLM that are JSON objects."""


class Pair(click.ParamType):
    """``KEY=VALUE``, the value as JSON or else as text."""

    name = "key=value"

    def convert(self, value: Any, param: Any, ctx: Any) -> tuple[str, Any]:
        key, sign, text = value.partition("=")
        if not (key and sign):
            self.fail(f"expected KEY=VALUE such as unit=16, got {value!r}")
        try:
            return key, json.loads(text)
        except ValueError:
            return key, text


def command_line(model: str, config: Mapping[str, Any], more: Sequence[str]) -> list[str]:
    """Command line that starts vLLM's server.

    Args:
        model: a directory, or a name that vLLM knows where to find.
        config: settings of topkv.
        more: options of vLLM, passed on.

    Raises:
        ConfigError: something is wrong, or said twice; with every reason.
    """
    given, others = _given(more)
    lines = []
    for name, value in engine_args(config, **given).items():
        option = name.replace("_", "-")
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        lines += [f"--{option}", text]
    return [sys.executable, "-m", SERVER, "--model", model, *lines, *others]


def _given(more: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
    """Options of vLLM that this command looks at, and all others."""
    given: dict[str, Any] = {}
    others: list[str] = []
    rest = iter(more)
    for text in rest:
        option, sign, value = text.partition("=")
        name = option.removeprefix("--").replace("-", "_")
        if not option.startswith("--") or name not in (*READ, *OBJECTS):
            others.append(text)
            continue
        value = value if sign else next(rest, "")
        given[name] = int(value) if value.isdecimal() else value
    for name in given.keys() & {*OBJECTS}:
        try:
            given[name] = dict(json.loads(given[name]))
        except (TypeError, ValueError) as error:
            raise ConfigError(
                "these arguments do not go together",
                [f"--{name.replace('_', '-')} must be a JSON object: {error}"],
            ) from error
    return given, others


@click.command(
    "serve",
    short_help="Serve a model through vLLM, which decodes through topkv.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("model")
@click.option("--algorithm", help="Name of the algorithm; see topkv plugins.")
@click.option("--backend", help="Name of the attention backend.")
@click.option("--budget", type=int, help="Attended tokens, sinks and tail included.")
@click.option("--buffer", type=int, help="Tokens of the device buffer.")
@click.option("--unit", type=int, help="Tokens that are selected and moved together.")
@click.option("--max-tokens", type=int, help="Of all requests in host memory.")
@click.option("--settings", "settings_file", type=Path, help="topkv's, as YAML or JSON.")
@click.option("--set", "pairs", type=Pair(), multiple=True, help="A setting; beats the file.")
@click.option("--dry-run", is_flag=True, help="Print what would be started.")
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
def serve(
    model: str,
    settings_file: Path | None,
    pairs: tuple[tuple[str, Any], ...],
    dry_run: bool,
    options: tuple[str, ...],
    **stated: Any,
) -> None:
    """Start vLLM's OpenAI server for MODEL, with its attention layers in topkv.

    All other OPTIONS are vLLM's, say --port 8000 or --max-model-len 131072; --max-num-seqs and
    --block-size too, which are topkv's max_requests and page_tokens.
    """
    from topkv.config import SparseConfig  # imports torch, which help needs not wait for

    settings = SparseConfig.load(settings_file).as_dict() if settings_file else {}
    settings |= dict(pairs)
    settings |= {name: value for name, value in stated.items() if value is not None}
    line = command_line(model, settings, options)
    if dry_run:
        click.echo(json.dumps(line))
        return
    reasons = [
        reported
        for name, version in installed().items()
        for reported in version_reasons(version, DISTRIBUTIONS[name])
    ]
    if reasons or not installed():
        raise CapabilityError("vLLM cannot serve this through topkv", reasons or doctor())
    os.execv(line[0], line)
