"""The commands ``topkv simulate`` and ``topkv record``. Heavy imports wait until one is run."""

from __future__ import annotations

import json
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import click
from rich.console import Console

from topkv_cli import options as shared
from topkv_cli.options import NewFile, Number, Numbers


@click.command("simulate", short_help="Replay recorded selections over buffers and policies.")
@click.argument("trace", type=click.Path(path_type=Path))
@click.option(
    "--buffers", type=Numbers(), help="Tokens of a lane; multiples of the selection by default."
)
@click.option("--policies", help="Names; by default the recorded one and belady, the lower bound.")
@click.option("--link", type=Number(0, min_open=True), help="GB/s between host and device.")
@click.option(
    "--requests",
    type=click.IntRange(1),
    default=1,
    show_default=True,
    help="That decode together, for the time on the link.",
)
@click.option(
    "--gain",
    type=Number(0, 100, min_open=True),
    default=2.0,
    show_default=True,
    help="Least share of the selected units that doubling a buffer has to spare, in % for each "
    "selection that it adds.",
)
@click.option("--plot", type=NewFile("topkv-simulate"), help="Draw the curve.")
@shared.JSON
def simulate(
    trace: Path,
    buffers: tuple[int, ...] | None,
    policies: str | None,
    link: float | None,
    requests: int,
    gain: float,
    plot: Path | None,
    as_json: bool,
) -> None:
    """Replay the selections of TRACE, a file of topkv record, over buffers and policies.

    Counts are exact: the buffer of the recording is replayed first, and must give the hits and
    misses of the coordinator.
    """
    with redirect_stdout(sys.stderr):  # plugins may print
        from topkv_simulate.curve import Curve
        from topkv_simulate.policies import BELADY
        from topkv_simulate.replay import Replayer
        from topkv_simulate.trace import Trace

        replayer = Replayer(Trace.load(trace))
        replayer.check()
        curve, own = Curve(replayer), replayer.trace.settings["eviction"]
        names = [own, BELADY] if policies is None else policies.split(",")
        names = list(dict.fromkeys(name.strip() for name in names))
        sizes = sorted(buffers or curve.buffers())
        points = [curve.at(size, name) for size in sizes for name in names]
        best = curve.recommend(sizes, own, gain / 100)
    if plot is not None:
        from topkv_simulate.plot import draw

        draw(curve, points, best, plot)
    if as_json:
        click.echo(json.dumps(_result(curve, points, best, (link, requests), gain), indent=2))
        return
    from topkv_simulate.view import show

    show(curve, points, best, (link, requests), gain, Console())


def _result(curve: Any, points: Any, best: Any, link: Any, gain: float) -> dict[str, Any]:
    from attrs import asdict

    return {
        "settings": curve.trace.settings,
        "groups": [asdict(shape) for shape in curve.shapes],
        "recorded": {**curve.totals(), "tokens_per_step": curve.tokens_per_step},
        "gain_percent": gain,
        "link_gb_per_s": link[0],
        "requests": link[1],
        "points": [point.as_dict(*link) for point in points],
        "recommended_buffer_tokens": best,
    }


@click.command("record", short_help="Record what a model selects, for topkv simulate.")
@click.argument("trace", type=NewFile())
@click.option(
    "--model",
    type=Path,
    help="Directory of a model, the checkpoint of topkv-evaluation by default; smollm2 is "
    "SmolLM2-135M-Instruct, fetched once.",
)
@click.option(
    "--text", type=click.Path(path_type=Path), help="A file in UTF-8; source code by default."
)
@click.option("--tokens", type=click.IntRange(2), help="Of the text; all of a file, else 4096.")
@click.option(
    "--steps",
    type=click.IntRange(1),
    default=256,
    show_default=True,
    help="Last tokens of it, which are decoded; the others are the prompt.",
)
@click.option(
    "--queries",
    type=click.IntRange(1, 8),
    default=1,
    show_default=True,
    help="Tokens of a decode step, which share a selection, as drafts do that are all accepted.",
)
@shared.CONFIG
@shared.sparse
@shared.TRUST
def record(
    trace: Path,
    model: Path | None,
    text: Path | None,
    tokens: int | None,
    steps: int,
    queries: int,
    config_file: Path | None,
    device: str | None,
    trust_remote_code: bool,
    **settings: Any,
) -> None:
    """Decode the end of a text, and write what was selected to TRACE.

    Each token is the text's, whatever the model would have said; by default through quest over
    triton_attention. Needs topkv-evaluation. To record other runs of requests, see
    topkv_simulate.recorder.
    """
    with redirect_stdout(sys.stderr):
        from topkv_simulate.record import DEFAULTS, Job, run
        from topkv_simulate.trace import ROW

        given = {"capture": "off", **settings}  # replays of a graph cannot be recorded
        if queries > 1:
            given["max_queries"] = queries
        config = shared.config_of(config_file, given, DEFAULTS)
        found = run(Job(config, model, text, tokens, steps, queries, device, trust_remote_code))
        found.save(trace)
    reported = int((found.rows[:, ROW.warm] == 0).sum())
    click.echo(f"{reported} decode steps in {trace}", err=True)
