"""Tables and figures of the documentation show the numbers of the files of raw numbers."""

from __future__ import annotations

import sys

import pytest

from tests.docs_blocks import DOCS, PAGES, ROOT

sys.path.insert(0, str(DOCS / "scripts"))

import figures


def test_every_figure_can_be_drawn():
    drawn = figures.figures()
    assert drawn.keys() == figures.FIGURES.keys()
    assert all(text.count("<path") > 20 for text in drawn.values())


PRUNED, LESS = "`top_p`", "`top_p`, p 0.95"
WIDE = f"{LESS}, `widen: 4`"
STAGES = {
    "| behind Quest": {
        "Quest alone": "quest",
        PRUNED: "p85",
        LESS: "p95",
        WIDE: "p95x4",
        "`residual`": "residual",
        "`residual`, `variance: true`": "variance",
        "`head_sparsity`, threshold 0.7": "heads7",
        "`share: FS`": "FS",
        "`share: FSSS`": "FSSS",
        "`ahead: true`": "ahead",
    },
    "| behind ParisKV": {
        "ParisKV alone": "pariskv",
        PRUNED: "paris_p85",
        LESS: "paris_p95",
        WIDE: "paris_p95x4",
    },
    "| `top_p` behind": {
        f"{label}, {what}": f"{name}_{short}"
        for name, label in figures.NAMES.items()
        if name in ("double_sparsity", "clusterkv", "pqcache", "rocketkv")
        for what, short in (("p 0.85", "p85"), ("p 0.95, `widen: 4`", "p95x4"))
    },
}
"""Names of rows by label, for each table of stages by the beginning of its head."""


def rows_of(text, head):
    """Rows of the Markdown table whose head begins so, as lists of cells."""
    lines = text[text.index(head) :].split("\n\n", 1)[0].splitlines()
    return [
        [cell.strip() for cell in line.strip("|").split("|")] for line in [lines[0], *lines[2:]]
    ]


def test_the_table_of_accuracy_is_that_of_the_raw_numbers():
    names = {"exact top-k": "exact", "SnapKV": "snapkv:generated=32", "ClusterKV": "clusterkv"}
    names |= {"Double Sparsity": "double_sparsity", "Quest": "quest"}
    names |= {"StreamingLLM": "streaming_llm"}
    found = {
        (r["algorithm"], r["nominal_percent"]): r for r in figures.read("eval/8k_01.jsonl.xz")
    }
    head, *rows = rows_of(PAGES["results.md"].read_text("utf-8"), "| budget | exact top-k")
    for budget, *cells in rows:
        for title, cell in zip(head[1:], cells, strict=True):
            row = found[names[title], float(budget.split()[0])]
            assert cell == ("-" if "refused" in row else str(row["correct"]))


OTHERS = {
    "StreamingLLM of kvpress": "kvpress streaming_llm",
    "SnapKV of kvpress": "kvpress snapkv",
}
"""Rows of the table of algorithms that no figure has."""

READ = {
    "read from GPU memory": "device_bytes_per_token",
    "over the link": "link_bytes_per_token",
}


def shown_of(title, cells, name, digits):
    """Text of a cell in a column like ``KL at 5 %``: a value of each model."""
    what, _, share = title.removesuffix(" %").rpartition(" at ")
    rows = [cell[name, float(share or what)] for cell in cells]
    if what == "KL":
        return " / ".join(f"{row['kl']:.2g}" for row in rows)
    if what in READ:
        digits = 2 if what == "over the link" else digits
        parts = [100 * row[READ[what]] / row["context_bytes"] for row in rows]
        return " / ".join(f"{part:.{digits}f} %" for part in parts) if any(parts) else "none"
    return " / ".join(f"{100 * row['accuracy']:.1f}" for row in rows)


