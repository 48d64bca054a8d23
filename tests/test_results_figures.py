"""Tables of the README and of the page of results show the numbers of the files of raw numbers."""

from __future__ import annotations

import re

import pytest

from tests.docs_blocks import PAGES, ROOT
from tests.test_figures import figures, rows_of

README = (ROOT / "README.md").read_text("utf-8")
RESULTS = PAGES["results.md"].read_text("utf-8")

MEASURED = re.compile(r"\d[\d,.]* ?(ms|us|s|GiB|GB|MB|%|tokens/s|nats|GB/s)(?![\w/])")
"""A number with the unit of a measurement."""


def steps():
    """Rows of ``generate_tables`` by contestant, context, requests and fp8, at 15 % new."""
    return {
        (
            row["contestant"],
            row["context"],
            row["requests"],
            "host_format=fp8" in row["command"],
        ): row
        for row in figures.read("generate_tables.jsonl.xz")
        if "--drift" not in row["command"]
    }


def ms(row):
    return f"{row['step_ms']['median']:.1f}"


def gib(row):
    value = row["bytes"]["device"] / 2**30
    return f"{value:.2f}" if value < 1 else f"{value:.1f}"


def rate(row):
    return f"{row['tokens_per_second']:.0f} tokens/s"


def lost(name):
    """KL of an algorithm at 5 % of texts of 2048 tokens, and what it reads from GPU memory."""
    rows = [
        row
        for row in figures.read(figures.TEXTS)
        if row["algorithm"] == name and row["nominal_percent"] == 5
    ]
    assert sum(len(row["kl_contexts"]) for row in rows) == 40
    read = sum(row["device_bytes_per_token"] / row["context_bytes"] for row in rows)
    return f"{sum(row['kl'] for row in rows) / len(rows):.4f} nats", f"{25 * read:.1f} %"


def test_the_table_of_the_readme_is_that_of_the_raw_numbers():
    found = steps()
    alone, ours = (found[name, 131000, 1, False] for name in ("topkv-resident", "topkv"))
    few, many = found["topkv-resident", 32000, 4, False], found["topkv", 32000, 16, True]
    short, longer = (found[name, 32768, 1, False] for name in ("topkv-resident", "topkv"))
    assert max(few["bytes"]["device"], many["bytes"]["device"]) < 16 * 2**30
    (exact, _), (kl, read) = lost("exact"), lost("ds_p95w2")
    _, *rows = rows_of(README, "| case |")
    assert [row[:3] for row in rows] == [
        [
            "one request of 131,000 tokens",
            *(f"{gib(each)} GiB, {ms(each)} ms a step" for each in (alone, ours)),
        ],
        [
            "requests of 32,000 tokens in 16 GiB",
            f"4 of them, {rate(few)}",
            f"16 of them, {rate(many)} (`host_format: fp8`)",
        ],
        [
            "one request of 32,768 tokens",
            *(f"{ms(each)} ms a step" for each in (short, longer)),
        ],
        [
            "KL to dense attention at 5 % of the tokens",
            f"exact top-k: {exact}",
            f"{kl}, {read} of the bytes",
        ],
    ]
    for each in (alone, ours, few, many, short, longer):
        assert each["device"]["name"] == "NVIDIA H200"
        assert "--model llama-3.1-8b --set algorithm=quest --set budget=2048" in each["command"]
        if each["hit_rate"] is not None:
            assert each["hit_rate"] == pytest.approx(0.85, abs=0.001)


def test_measurements_stand_in_the_table_of_the_readme_alone():
    """The test above compares its rows; the sentence below it says how they were measured."""
    table = README.index("| case |"), README.index("## When not to use it")
    outside = README[: table[0]] + README[table[1] :]
    assert not [match[0] for match in MEASURED.finditer(outside)]
    caption = README[slice(*table)].rpartition("|")[2]
    assert [match[0] for match in MEASURED.finditer(caption)] == ["15 %"]
    assert (
        len(MEASURED.findall("8.9 ms, 131,072 s, 85 % and 16 GiB, 5 nats, 1 GB/s, 839 tokens/s"))
        == 7
    )


def test_the_table_of_steps_is_that_of_the_raw_numbers():
    found = steps()
    contexts = {"32K": (32768, 32000), "128K": (128000, 130900), "131K": (131000,)}
    _, *rows = rows_of(RESULTS, "| context x requests | resident | topkv | topkv, fp8")
    ways = (("topkv-resident", False), ("topkv", False), ("topkv", True))
    shown = set()
    for what, *cells in rows:
        context, _, requests = what.partition(" x ")
        keys = [
            [(name, size, int(requests), fp8) for size in contexts[context]] for name, fp8 in ways
        ]
        each = [next((key for key in own if key in found), None) for own in keys]
        shown |= {key for key in each if key}
        resident, plain, coded = (found.get(key) for key in each)
        assert cells == [
            *(ms(row) if row else "-" for row in (resident, plain, coded)),
            gib(resident) if resident else "-",
            gib(plain or coded) if plain or coded else "-",
        ], what
    assert shown == {key for key in found if key[0] in ("topkv-resident", "topkv")}


