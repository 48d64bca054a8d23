"""The script that compares right answers before and behind a change, on rows by hand."""

from __future__ import annotations

import json

SCRIPT = "pairs"


def write(folder, *rows):
    for family, algorithm, correct, data in rows:
        line = {"key": f"{family} {algorithm}", "data": data, "model": "m", "task": family,
                "question": "sparse", "algorithm": algorithm, "plugin": algorithm,
                "family": family, "dense_layers": [], "nominal_percent": 5.0,
                "correct": correct, "questions": 10, "accuracy": correct / 10}  # fmt: skip
        path = folder / family / "results.jsonl"
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def test_cells_are_compared_over_the_tasks_that_both_asked_alike(script, tmp_path, capsys):
    shared = [("facts", "quest", 6, "a"), ("walk", "quest", 2, "b"), ("vt", "quest", 9, "c")]
    write(tmp_path / "before", *shared, ("facts", "gone", 1, "a"))
    behind = [("facts", "quest", 8, "a"), ("walk", "quest", 1, "b"), ("vt", "quest", 0, "d")]
    write(tmp_path / "behind", *behind, ("facts", "new", 1, "a"))
    out = tmp_path / "pairs.jsonl"
    script.main([str(tmp_path / "before"), str(tmp_path / "behind"), "--out", str(out)])
    cell, last = map(json.loads, out.read_text().splitlines())
    assert (cell["before"], cell["behind"], cell["points"]) == (40.0, 45.0, 5.0)
    assert cell["tasks"] == {"facts": 20.0, "walk": -10.0}
    shown = last["cells"], last["points"], last["ci_low"], last["ci_high"]
    assert shown == (1, 5.0, -10.0, 20.0)
    assert "mean of 1 cells +5.00 points, -10.00 to +20.00" in capsys.readouterr().out


def test_a_task_counts_once_in_the_interval_however_many_cells_it_has(script):
    rows = [{"tasks": {"facts": 10.0, "walk": 0.0}}] * 50
    value, low, high = script.mean(rows)
    assert (value, low, high) == (5.0, 0.0, 10.0)
