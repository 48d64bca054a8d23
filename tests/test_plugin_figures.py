"""Tables in the READMEs of plugins show the numbers of the files of raw numbers."""

from __future__ import annotations

import pytest

from tests.docs_blocks import ROOT
from tests.test_figures import figures, rows_of


def test_the_table_of_the_trained_gate_is_that_of_the_raw_numbers():
    """Cells are means of the fourteen tasks."""
    text = (ROOT / "plugins/trained_gate/README.md").read_text("utf-8")
    cells = {}
    for row in figures.read("eval/gate.jsonl.xz"):
        cells.setdefault((row["plugin"], row["algorithm"], row["nominal_percent"]), []).append(row)
    (_, *budgets), *rows = rows_of(text, "| selector")
    assert len(rows) == 5
    for name, *found in rows:
        for budget, shown in zip(budgets, found, strict=True):
            (some,) = (
                each
                for (plugin, label, percent), each in cells.items()
                if name in (label, plugin if plugin == "trained_gate" else None)
                and percent == float(budget.removesuffix(" %"))
            )
            assert len(some) == 14
            assert shown == gate_cell(some)
    dense = [row for (plugin, *_), some in cells.items() if plugin is None for row in some]
    assert f"gives {mean(dense, 'accuracy', 100):.1f} % right answers" in text
    assert f"reads {mean(dense, 'device_bytes_per_token', 2**-20):.1f} MiB a token" in text
    base, gate = figures.read("gate_training.jsonl.xz")
    last = gate["curve"][-1]
    assert f"{last['held']:.3f} of the mass, where the best 16 of 512 blocks hold" in text
    assert f"hold {last['best']:.3f} (documents of {last['length']} tokens" in text
    page = (ROOT / "tools/evaluation/training/README.md").read_text("utf-8")
    assert f"in {base['seconds']:.0f} and {gate['seconds']:.0f} seconds" in page


def mean(rows, key, factor=1.0):
    return factor * sum(row[key] for row in rows) / len(rows)


def gate_cell(rows):
    read = mean(rows, "device_bytes_per_token", 2**-20)
    fetched = mean(rows, "link_bytes_per_token", 2**-10)
    shares = (f"{mean(rows, key, 100):.1f} %" for key in ("accuracy", "recall"))
    right, held = shares
    return f"{right} / {mean(rows, 'kl'):.3f} / {held} / {read:.2f}, {fetched:.0f}"


def test_times_of_the_trained_gate_are_those_of_the_raw_numbers():
    text = (ROOT / "plugins/trained_gate/README.md").read_text("utf-8")
    _, *rows = rows_of(text, "| requests | tokens")
    timed = figures.read("trained_gate.jsonl")[1:]
    keys = ("score_us", "retrieve_us", "bound_us")
    assert [[float(cell.replace(",", "")) for cell in cells] for cells in rows] == [
        [row["requests"], row["tokens"], *(round(row[key], 1) for key in keys)] for row in timed
    ]
    prompts = [row["prompt_us"] for row in timed if row["requests"] == 1]
    assert "select in {:.0f} us at 32,768 tokens and in {:.0f} at 131,072".format(*prompts) in text


def test_the_table_of_pariskv_is_that_of_the_raw_numbers():
    """Cells are ``right answers / what is read / attention mass``."""
    found = {
        (r["algorithm"], tuple(r["dense_layers"]), r["nominal_percent"]): r
        for r in figures.read("eval/pariskv_cpu.jsonl.xz")
    }
    text = (ROOT / "plugins/pariskv/README.md").read_text("utf-8")
    head, *rows = rows_of(text, "| dense layers, budget")
    assert len(rows) == 6
    for what, *cells in rows:
        dense, budget = what.split(", ")
        layers = () if dense == "none" else (0, 1)
        for name, cell in zip(head[1:], cells, strict=True):
            row = found.get((name, layers, float(budget.removesuffix(" %"))))
            shares = (row["with_index_percent"], 100 * row["recall"]) if row else ()
            right = [str(row["correct"])] if row else ["-"]
            assert cell == " / ".join([*right, *(f"{share:.1f} %" for share in shares)])


@pytest.mark.parametrize(
    ("page", "head", "names"),
    [
        ("plugins/residual/README.md", "| behind Quest", ("quest", "residual", "variance")),
        ("docs/how.md", "| `share`, budget", ("quest", "share2", "share4")),
    ],
)
def test_tables_of_residual_and_of_shared_selections_are_those_of_the_raw_numbers(
    page, head, names
):
    found = {
        (row["family"], row["algorithm"], row["nominal_percent"]): row
        for row in figures.read("eval/residual_cpu.jsonl.xz")
    }
    _, *rows = rows_of((ROOT / page).read_text("utf-8"), head)
    cells = [(name, budget) for budget in (2, 5) for name in names]
    for (what, *shown), (name, budget) in zip(rows, cells, strict=True):
        assert what.endswith(f", {budget} %")
        text, facts = (found[family, name, budget] for family in ("text", "facts"))
        alone = found["text", "quest", budget]["device_bytes_per_token"]
        assert shown == [
            f"{text['kl']:.3f}",
            f"{100 * text['agreement']:.1f} %",
            f"{facts['correct']:.0f}",
            f"{facts['kl']:.2f}",
            f"{100 * text['device_bytes_per_token'] / alone:.1f} %",
        ]


