"""Output of ``topkv demo`` without ``--json``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.text import Text

from topkv_cli.tables import show_table
from topkv_evaluation.stats_view import show_stats


def _size(count: int) -> str:
    return f"{count / 2**20:.2f} MiB"


def _share(result: dict[str, Any], *names: str) -> float:
    return sum(result[name] for name in names) / result["full_kv_bytes"]


def _answers(result: dict[str, Any]) -> Iterator[tuple[str | Text, ...]]:
    context, budget = f"{result['context_tokens']} tokens", f"{result['budget_tokens']} tokens"
    rows = (
        ("dense", context, "dense_answer", f"{result['dense_steps_per_second']:.1f}"),
        ("topkv", budget, "sparse_answer", f"{result['steps_per_second']:.1f}"),
        ("window", budget, "window_answer", ""),
    )
    for run, attended, name, rate in rows:
        right = result[name] == result["expected"]
        verdict, color = ("right", "green") if right else ("wrong", "red")
        yield run, attended, Text(f"{result[name]!r} {verdict}", color), rate


def _memory(result: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    rows = (
        ("full cache", "full_kv_bytes"),
        ("on the device: keys and values", "device_kv_bytes"),
        ("on the device: representations", "representation_bytes"),
        ("on the device: maps and tables", "metadata_bytes"),
        ("on the host", "host_kv_bytes"),
        ("loaded while decoding", "loaded_bytes"),
    )
    for label, name in rows:
        yield label, str(result[name]), _size(result[name]), f"{_share(result, name):.1%}"


def _settings(result: dict[str, Any]) -> str:
    names = ("algorithm", "backend", "impl", "device", "dtype", "budget_tokens", "buffer_tokens")
    names += ("unit", "dense_layers", "seed")
    return ", ".join(f"{name} {result[name]}" for name in names)


def _what_happened(result: dict[str, Any]) -> str:
    share = _share(result, "device_kv_bytes", "representation_bytes")
    found = "found" if result["correct"] else "missed"
    window = "found it too" if result["window_answer"] == result["expected"] else "did not"
    return (
        f"topkv {found} a fact {result['fact_distance_tokens']} tokens back with "
        f"{result['budget_tokens'] / result['context_tokens']:.1%} of the context attended and "
        f"{share:.1%} of the cache on the device, {result['hit_rate']:.0%} of the selected units "
        f"in the buffer; a window of the same budget {window}."
    )


def show(result: dict[str, Any], console: Console) -> None:
    """Print question, answers, memory, and one sentence."""
    lines = (
        f"{result['context_tokens']} tokens of source code with planted facts",
        f"question  {result['question']}",
        f"expected  {result['expected']}",
    )
    for line in lines:
        console.print(Text(line))
    console.print()
    runs = ("run", "attends to", "answer", "steps/s")
    show_table(console, runs, _answers(result), left=runs)
    console.print()
    show_table(console, ("memory", "bytes", "", "of the full cache"), _memory(result))
    console.print()
    if "stats" in result:
        show_stats(result["stats"], console)
        console.print()
    console.print(Text(f"misses {result['misses']}, hit rate {result['hit_rate']:.1%}"))
    console.print(Text(f"settings  {_settings(result)}"))
    console.print(Text(f"window  {result['window']}"))
    console.print(Text(f"time  {result['seconds']:.1f} s"))
    console.print()
    console.print(Text(_what_happened(result), "bold"))