def test_the_sentences_about_steps_are_those_of_the_raw_numbers():
    found = steps()
    (drifted,) = (
        row for row in figures.read("generate_tables.jsonl.xz") if "--drift" in row["command"]
    )
    resident = found["topkv-resident", 131000, 1, False], found["topkv", 131000, 1, False]
    first, ours = (row["first_token_seconds"] for row in resident)
    compiled = [
        ms(found["topkv-compiled", *key])
        for key in ((32768, 1, False), (32768, 1, True), (130900, 1, False))
    ]
    rates = [
        rate(found[key]).removesuffix(" tokens/s")
        for key in (
            ("topkv-resident", 32000, 4, False),
            ("topkv", 32000, 16, True),
            ("topkv-resident", 128000, 1, False),
            ("topkv", 128000, 6, True),
        )
    ]
    offloaded = [
        f"{found['offloaded', *key, False]['tokens_per_second']:.1f}"
        for key in ((32000, 16), (128000, 1))
    ]
    text = " ".join(RESULTS.split())
    for sentence, values in (
        ("4 requests of 32K at {} tokens/s, or 16 at {} with fp8;", rates[:2]),
        ("one of 128K at {}, or six at {}.", rates[2:]),
        ("cache makes {} tokens/s with the 16, and {} with one of 128K.", offloaded),
        ("32K x 16 takes {} ms.", [ms(drifted)]),
        ("32K x 1 takes {} ms, with fp8 {}, and 128K x 1 {}.", compiled),
        ("comes after {} s, resident after {}.", [f"{ours:.1f}", f"{first:.1f}"]),
    ):
        assert sentence.format(*values) in text, (sentence, values)


def test_the_table_of_decode_steps_is_that_of_the_raw_numbers():
    dense, ours = (
        [row for row in figures.read("decode_step.jsonl") if row["what"] == what]
        for what in ("dense on the GPU", "topkv, quest")
    )
    _, *rows = rows_of(RESULTS, "| context x requests | cache on the GPU")
    expected = [
        [
            f"{one['context'] // 1024}K x {one['requests']}",
            f"{one['ms']:.2f} ms",
            f"{one['device_kv_gib']:.1f} GiB",
            f"{other['ms']:.2f} ms",
            f"{other['device_kv_gib']:.2f} + {other['representation_gib']:.2f} GiB",
            f"{100 * other['hit_rate']:.0f} %",
        ]
        for one, other in zip(dense, ours, strict=True)
    ]
    assert rows == expected


def test_the_table_of_swap_in_is_that_of_the_raw_numbers():
    found = {}
    for row in figures.read("swap_in.jsonl.xz"):
        if row["what"] == "swap_in":
            found.setdefault(f"{row['entry']} B, {row['requests']}", []).append(row)
    _, *rows = rows_of(RESULTS, "| entry, requests | 0 % missed")
    for what, *cells in rows:
        assert [round(100 * row["miss"]) for row in found[what]] == [0, 2, 15, 50]
        digits = [0 if row["us"] >= 100 else 1 for row in found[what]]
        times = zip(found[what], digits, strict=True)
        assert cells == [f"{row['us']:.{digit}f}" for row, digit in times], what
    (last,) = (row for row in figures.read("swap_in.jsonl.xz") if row.get("tokens") == 32768)
    said = f"at {last['gbs']:.1f} GB/s, {100 * last['of_link']:.0f} % of the link"
    assert said in RESULTS


def test_the_table_of_attention_is_that_of_the_raw_numbers():
    found = {}
    for row in figures.read("flash_attention.jsonl.xz"):
        found.setdefault((row["scope"], row["unit"]), []).append(row)
    _, *rows = rows_of(RESULTS, "| tables | batch 1")
    for (what, *cells), scope in zip(rows, ("shared", "kv_head"), strict=True):
        assert what == {"shared": "shared", "kv_head": "per kv-head"}[scope]
        each = found[scope, 16]
        assert [row["batch"] for row in each] == [1, 8, 32, 64]
        assert cells == [
            " / ".join(
                f"{row[name]:.{0 if row[name] >= 100 else 1}f}"
                for name in ("triton_us", "us", "library_us")
            )
            for row in each
        ]
