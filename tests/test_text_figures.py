"""Tables of text and answers of the real model show the numbers of the files of raw numbers."""

from __future__ import annotations

import sys

from tests.docs_blocks import PAGES, ROOT
from tests.test_figures import figures, rows_of

ROWS_OF_TEXTS = {
    "exact top-k": "exact",
    "Double Sparsity, `top_p` 0.95 of twice": "ds_p95w2",
    "Double Sparsity": "double_sparsity",
    "Double Sparsity, `top_p` 0.95": "ds_p95",
    "ParisKV, 4 sinks, 8 recent, `top_p` 0.95 of 4 times": "paris_48_p95w4",
    "ParisKV, 4 sinks, 8 recent": "paris_4_8",
    "ParisKV, none forced": "pariskv",
    "PQCache, 4 sinks, 8 recent": "pq_4_8",
    "PQCache, none forced": "pqcache",
    "ClusterKV": "clusterkv",
    "ClusterKV, `top_p` 0.95 of 4 times": "clusterkv_p95w4",
    "Quest, units of 4, int8, `top_p` 0.95 of 4 times": "quest_4i_p95w4",
    "Quest, units of 8, int8, `top_p` 0.95 of 4 times": "quest_8i_p95w4",
    "Quest, units of 4, int8": "quest_4i",
    "Quest, units of 8, int8": "quest_8i",
    "Quest": "quest",
    "Quest, `residual`": "quest_res",
    "RocketKV": "rocketkv",
    "StreamingLLM": "streaming_llm",
    "InfLLM-v2": "infllm_v2",
}


def test_the_table_of_texts_is_that_of_the_raw_numbers():
    kinds = ("prose", "code", "tables", "dialogue")
    found = {}
    for row in figures.read(figures.TEXTS):
        found[row["algorithm"], row["nominal_percent"], row["family"].partition(":")[2]] = row
    head, *rows = rows_of(PAGES["choosing.md"].read_text("utf-8"), "| | 1 % | 2 % | 5 %")
    assert head[1:9] == ["1 %", "2 %", "5 %", "10 %", *(f"{kind} at 5 %" for kind in kinds)]
    assert [row[0] for row in rows] == [*ROWS_OF_TEXTS]
    for title, *cells in rows:
        name = ROWS_OF_TEXTS[title]
        for share, cell in zip((1, 2, 5, 10), cells, strict=False):
            each = [found[name, share, kind] for kind in kinds]
            if any("refused" in row for row in each):
                assert cell == "-"
                continue
            assert sum(len(row["kl_contexts"]) for row in each) == 40
            assert cell == f"{sum(row['kl'] for row in each) / 4:.4f}"
        each = [found[name, 5, kind] for kind in kinds]
        assert cells[4:8] == [f"{row['kl']:.4f}" for row in each]
        for cell, byte, digits in zip(cells[8:], ("device", "link"), (1, 2), strict=True):
            share = sum(row[f"{byte}_bytes_per_token"] / row["context_bytes"] for row in each) / 4
            assert cell == f"{100 * share:.{digits}f} %"


SAME = {"pariskv": "paris_4_8", "pqcache": "pq_4_8"}
"""Names at 2048 tokens of defaults that were chosen later."""


def test_the_table_of_longer_texts_is_that_of_the_raw_numbers():
    texts = {n: figures.read(figures.TEXTS.replace("2048", str(n))) for n in (2048, 4096, 8128)}
    titles = {name: title for title, name in ROWS_OF_TEXTS.items()}
    titles |= {name: titles[other] for name, other in SAME.items()}
    _, *rows = rows_of(PAGES["choosing.md"].read_text("utf-8"), "| | 2 % of 2K")
    names = {titles[name]: name for name in {row["algorithm"] for row in texts[8128]} - {"dense"}}
    assert {title for title, *_ in rows} == names.keys()
    for title, *cells in rows:
        name, found = names[title], []
        for share in (2, 5):
            for length, every in texts.items():
                own = SAME.get(name, name) if length == 2048 else name
                each = [r for r in every if (r["algorithm"], r["nominal_percent"]) == (own, share)]
                assert sum(len(row["kl_contexts"]) for row in each) == 40
                found.append(f"{sum(row['kl'] for row in each) / 4:.4f}")
        for byte, digits in (("device", 1), ("link", 2)):
            parts = [row[f"{byte}_bytes_per_token"] / row["context_bytes"] for row in each]
            found.append(f"{100 * sum(parts) / 4:.{digits}f} %")
        assert cells == found