def test_the_table_of_statistics_is_that_of_the_raw_numbers():
    """Cells are ``right answers / attention mass``."""
    found = {
        (r["algorithm"], r["nominal_percent"]): r
        for r in figures.read("eval/statistics_cpu.jsonl.xz")
    }
    text = (ROOT / "plugins/double_sparsity/README.md").read_text("utf-8")
    (_, *budgets), *rows = rows_of(text, "| channels by")
    names = ("span", "qk", "qk_file", "q")
    for (_, *cells), name in zip(rows, names, strict=True):
        for budget, cell in zip(budgets, cells, strict=True):
            row = found.get((name, float(budget.removesuffix(" %"))))
            shown = f"{row['correct']:.0f} / {100 * row['recall']:.1f} %" if row else "-"
            assert cell == shown


def test_tables_of_head_sparsity_are_those_of_the_raw_numbers():
    """``topkv eval`` leaves out the sample: 64 units of 4 runs of 36 bytes, of 8 lanes."""
    text = (ROOT / "plugins/head_sparsity/README.md").read_text("utf-8")
    _, *rows = rows_of(text, "| threshold | right")
    found = {
        (r["family"], r["algorithm"]): r for r in figures.read("eval/head_sparsity_cpu.jsonl.xz")
    }
    for (_, *cells), name in zip(rows, ("quest", "t7", "t5", "t5r"), strict=True):
        both = [found[family, name] for family in ("facts", "text")]
        alone = [found[family, "quest"] for family in ("facts", "text")]
        facts, plain = both
        shown = [f"{facts['correct']:.0f}", f"{facts['kl']:.3f}", f"{plain['kl']:.3f}"]
        shown.append(f"{100 * plain['agreement']:.1f} %")
        for key in ("selected_units", "loaded_units", "device_bytes_per_token"):
            sample = 64 * 4 * 36 * 8 if key[0] == "d" and name != "quest" else 0
            pairs = zip(both, alone, strict=True)
            shares = (f"{100 * (row[key] + sample) / quest[key]:.1f}" for row, quest in pairs)
            shown.append(" / ".join(shares) + " %")
        assert cells == shown
    reported = {
        (r["run"], r["bits"], r["sample"], r["candidates"]): r
        for r in figures.read("head_estimates.jsonl")
    }
    kinds = {"all": (None, True), "a sample alone": (64, False)}
    kinds["candidates and a sample"] = (64, True)
    _, *rows = rows_of(text, "| means of, bits")
    for what, size, *cells in rows:
        run, bits, which = what.split(", ")
        key = (int(run.split()[0]), 0 if bits == "whole" else int(bits), *kinds[which])
        row, width = reported[key], 256 if bits == "whole" else 68
        assert int(size) == width * 16 // key[0]
        assert cells == [f"{row['correlation']:.3f}", f"{row['error']:.3f}"]


def test_the_table_of_skip_softmax_is_that_of_the_raw_numbers():
    found = {
        (r["algorithm"], r["nominal_percent"]): r
        for r in figures.read("eval/skip_softmax_cpu.jsonl.xz")
    }
    counted = {
        (r["budget"], r["factor"]): r for r in figures.read("eval/skip_softmax_blocks.jsonl")
    }
    text = (ROOT / "plugins/skip_softmax/README.md").read_text("utf-8")
    _, *rows = rows_of(text, "| budget, factor")
    assert len(rows) == 2 + len(counted)
    for what, *cells in rows:
        budget, factor = what.split(" %, ")
        name = "quest" if factor == "none" else f"factor_{factor}"
        row, share = found[name, float(budget)], "-"
        if factor != "none":
            blocks = counted[f"{budget}%", float(factor)]
            share = f"{100 * blocks['left_out'] / blocks['blocks']:.1f} %"
        assert cells == [f"{row['correct']:.0f}", share, f"{row['kl']:.1e}"]


def test_the_table_of_rocketkv_is_that_of_the_raw_numbers():
    """Cells are ``right answers / attention mass``, by how questions are read."""
    found = {
        (r["algorithm"], r["question"], tuple(r["dense_layers"]), r["nominal_percent"]): r
        for r in figures.read("eval/rocketkv_cpu.jsonl.xz")
    }
    text = (ROOT / "plugins/rocketkv/README.md").read_text("utf-8")
    head, *rows = rows_of(text, "| question, dense layers, budget")
    assert len(rows) == 8
    for what, *cells in rows:
        question, dense, budget = what.split(", ")
        mode = {"read": "dense", "decoded": "sparse"}[question]
        layers = () if dense == "none" else (0, 1)
        for name, cell in zip(head[1:], cells, strict=True):
            row = found.get((name, mode, layers, float(budget.removesuffix(" %"))))
            expected = f"{row['correct']:.0f} / {100 * row['recall']:.1f} %" if row else "-"
            assert cell == expected


