"""The command ``topkv tiers``. Heavy imports wait until it is run."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from topkv.checks import MOST_BYTES
from topkv.errors import ConfigError
from topkv_cli.options import JSON, NewFile, Number


def _gigabytes(ctx: click.Context, param: click.Parameter, value: str) -> list[int]:
    """Parse ``"16,32"`` GB as bytes."""
    try:
        found = sorted({round(float(part) * 1e9) for part in value.split(",")})
    except (ValueError, OverflowError):
        found = [-1]
    if found[0] < 0 or found[-1] > MOST_BYTES:
        raise click.BadParameter(f"expected GB such as 16,32, got {value!r}")
    return found


def _writes(ctx: click.Context, param: click.Parameter, value: str) -> list[str]:
    from topkv_prefixes.settings import WRITES

    names = list(dict.fromkeys(part.strip() for part in value.split(",")))
    if not {*names} <= {*WRITES}:
        raise click.BadParameter(f"expected some of {', '.join(WRITES)}, got {value!r}")
    return names


@click.command("tiers", short_help="Replay prompts over sizes of host memory and a storage.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option("--host-gb", callback=_gigabytes, required=True, help="Sizes of the host pool.")
@click.option(
    "--storage-gb", callback=_gigabytes, default="0", help="Sizes of a storage; 0 is none."
)
@click.option(
    "--write", callback=_writes, default="write_through", help="Policies, see storage of prefixes."
)
@click.option(
    "--prefill-rate",
    type=Number(0, min_open=True),
    required=True,
    help="Tokens of prompts that are computed a second.",
)
@click.option("--read-gbs", type=Number(0, min_open=True), help="GB/s of the storage.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="That run at a time; a recorded trace says it itself.",
)
@click.option(
    "--page-tokens",
    type=click.IntRange(1),
    default=512,
    show_default=True,
    help="Of a page; recorded.",
)
@click.option(
    "--token-bytes",
    type=click.IntRange(1),
    default=131072,
    show_default=True,
    help="Of a token's keys and values; recorded.",
)
@click.option(
    "--within",
    type=Number(0),
    default=5.0,
    show_default=True,
    help="% by which the mean first token of the recommended sizes may come after the best.",
)
@click.option("--plot", type=NewFile("topkv-simulate"), help="Draw it.")
@JSON
def tiers(trace: Path, within: float, plot: Path | None, as_json: bool, **options: Any) -> None:
    """Replay the prompts of TRACE over sizes of both tiers below the device.

    TRACE is a recording of topkv_simulate.asking, or has a line of JSON for each request:
    input_length and hash_ids of blocks of 512 tokens, as in the public traces of Mooncake, or
    token_ids; and output_length. Found tokens are exact, times are bytes and tokens over the rates
    that are given.
    """
    if any(options["storage_gb"]) and options["read_gbs"] is None:
        raise ConfigError("--storage-gb", ["--read-gbs is missing: what does the storage give?"])
    with redirect_stdout(sys.stderr):
        from topkv_simulate.tier_points import Speeds, points_of, recommend

        asked, speeds = (
            _asked(trace, options),
            Speeds(options["prefill_rate"], options["read_gbs"]),
        )
        points = points_of(asked, _sizes(options), speeds)
        best = recommend(points, within / 100)
        if plot is not None:
            from topkv_simulate.tier_view import draw

            draw(points, best, plot)
    if as_json:
        click.echo(json.dumps(_result(points, best, speeds, within), indent=2))
        return
    from topkv_simulate.tier_view import show

    show(points, best, speeds, within, Console())


def _asked(trace: Path, options: dict[str, Any]) -> Any:
    from topkv_simulate.asked import Asked, Setup

    names = ("page_tokens", "token_bytes", "requests")
    return Asked.load(trace, Setup(**{name: options[name] for name in names}))


def _sizes(options: dict[str, Any]) -> list[Any]:
    from topkv_simulate.tiers import Sizes

    return [
        Sizes(host, storage, write)
        for host in options["host_gb"]
        for storage in options["storage_gb"]
        for write in options["write"][: None if storage else 1]
    ]


def _result(points: Any, best: Any, speeds: Any, within: float) -> dict[str, Any]:
    from attrs import asdict

    asked = points[0].asked
    names = ("page_tokens", "page_bytes", "object_bytes", "slots")
    return {
        "trace": {
            "prompts": len(points[0].counts.asked),
            "tokens": points[0].tokens,
            **{name: getattr(asked, name) for name in names},
        },
        "speeds": asdict(speeds),
        "within_percent": within,
        "points": [point.as_dict() for point in points],
        "recommended": best.as_dict(),
    }
