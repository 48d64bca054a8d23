"""Plots of the raw numbers in ``benchmarks/results``, and nothing but those, as SVG."""

from __future__ import annotations

import io
import json
import lzma
from collections.abc import Callable
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks" / "results"
COLOURS = (
    "#3465a4",
    "#cc6b1f",
    "#4e9a3b",
    "#8a4fa3",
    "#b5323a",
    "#5c6670",
    "#2a9d9d",
    "#c49a00",
    "#7d6b5d",
    "#222222",
)
TEXTS = "eval/texts/smollm2-bcc81830d10c-2048.jsonl.xz"
Row = dict[str, Any]


def read(name: str) -> list[Row]:
    """The rows of a file of raw numbers."""
    raw = (RESULTS / name).read_bytes()
    lines = (lzma.decompress(raw) if name.endswith(".xz") else raw).decode().splitlines()
    return [json.loads(line) for line in lines]


def new(panels: int = 1, height: float = 3.6) -> tuple[Any, list[Any]]:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.5 * panels if panels > 1 else 6.5, height), layout="constrained")
    FigureCanvasAgg(figure)
    axes = list(figure.subplots(1, panels, squeeze=False)[0])
    for panel in axes:
        panel.grid(axis="y", color="#dddddd", linewidth=0.7)
        panel.set_axisbelow(True)
        panel.spines[["top", "right"]].set_visible(False)
    return figure, axes


def decode_step() -> Any:
    """Time and device memory of a captured decode step, beside a cache on the GPU."""
    rows = read("decode_step.jsonl")
    cells = list(dict.fromkeys((row["context"], row["requests"]) for row in rows))
    figure, (time, memory) = new(2)
    for offset, what in ((-0.2, "dense on the GPU"), (0.2, "topkv, quest")):
        mine = [
            next(r for r in rows if (r["context"], r["requests"]) == c and r["what"] == what)
            for c in cells
        ]
        places = [place + offset for place in range(len(cells))]
        colour = COLOURS[offset > 0]
        bars = time.bar(places, [row["ms"] for row in mine], 0.38, color=colour, label=what)
        time.bar_label(bars, [f"{row['ms']:.2f}" for row in mine], fontsize=8)
        held = [
            row["device_kv_gib"] + row["representation_gib"] + row["metadata_gib"] for row in mine
        ]
        bars = memory.bar(places, held, 0.38, color=colour, label=what)
        memory.bar_label(bars, [f"{value:.1f}" for value in held], fontsize=8)
    for panel, label in ((time, "ms, all 32 attention layers"), (memory, "GiB on the device")):
        panel.set_xticks(range(len(cells)), [f"{c // 1024}K x {r}" for c, r in cells])
        panel.set_xlabel("context x requests")
        panel.set_ylabel(label)
    time.legend(frameon=False, fontsize=8)
    return figure


WAYS = {
    "all layers resident": ("topkv-resident", None),
    "topkv": ("topkv", False),
    "topkv, fp8 on the host": ("topkv", True),
    "Transformers' offloaded cache": ("offloaded", None),
}
"""Contestants of ``topkv bench``, and whether the host holds fp8."""


def generate() -> Any:
    """Steps of plain ``generate``, and the tokens a second of what 16 GiB on the device hold."""
    last: dict[tuple[str, str, int], Row] = {}
    rows = read("generate_tables.jsonl.xz")
    for row in (row for row in rows if "--fill pool" in row["command"]):
        fp8 = "host_format=fp8" in row["command"]
        drift = row.get("drift", {"stated": 0.15})["stated"]
        for label, (contestant, coded) in WAYS.items():
            if row["contestant"] == contestant and coded in (None, fp8) and drift == 0.15:
                context = f"{round(row['context'] / 32000) * 32}K"
                last[label, context, row["requests"]] = row
    figure, (steps, rates) = new(2)
    cells = [("32K", 1), ("32K", 16), ("128K", 1), ("128K", 6)]
    for offset, (colour, label) in enumerate(zip(COLOURS, list(WAYS)[:3], strict=False)):
        found = [(n, last.get((label, *cell))) for n, cell in enumerate(cells)]
        places = [n + 0.27 * (offset - 1) for n, row in found if row]
        times = [row["step_ms"]["median"] for _, row in found if row]
        bars = steps.bar(places, times, 0.26, color=colour, label=label)
        steps.bar_label(bars, [f"{time:.1f}" for time in times], fontsize=7)
    steps.set_xticks(range(len(cells)), [f"{context} x {count}" for context, count in cells])
    steps.set_xlabel("context x requests")
    steps.set_ylabel("ms a step")
    for offset, (colour, label) in enumerate(zip(COLOURS, WAYS, strict=False)):
        best = [
            max(
                (row["tokens_per_second"], row["requests"])
                for (name, where, _), row in last.items()
                if (name, where) == (label, context) and row["bytes"]["device"] < 16 * 2**30
            )
            for context in ("32K", "128K")
        ]
        places = [place + 0.21 * (offset - 1.5) for place in range(2)]
        bars = rates.bar(places, [rate for rate, _ in best], 0.2, color=colour, label=label)
        rates.bar_label(bars, [f"{rate:.0f}\nx {count}" for rate, count in best], fontsize=7)
    rates.set_xticks(range(2), ["32K", "128K"])
    rates.margins(y=0.2)
    rates.set_xlabel("context; x requests that decode together")
    rates.set_ylabel("tokens a second in 16 GiB")
    rates.legend(frameon=False, fontsize=7)
    return figure


