"""The command ``topkv serve``: the server of an engine, decoding through topkv.

A package that brings an engine names its ``Server`` by an entry point of group ``topkv.servers``,
whose name is that of the engine.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import EntryPoint, entry_points
from pathlib import Path
from typing import Any

import click
from attrs import frozen

from topkv.errors import CapabilityError, ConfigError, PluginError

SERVERS = "topkv.servers"

NONE = (
    "no package with a server is installed; pip install 'topkv-vllm[serve]' or "
    "'topkv-sglang[serve]', beside its engine"
)


@frozen
class Server:
    """The server of an engine.

    Attributes:
        module: that Python runs.
        model: option that names the model.
        engine_args: makes the engine's arguments out of settings of topkv and those that it looks
            at, by their names in Python.
        read: names of options that ``engine_args`` sets, or looks at.
        objects: names of those that are JSON objects.
        reasons: gives the reasons why it cannot start here: its engine is not installed, say.
    """

    module: str
    model: str
    engine_args: Callable[..., Mapping[str, Any]]
    read: tuple[str, ...]
    objects: tuple[str, ...]
    reasons: Callable[[], list[str]]

    def command_line(
        self, model: str, config: Mapping[str, Any], more: Sequence[str]
    ) -> list[str]:
        """Command line that starts the server.

        Args:
            model: a directory, or a name that the engine knows where to find.
            config: settings of topkv.
            more: options of the engine; those that are not looked at are passed on.

        Raises:
            ConfigError: something is wrong, or said twice; with every reason.
        """
        given, others = self._given(more)
        lines = []
        for name, value in self.engine_args(config, **given).items():
            text = json.dumps(value) if isinstance(value, dict) else str(value)
            lines += [f"--{name.replace('_', '-')}", text]
        return [sys.executable, "-m", self.module, self.model, model, *lines, *others]

    def _given(self, more: Sequence[str]) -> tuple[dict[str, Any], list[str]]:
        """Options of the engine that are looked at, and all others."""
        given: dict[str, Any] = {}
        others: list[str] = []
        rest = iter(more)
        for text in rest:
            option, sign, value = text.partition("=")
            name = option.removeprefix("--").replace("-", "_")
            if not option.startswith("--") or name not in (*self.read, *self.objects):
                others.append(text)
                continue
            value = value if sign else next(rest, "")
            given[name] = int(value) if value.isdecimal() else value
        for name in given.keys() & {*self.objects}:
            try:
                given[name] = dict(json.loads(given[name]))
            except (TypeError, ValueError) as error:
                raise ConfigError(
                    "these arguments do not go together",
                    [f"--{name.replace('_', '-')} must be a JSON object: {error}"],
                ) from error
        return given, others


def server_of(engine: str | None) -> tuple[str, Server]:
    """Find the server of an engine.

    Args:
        engine: its name; None for the only one that could start here.

    Returns:
        The name and the server.

    Raises:
        PluginError: no package brings it, or several could start.
    """
    points = {point.name: point for point in entry_points(group=SERVERS)}
    names = sorted(points)
    if engine is not None and engine not in points:
        others = f"; those that are installed are {', '.join(names)}" if names else ""
        raise PluginError("topkv cannot serve", [f"no package brings the engine {engine}{others}"])
    if not points:
        raise PluginError("topkv cannot serve", [NONE])
    if engine is None and len(names) > 1:
        names = [name for name in names if not _load(points[name]).reasons()] or names
    if engine is None and len(names) > 1:
        reason = f"{' and '.join(names)} are installed; say --engine {names[0]}, for one of them"
        raise PluginError("topkv cannot serve", [reason])
    name = engine or names[0]
    return name, _load(points[name])


def _load(point: EntryPoint) -> Server:
    server: Server = point.load()
    return server


class Pair(click.ParamType):  # type: ignore[type-arg]
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


@click.command(
    "serve",
    short_help="Serve a model through vLLM or SGLang, which decode through topkv.",
    context_settings={"ignore_unknown_options": True},
)
@click.argument("model")
@click.option("--engine", help="vllm or sglang; needed where both are installed.")
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
    engine: str | None,
    settings_file: Path | None,
    pairs: tuple[tuple[str, Any], ...],
    dry_run: bool,
    options: tuple[str, ...],
    **stated: Any,
) -> None:
    """Start an engine's OpenAI server for MODEL, with its attention layers in topkv.

    All other OPTIONS are the engine's, say --port 8000. So are three settings of topkv, by the
    engine's names: max_requests is vLLM's --max-num-seqs and SGLang's --max-running-requests,
    page_tokens is --block-size and --page-size, and max_request_tokens is --max-model-len and
    --context-length.
    """
    from topkv.config import SparseConfig  # imports torch, which help needs not wait for

    name, server = server_of(engine)
    settings = SparseConfig.load(settings_file).as_dict() if settings_file else {}
    settings |= dict(pairs)
    settings |= {name: value for name, value in stated.items() if value is not None}
    line = server.command_line(model, settings, options)
    if dry_run:
        click.echo(json.dumps(line))
        return
    if reasons := server.reasons():
        raise CapabilityError(f"{name} cannot serve this through topkv", reasons)
    os.execv(line[0], line)