@pytest.mark.parametrize("folder", ["grid", "stages"])
def test_the_tables_of_the_grid_are_those_of_the_raw_numbers(folder):
    """Cells are those of both models, all tasks together."""
    cells = [
        {
            (row["algorithm"], row["nominal_percent"]): row
            for row in figures.read(f"eval/{folder}/{model}-4096.all.jsonl.xz")
            if not row["dense_layers"] and "refused" not in row and not row["lacks"]
        }
        for model in figures.MODELS
    ]
    text, names, digits = PAGES["choosing.md"].read_text("utf-8"), STAGES, 1
    if folder == "grid":
        names = {"| algorithm": {label: name for name, label in figures.NAMES.items()} | OTHERS}
        digits = 0
    for head, labels in names.items():
        (_, *titles), *rows = rows_of(text, head)
        assert {label for label, *_ in rows} == labels.keys()
        for label, *found in rows:
            assert found == [shown_of(title, cells, labels[label], digits) for title in titles]


TIMED = {
    "quest": [None, {}, {"widen": 2}, {"p": 0.95, "widen": 4}],
    "pariskv": [None, {}, {"p": 0.95, "widen": 4}],
}
"""Parameters with which ``top_p`` was timed, by algorithm; None is the layer alone."""


def test_what_top_p_takes_is_that_of_the_raw_numbers():
    """Cells are times of the layer, and what the stage adds to it, with its bound in brackets."""
    _, *rows = rows_of(PAGES["choosing.md"].read_text("utf-8"), "| behind | |")
    timed, expected = figures.read("stages_h100.jsonl.xz")[1:], []
    for name, params in TIMED.items():
        alone, *behind = (
            [row for row in timed if row["algorithm"] == name and row.get("stages") == stages]
            for stages in (each if each is None else [stage(each)] for each in params)
        )
        expected.append([f"{row['layer_us']:.0f}" for row in alone])
        expected += [
            [
                f"+{more['layer_us'] - row['layer_us']:.0f} ({more['bound_us']:.0f})"
                for row, more in zip(alone, found, strict=True)
            ]
            for found in behind
        ]
    assert [cells for _, _, *cells in rows] == expected


def stage(params):
    return {"name": "top_p", **({"params": params} if params else {})}


@pytest.mark.parametrize("page", ["docs/tutorial.md", "examples/arkvale/README.md"])
def test_the_table_of_arkvale_is_that_of_the_raw_numbers(page):
    """Cells are ``right answers / attention mass``, without and with dense layers."""
    found = {
        (r["plugin"], r["unit"], tuple(r["dense_layers"]), r["nominal_percent"]): r
        for r in figures.read("eval/arkvale_cpu.jsonl.xz")
    }
    head, *rows = rows_of((ROOT / page).read_text("utf-8"), "| unit, dense layers, budget")
    assert len(rows) == 12
    for what, *cells in rows:
        unit, dense, budget = what.split(", ")
        layers = () if dense == "none" else (0, 1)
        for name, cell in zip(head[1:], cells, strict=True):
            row = found[name.lower(), int(unit), layers, float(budget.removesuffix(" %"))]
            assert cell == f"{row['correct']} / {100 * row['recall']:.1f} %"


def test_the_tables_of_calibrated_sharing_are_those_of_the_raw_numbers():
    """The output of the command, and the results of its patterns."""
    page = (ROOT / "docs/how.md").read_text("utf-8")
    first, *_ = found = figures.read("eval/share_calibrated.jsonl.xz")
    shown = {line.removeprefix(">").strip() for line in page.splitlines()}
    rows = [[each for each in row if each is not None] for row in first["similarity"]]
    for name, row in [*enumerate(rows), ("effect", first["effect"])]:
        cells = " ".join(f"{value:.3f}" for value in row)
        assert f"{name} {cells}" in {" ".join(line.split()) for line in shown}
    for each in first["patterns"]:
        figure = f"{each['loss']:.4f} {100 * each['mass']:.1f}%"
        line = f"{each['share']} {each['selecting']} {figure}"
        assert line in {" ".join(line.split()) for line in shown}
    asked = [(each["tasks"], each["budget_tokens"], each["config"]["share"]) for each in found]
    assert asked == [
        ("facts", 208, "FSFSSS"), ("facts", 416, "FSFSSS"), ("text", 208, "FSSSSF"),
        ("facts,text", 208, "FSFSSS"),
    ]  # fmt: skip
    cells = {
        (row["family"], row["algorithm"], row["nominal_percent"], row["questions"] == 100): row
        for row in figures.read("eval/share_cpu.jsonl.xz")
    }
    alone, calibrated = (
        [f"{cells['facts', name, budget, True]['correct']:.0f}" for budget in (5.0, 10.0)]
        for name in ("none", "FSFSSS")
    )
    reported = "answer {} at 5 % and {} at 10 %, `FSFSSS` {} and {}."
    assert reported.format(*alone, *calibrated) in page
    _, *table = rows_of(page, "| `share`, selecting, budget")
    assert len(table) == 10
    for what, *written in table:
        name, selecting, budget = what.split(", ")
        algorithm = "none" if name == "`F`" else name.strip("`")
        row = algorithm, float(budget.split()[0]), False
        facts, text = cells["facts", *row], cells.get(("text", *row))
        pattern = (name.strip("`") * 6)[:6]
        assert selecting == f"{pattern.count('F')} of 6"
        assert written == [
            f"{facts['correct']:.0f}",
            f"{facts['kl']:.3f}",
            f"{100 * facts['recall']:.1f} %",
            f"{text['kl']:.3f}" if text else "-",
        ]