def prompts() -> Any:
    """Time of a prompt beside resident layers, and first tokens with and without its pages."""
    figure, (time, first) = new(2, 3.3)
    rows = read("prefill.jsonl.xz")
    chunks = sorted({row["chunk"] for row in rows})
    names = {"in time": "fetched when attended", "ahead": "ahead", "ahead fp8": "ahead, fp8"}
    for offset, (colour, name) in enumerate(zip(COLOURS, names, strict=False)):
        mine = [row["ratio"] for row in rows if row["name"] == name]
        places = [place + 0.27 * (offset - 1) for place in range(len(chunks))]
        bars = time.bar(places, mine, 0.26, color=colour, label=names[name])
        time.bar_label(bars, [f"{ratio:.2f}" for ratio in mine], fontsize=7)
    time.set_xticks(range(len(chunks)), [str(chunk) for chunk in chunks])
    time.set_xlabel("tokens of a chunk")
    time.set_ylabel("time of a prompt, 1 = resident")
    time.legend(frameon=False, fontsize=7)
    rows = [row for row in read("prefix.jsonl") if "context" in row]
    for offset, (colour, name, label) in enumerate(
        zip(COLOURS, ("cold", "again"), ("new prompt", "seen before"), strict=False)
    ):
        # The first repeat of what is seen before compiles.
        mine = [min(row["times"][name]) for row in rows]
        places = [place + 0.4 * (offset - 0.5) for place in range(len(rows))]
        bars = first.bar(places, mine, 0.38, color=colour, label=label)
        first.bar_label(bars, [f"{seconds:.2f}" for seconds in mine], fontsize=8)
    first.set_yscale("log")
    first.set_xticks(range(len(rows)), [f"{row['context'] // 1024}K" for row in rows])
    first.set_xlabel("tokens of the prompt")
    first.set_ylabel("s to the first token")
    first.legend(frameon=False, fontsize=8)
    return figure


def swap_in() -> Any:
    """Plan and load of one layer over the share of misses, by requests and entry."""
    rows = [row for row in read("swap_in.jsonl.xz") if row["what"] == "swap_in"]
    sizes = [656, 8192]  # those of 1152 bytes lie between
    figure, panels = new(len(sizes), 3.3)
    for panel, size in zip(panels, sizes, strict=True):
        for colour, requests in zip(COLOURS, (1, 4, 16, 64), strict=False):
            line = [r for r in rows if (r["entry"], r["requests"]) == (size, requests)]
            share = [100 * row["miss"] for row in line]
            panel.plot(
                share, [row["us"] for row in line], "o-", ms=4, color=colour, label=requests
            )
        panel.set_yscale("log")
        panel.set_title(f"entries of {size} bytes", fontsize=10)
        panel.set_xlabel(
            "misses, % of 2048 selected" if size < 8192 else "misses, % of the selection"
        )
    panels[0].set_ylabel("us")
    panels[0].legend(title="requests", frameon=False, fontsize=8)
    return figure


MODELS = {"checkpoint": "6 layers, 64 channels", "deep_checkpoint": "8 layers, 128 channels"}
"""Trained models of topkv-evaluation, by the names of their files in ``eval/``."""

NAMES = {
    "exact": "exact top-k",
    "ds_p95w2": "Double Sparsity, `top_p` 0.95 of twice",
    "pariskv": "ParisKV",
    "double_sparsity": "Double Sparsity",
    "pqcache": "PQCache",
    "quest": "Quest",
    "rocketkv": "RocketKV",
    "infllm8": "InfLLM-v2",
    "clusterkv": "ClusterKV",
    "streaming_llm": "StreamingLLM",
}