def test_tables_of_pqcache_are_those_of_the_raw_numbers():
    """Cells are ``right answers / attention mass``, and mass beside an open and a full window."""
    text = (ROOT / "plugins/pqcache/README.md").read_text("utf-8")
    found = {
        (r["algorithm"], tuple(r["dense_layers"]), r["nominal_percent"]): r
        for r in figures.read("eval/pqcache_cpu.jsonl.xz")
    }
    head, *rows = rows_of(text, "| dense layers, budget")
    assert len(rows) == 4
    for what, *cells in rows:
        dense, budget = what.split(", ")
        layers = () if dense == "none" else (0, 1)
        for name, cell in zip(head[1:], cells, strict=True):
            row = found[name, layers, float(budget.removesuffix(" %"))]
            assert cell == f"{row['correct']:.0f} / {100 * row['recall']:.1f} %"
    mass = {
        (r["how"], r.get("subvectors"), r.get("window"), r["recent"], r["decoded"]): r["mass"]
        for r in figures.read("pqcache_drift.jsonl.xz")
    }
    _, *rows = rows_of(text, "| decoded tokens are scored by")
    ways = [("frozen", None, 0), ("frozen", None, 41)]
    ways += [("last", 1024, 0), ("keys", 1024, 0), ("keys", 256, 0)]
    for (how, window, recent), (_, *cells) in zip(ways, rows, strict=True):
        for subvectors, cell in zip((4, 2), cells, strict=True):
            both = (mass[how, subvectors, window, recent, length] for length in (2047, 2048))
            assert cell == " / ".join(f"{100 * each:.1f}" for each in both) + " %"


def test_the_table_of_top_p_is_that_of_the_raw_numbers():
    """Units that are attended and loaded, and bytes that are read, are shares of Quest's alone."""
    found = {r["algorithm"]: r for r in figures.read("eval/top_p_cpu.jsonl.xz")}
    text = (ROOT / "plugins/top_p/README.md").read_text("utf-8")
    _, alone, *rows = rows_of(text, "| p, candidates")
    labels = {("0.95", "K"): "p95", ("0.85", "K"): "p85", ("1", "4K"): "quest4"}
    labels |= {("0.95", "4K"): "p95x4", ("0.85", "4K"): "p85x4"}
    assert [tuple(what.split(", ")) for what, *_ in rows] == [*labels]
    quest = found["quest"]
    for (_, *cells), name in zip([alone, *rows], ["quest", *labels.values()], strict=True):
        row = found[name]
        keys = ("selected_units", "loaded_units", "device_bytes_per_token")
        shares = [row[key] / quest[key] for key in keys]
        shown = [f"{100 * share:.1f} %" for share in (*shares, row["recall"])]
        assert cells == [f"{row['correct']:.0f}", *shown]


def test_times_of_infllm_v2_are_those_of_the_raw_numbers():
    text = (ROOT / "plugins/infllm_v2/README.md").read_text("utf-8")
    _, *rows = rows_of(text, "| requests | tokens")
    timed = [row for row in figures.read("infllm_v2.jsonl")[1:] if row["scope"] == "kv_head"]
    keys = ("score_us", "retrieve_us", "bound_us")
    assert rows == [
        [f"{row['requests']}", f"{row['tokens']:,}", *(f"{row[key]:.1f}" for key in keys)]
        for row in timed
    ]


@pytest.mark.parametrize(
    ("plugin", "stages"),
    [
        ("residual", [{"name": "residual"}, {"name": "residual", "params": {"variance": True}}]),
        ("head_sparsity", [{"name": "head_sparsity"}]),
    ],
)
def test_times_of_a_stage_are_those_of_the_raw_numbers(plugin, stages):
    """Cells are times of a captured layer behind Quest, beside Quest alone."""
    text = (ROOT / "plugins" / plugin / "README.md").read_text("utf-8")
    timed = {
        (row["requests"], row["tokens"], str(row.get("stages"))): round(row["layer_us"])
        for row in figures.read("stages.jsonl.xz")[1:]
        if row["algorithm"] == "quest"
    }
    _, *rows = rows_of(text, "| requests | tokens | Quest")
    assert len(rows) == 6
    for requests, tokens, *shown in rows:
        at = int(requests), int(tokens.replace(",", ""))
        found = [timed[(*at, str(asked))] for asked in (None, *([stage] for stage in stages))]
        assert [int(each) for each in shown] == found