def test_the_table_of_locality_is_that_of_the_raw_numbers():
    names = {"Quest": "quest", "Double Sparsity": "double_sparsity", "ParisKV": "pariskv"}
    rows = figures.read("locality.jsonl.xz")
    _, *table = rows_of((ROOT / "docs/simulate.md").read_text("utf-8"), "| | kept from the step")
    assert [title for title, *_ in table] == [*names]
    for title, *cells in table:
        mine = [row for row in rows if row["algorithm"] == names[title]]
        lru, belady = ([r for r in mine if r["policy"] == policy] for policy in ("lru", "belady"))
        layers = lru[0]["layer_overlap"]
        least = lru[0]["layers"][layers.index(min(layers))]
        assert cells[:2] == [
            f"{100 * lru[0]['overlap']:.1f} %",
            f"{100 * min(layers):.1f} %, {least}",
        ]
        assert cells[2:7] == [f"{100 * row['hit_rate']:.1f} %" for row in lru]
        assert cells[7] == f"{100 * belady[2]['hit_rate']:.1f} %"
        assert cells[8] == f"{lru[2]['bytes_per_step'] / 1e6:.2f}"


def test_the_kept_trace_replays_to_its_rows():
    from topkv_simulate.curve import Curve
    from topkv_simulate.replay import Replayer
    from topkv_simulate.trace import Trace

    replayer = Replayer(Trace.load(figures.RESULTS / "traces/smollm2_quest.npz"))
    replayer.check()
    curve = Curve(replayer)
    for row in figures.read("locality.jsonl.xz"):
        if row["algorithm"] == "quest" and row["policy"] == "lru":
            point = curve.at(row["buffer_tokens"], "lru")
            assert point.hit_rate == row["hit_rate"]


def test_steps_by_trace_and_by_drift_are_those_of_the_raw_numbers():
    """Hits and bytes are those of 16 requests of 32K."""
    names = {
        "Quest": "quest",
        "Quest, units of 8, int8": "quest, units of 8, int8",
        "Double Sparsity": "double_sparsity",
        "Double Sparsity, `top_p` 0.95 of twice": "double_sparsity, top_p 0.95 of twice",
        "ParisKV": "pariskv",
    }
    found = {}
    for row in figures.read("bench_trace.jsonl.xz")[1:]:
        drift = row["drift"] if isinstance(row["drift"], float) else "trace"
        size = row["context"], row["requests"]
        found[row["algorithm"], drift, size] = row
    sizes = [(32768, 1), (32768, 16), (131072, 1), (131072, 16)]
    _, *rows = rows_of(PAGES["choosing.md"].read_text("utf-8"), "| | selections | 32K x 1")
    assert len(rows) * len(sizes) - len(found) == 6  # three rows lack 128K
    for label, drift, *cells in rows:
        what = names[label], drift if drift == "trace" else float(drift.split()[1])
        of = [found.get((*what, size)) for size in sizes]
        steps = [f"{row['step_ms']['median']:.2f} ms" if row else "-" for row in of]
        last = of[1]
        hits = f"{100 * last['hit_rate']:.1f} %"
        assert cells == [*steps, hits, f"{last['link_bytes_per_step'] / 1e6:.1f}"], label