def by_bytes(folder: str, lines: dict[str, str], measure: str, what: str) -> Any:
    """A figure over the bytes of a token as a share of those of dense attention.

    Args:
        folder: of ``eval/``.
        lines: labels by algorithm; no layer is dense.
        measure: ``"device"`` or ``"link"`` bytes, and ``what`` these are called.
    """
    figure, panels = new(2, 4.0)
    for panel, (model, title) in zip(panels, MODELS.items(), strict=True):
        found = read(f"eval/{folder}/{model}-4096.all.jsonl.xz")
        rows = [row for row in found if "refused" not in row]
        (dense,) = (row for row in rows if row["plugin"] is None)
        whole, best = dense["device_bytes_per_token"], 100 * dense["accuracy"]
        panel.axhline(best, color="#333333", ls="--", lw=1, label="dense")
        for colour, (algorithm, label) in zip(COLOURS, lines.items(), strict=False):
            line = [r for r in rows if (r["algorithm"], r["dense_layers"]) == (algorithm, [])]
            places = [100 * row[f"{measure}_bytes_per_token"] / whole for row in line]
            share = [100 * row["accuracy"] for row in line]
            plain = label.replace("`", "")
            panel.plot(places, share, "o-", ms=4, color=colour, label=plain)
        panel.set_xscale("log")
        panel.set_title(title, fontsize=10)
        panel.set_xlabel(f"{what}, % of keys and values")
    panels[0].set_ylabel("right answers, %")
    panels[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def accuracy() -> Any:
    """Right answers over the bytes that the GPU reads of its own memory for a token."""
    return by_bytes("grid", NAMES, "device", "from GPU memory")


def texts() -> Any:
    """KL of a real model's text over the bytes that a token reads and loads, by budget."""
    lines = {
        "exact": "exact top-k",
        "ds_p95w2": "Double Sparsity, top_p 0.95 of twice",
        "double_sparsity": "Double Sparsity",
        "paris_48_p95w4": "ParisKV 4 + 8, top_p 0.95 of 4 times",
        "paris_4_8": "ParisKV 4 + 8",
        "pq_4_8": "PQCache 4 + 8",
        "quest_8i_p95w4": "Quest, 8, int8, top_p 0.95 of 4 times",
        "quest_8i": "Quest, 8, int8",
        "quest": "Quest",
    }
    cells: dict[tuple[str, float], list[Row]] = {}
    for row in read(TEXTS):
        if "refused" not in row:
            cells.setdefault((row["algorithm"], row["nominal_percent"]), []).append(row)
    figure, panels = new(2, 4.0)
    for panel, (byte, what) in zip(
        panels, {"device": "from GPU memory", "link": "over the link"}.items(), strict=True
    ):
        for colour, (algorithm, label) in zip(COLOURS, lines.items(), strict=False):
            line = [cells[algorithm, share] for share in (1, 2, 5, 10)]
            bytes_ = f"{byte}_bytes_per_token"
            places = [sum(100 * r[bytes_] / r["context_bytes"] for r in of) / 4 for of in line]
            losses = [sum(r["kl"] for r in of) / 4 for of in line]
            panel.plot(places, losses, "o-", ms=4, color=colour, label=label)
        panel.set(xscale="log", yscale="log", xlabel=f"{what}, % of keys and values")
        ticks = [5, 10, 20, 50] if byte == "device" else [0.02, 0.05, 0.1, 0.2, 0.5, 1]
        panel.set_xticks(ticks, [f"{tick:g}" for tick in ticks])
        panel.minorticks_off()
    panels[0].set_ylabel("KL, nats a token")
    panels[1].legend(frameon=False, fontsize=8, loc="upper left", bbox_to_anchor=(1, 1))
    return figure


def stages() -> Any:
    """Right answers over the bytes that a token brings over the link, by stage."""
    lines = {
        "pariskv": "ParisKV",
        "paris_p95": "ParisKV, top_p 0.95",
        "paris_p95x4": "ParisKV, top_p 0.95 of 4 times as many",
        "quest": "Quest",
        "p85": "Quest, top_p",
        "p95x4": "Quest, top_p 0.95 of 4 times as many",
        "residual": "Quest, residual",
        "FS": "Quest, share: FS",
    }
    return by_bytes("stages", lines, "link", "over the link")


def attention() -> Any:
    """Bytes a second of decode attention over 2048 selected tokens by batch, and the ceiling."""
    rows = [row for row in read("attention.jsonl.xz") if row.get("benchmark") == "attend"]
    figure, (panel,) = new()
    cells = [("shared", 16), ("kv_head", 16), ("shared", 1), ("kv_head", 1)]
    for colour, (scope, unit) in zip(COLOURS, cells, strict=False):
        line = [r for r in rows if (r["scope"], r["unit"], r["tokens"]) == (scope, unit, 2048)]
        speed = [row["GB/s"] / 1000 for row in line]
        label = f"scope {scope}, unit {unit}"
        panel.plot([r["batch"] for r in line], speed, "o-", ms=4, color=colour, label=label)
    ceiling = read("selection.jsonl.xz")[0]["read_gbs"] / 1000
    panel.axhline(ceiling, color="#333333", ls="--", lw=1, label="a plain sum")
    for row in (r for r in rows if (r["scope"], r["unit"]) == cells[0]):
        place = (row["batch"], row["GB/s"] / 1000)
        panel.annotate(f"{row['us']:.0f} us", place, (6, -11), "data", "offset points", fontsize=8)
    panel.set_ylim(0)
    panel.set_xlabel("requests")
    panel.set_ylabel("TB/s of keys and values")
    panel.legend(frameon=False, fontsize=8, loc="lower right")
    return figure


def selection() -> Any:
    """Time of selecting 2048 tokens over the context, 16 requests, where tokens are scored."""
    rows = [
        row
        for row in read("selection.jsonl.xz")
        if row.get("requests") == 16 and row["budget"] == 2048 and row["score_us"]
    ]
    figure, (panel,) = new()
    cells = list(dict.fromkeys((row["algorithm"], str(row["params"])) for row in rows))
    width = 0.8 / len(cells)
    for number, cell in enumerate(cells):
        line = [row for row in rows if (row["algorithm"], str(row["params"])) == cell]
        label = cell[0] + "".join(f", {k} {v}" for k, v in line[0]["params"].items())
        places = [place + (number - len(cells) / 2 + 0.5) * width for place in range(len(line))]
        panel.bar(
            places, [row["select_us"] for row in line], width, color=COLOURS[number], label=label
        )
        panel.bar(
            places,
            [row["bound_us"] for row in line],
            width,
            color="white",
            alpha=0.45,
            hatch="////",
            edgecolor="#333333",
            lw=0,
        )
    panel.set_xticks(range(2), ["32K tokens", "128K tokens"])
    panel.set_ylabel("us, 16 requests, one layer")
    panel.legend(frameon=False, fontsize=8)
    return figure


def arkvale() -> Any:
    """ArkVale beside Quest: right answers of 40, and the attention mass that is held."""
    rows = [row for row in read("eval/arkvale_cpu.jsonl.xz") if row["plugin"]]
    figure, panels = new(2)
    for colour, name in zip(COLOURS, dict.fromkeys(r["algorithm"] for r in rows), strict=False):
        for dense, style in (([], "o-"), ([0, 1], "s--")):
            line = [r for r in rows if (r["algorithm"], r["dense_layers"]) == (name, dense)]
            label = f"{line[0]['plugin']}, unit {line[0]['unit']}{', 0-1 dense' if dense else ''}"
            budget = [row["nominal_percent"] for row in line]
            panels[0].plot(
                budget, [100 * r["accuracy"] for r in line], style, ms=4, color=colour, label=label
            )
            panels[1].plot(budget, [100 * r["recall"] for r in line], style, ms=4, color=colour)
    for panel, label in zip(
        panels, ("right answers, % of 40", "attention mass held, %"), strict=True
    ):
        panel.set_xlabel("budget, % of the context")
        panel.set_ylabel(label)
    panels[0].legend(frameon=False, fontsize=7)
    return figure


DRAWN = (
    generate, prompts, decode_step, swap_in, texts, accuracy, stages, attention, selection, arkvale
)  # fmt: skip
FIGURES: dict[str, Callable[[], Any]] = {f"{draw.__name__}.svg": draw for draw in DRAWN}


def figures() -> dict[str, str]:
    """SVG by file name."""
    import matplotlib

    drawn = {}
    with matplotlib.rc_context(
        {
            "svg.hashsalt": "topkv",
            "svg.fonttype": "none",
            "font.family": "sans-serif",
            "font.size": 9,
        }
    ):
        for name, draw in FIGURES.items():
            stream = io.StringIO()
            draw().savefig(stream, format="svg", metadata={"Date": None})
            drawn[name] = stream.getvalue()
    return drawn
