"""The script of the grid: cells by hand, runs that are cut off, files that it reads and writes."""

from __future__ import annotations

import json
import lzma
import time
from pathlib import Path

import pytest

from topkv_evaluation import CHECKPOINT
from topkv_evaluation.eval.results import read_rows
from topkv_evaluation.tasks.splits import REPORTING

SCRIPT = "grid"


@pytest.fixture(scope="module")
def grid(script):
    return script


def row_of(family, share, correct, **more):
    return {"algorithm": "quest", "plugin": "quest", "dense_layers": [], "model": "m",
            "family": family, "nominal_percent": share, "correct": correct, "questions": 4,
            "accuracy": correct / 4, "kl": correct / 10, "nll_change": 0.0, "agreement": 1.0,
            "recall": None, "exact_recall": None, "device_bytes_per_token": 100 * share,
            "link_bytes_per_token": 1, "context_bytes": 9, **more}  # fmt: skip


def test_a_cell_is_two_hundred_questions_and_fifteen_of_each_task(grid):
    args = grid.parse(["--out", "o"])
    assert args.split == REPORTING
    assert args.questions >= 15
    assert args.questions * len(args.tasks) >= 200
    assert len({*args.tasks}) == len(args.tasks)
    jobs = grid.jobs_of(args, Path("parts"))
    assert len({job.folder for job in jobs}) == len(jobs) == 2 * len(args.tasks)
    assert {job.options.budgets for job in jobs} == {"1%,2%,5%,10%"}
    assert all(job.options.split == REPORTING for job in jobs)


def test_algorithms_are_dealt_to_jobs(grid):
    options = ["--tasks", "facts", "walk", "--per-job", "2", "--dense-layers", "none"]
    args = grid.parse(["--out", "o", *options, "--algorithms", "a:x=1,y=2,b@a,c"])
    jobs = grid.jobs_of(args, Path("parts"))
    assert [job.options.algorithms for job in jobs] == [("a:x=1,y=2,b@a",)] * 2 + [("c",)] * 2
    assert len({job.folder for job in jobs}) == 4
    assert {job.options.dense_layers for job in jobs} == {("none",)}


def test_a_mixture_counts_questions_and_names_what_it_lacks(grid):
    rows = [row_of("a", 5.0, 4), row_of("b", 5.0, 1), row_of("a", 10.0, 2),
            row_of("b", 10.0, 0) | {"refused": "why"}]  # fmt: skip
    five, ten = grid.mixtures(rows)
    assert (five["correct"], five["questions"], five["accuracy"]) == (5, 8, 0.625)
    assert five["kl"] == 0.25
    assert five["device_bytes_per_token"] == 500
    assert five["recall"] is None
    assert five["lacks"] == []
    assert (ten["accuracy"], ten["lacks"]) == (0.5, ["b"])
    (none,) = grid.mixtures([rows[3]])
    assert none["refused"] == "why"
    text = grid.table([five, ten, none | {"dense_layers": [0, 1]}])
    assert "| quest | none | 62.5 | 50.0 (without 1 tasks) |" in text
    assert "| quest | 0-1 | - | - |" in text


def test_dense_attention_is_the_same_at_every_budget(grid):
    dense = row_of("a", 100.0, 4, plugin=None, algorithm="dense", dense_layers=[0, 1])
    text = grid.table([dense, row_of("a", 5.0, 1), row_of("a", 10.0, 2)])
    assert "| dense | 0-1 | 100.0 | 100.0 |" in text
    assert "| quest | none | 25.0 | 50.0 |" in text


@pytest.mark.slow
def test_calls_add_up(grid, tmp_path, capsys):
    """The first call is over before its second cell; the second finishes; a third does nothing."""
    words = ["--out", str(tmp_path), "--tasks", "facts", "--length", "600", "--questions", "1",
             "--algorithms", "streaming_llm,quest", "--budgets", "10%",
             "--device", "cpu"]  # fmt: skip
    args = grid.parse(words)
    name = f"{CHECKPOINT.name}-600"
    parts = tmp_path / "parts" / name
    for until, cells in ((0.0, 0), (time.time() + 0.01, None), (time.time() + 600, 3)):
        for job in grid.jobs_of(args, parts)[:1]:
            object.__setattr__(job, "until", until)
            said = grid.run_job(job)
            found = len(read_rows(job.folder))
            assert cells is None or found == cells, said
    before = (parts / "facts-none" / "results.jsonl").read_text()
    job = grid.jobs_of(args, parts)[0]
    object.__setattr__(job, "until", time.time() + 600)
    assert grid.run_job(job) == "facts-none: 3 of 3 cells"
    assert (parts / "facts-none" / "results.jsonl").read_text() == before
    grid.main([*words, "--minutes", "0"])
    assert "3 rows in" in capsys.readouterr().out
    with lzma.open(tmp_path / f"{name}.jsonl.xz", "rt") as written:
        assert [json.loads(line)["algorithm"] for line in written] == [
            row["algorithm"] for row in grid.gathered(parts)
        ]
    with lzma.open(tmp_path / f"{name}.all.jsonl.xz", "rt") as written:
        assert len(list(written)) == 3
    rows = [row["algorithm"] for row in grid.gathered(parts)]
    assert sorted(rows) == ["dense", "quest", "streaming_llm"]
    assert all(row["split"] == REPORTING for row in grid.gathered(parts))
    assert (tmp_path / f"{name}.md").read_text().count("| quest | none |") == 2
    assert (tmp_path / f"{name}.svg").read_text().startswith("<svg")