def kl_of(rows, name, dense=()):
    """KL over the kinds of text at 5 %, and what is read from GPU memory in percent."""
    each = [
        row
        for row in rows
        if row["algorithm"] == name and row["dense_layers"] == [*dense]
        if row["nominal_percent"] == 5
    ]
    assert sum(len(row["kl_contexts"]) for row in each) == 40
    read = sum(row["device_bytes_per_token"] / row["context_bytes"] for row in each)
    return sum(row["kl"] for row in each) / 4, f"{25 * read:.1f} %"


def test_the_table_of_dense_layers_is_that_of_the_raw_numbers():
    none, dense = (
        figures.read(figures.TEXTS.replace("/texts/", f"/{folder}/"))
        for folder in ("texts", "texts_dense")
    )
    names = {ROWS_OF_TEXTS[title]: title for title in ROWS_OF_TEXTS}
    _, *rows = rows_of(PAGES["choosing.md"].read_text("utf-8"), "| | none dense")
    for name in ("exact", "ds_p95w2", "double_sparsity", "pariskv", "quest"):
        (alone, least), (first, _), (both, most) = (
            kl_of(none, SAME.get(name, name)),
            kl_of(dense, name, [0]),
            kl_of(dense, name, [0, 1]),
        )
        cells = [f"{kl:.4f}" for kl in (alone, first, both)]
        assert [names[SAME.get(name, name)], *cells, least, most] in rows
    assert len(rows) == 5


def test_stages_on_the_real_model_are_those_of_the_raw_numbers():
    text = PAGES["choosing.md"].read_text("utf-8")
    rows = figures.read(figures.TEXTS.replace("/texts/", "/texts_stages/"))
    for name in ("ds_ahead", "ds_FS"):
        assert f"({kl_of(rows, name)[0]:.4f})" in text
    for name, base in (("quest_ahead", "quest"), ("quest_FS", "quest"), ("quest_heads7", "quest")):
        assert f"{kl_of(rows, name)[0] - kl_of(rows, base)[0]:.4f} (" in text


def test_the_table_of_needles_is_that_of_the_raw_numbers():
    rows = figures.read(figures.TEXTS.replace("/texts/", "/needles/"))
    titles = {name: title for title, name in ROWS_OF_TEXTS.items()}
    titles |= {name: titles[other] for name, other in SAME.items()}
    found: dict[str, dict[float, str]] = {}
    for row in rows:
        assert row["questions"] == 40
        if row["plugin"] is None:
            assert row["correct"] == 40
        else:
            cells = found.setdefault(titles[row["algorithm"]], {})
            cells[row["nominal_percent"]] = f"{row['correct']:.0f}"
    text = PAGES["choosing.md"].read_text("utf-8").partition("### Answers of the real model")[2]
    _, *table = rows_of(text, "| | 1 %")
    assert {title: cells for title, *cells in table} == {
        title: [cells[share] for share in (1, 2, 5, 10)] for title, cells in found.items()
    }


def test_differences_of_sampled_texts_are_those_of_the_raw_numbers():
    sys.path.append(str(ROOT / "benchmarks"))
    import long_text

    rows = figures.read("long_text.jsonl")
    text = PAGES["choosing.md"].read_text("utf-8").partition("### Long generation")[2]
    assert f"has {rows[0]['nll']:.2f} nats" in text
    found = {row["algorithm"]: row for row in long_text.compared(rows)}
    for name in ("quest", "pariskv", "double_sparsity", "ds_p95w2", "exact"):
        more, low, high = (found[name][f"more{end}"] for end in ("", "_low", "_high"))
        assert f"by {more:.2f} ({low:.2f} to {high:.2f})" in text
    apart = {name for name, row in found.items() if row["more_low"] > 0 or row["more_high"] < 0}
    assert apart == {"quest", "pariskv"}
