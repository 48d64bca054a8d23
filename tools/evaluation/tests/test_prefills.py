"""Contexts are read once for all cells of a task, and the rows are those of contexts read anew."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from topkv import attach
from topkv.plugins import registry
from topkv_evaluation import CHECKPOINT, DSA_CHECKPOINT
from topkv_evaluation.eval import cells, prefills, tasks
from topkv_evaluation.eval.cells import Cell, Grid, config_of, run_cells
from topkv_evaluation.eval.choices import read_algorithms
from topkv_evaluation.eval.prefills import Prefills, replay
from topkv_evaluation.loading import load_model
from topkv_testing.integrity import check_integrity

CHOICES = (
    "quest,pariskv,pqcache,rocketkv,clusterkv,snapkv:window=16,generated=40,streaming_llm,exact,"
    "quest:share=FSS,unit=32,stages=top_p,double_sparsity:scope=shared"
)

TIMES = {"seconds", "decode_seconds"}


@pytest.fixture(scope="module")
def model():
    return load_model(CHECKPOINT).eval()


@pytest.fixture(scope="module")
def task():
    """Two contexts; the second ends within a unit, a page and a chunk."""
    found = tasks.retrieval_task(768, questions=2, per_context=1, seed=3)
    first, second = found.contexts
    return replace(found, contexts=(first, second[37:]))


@pytest.fixture
def forwards(monkeypatch):
    """Contexts that the model reads."""
    read, found = prefills.read_context, []

    def counted(handle, context, chunk):
        found.append(context)
        return read(handle, context, 300)

    monkeypatch.setattr(prefills, "read_context", counted)
    return found


def grid_of(model):
    return Grid(model, "triton_attention", None, 32, forced=1)


def rows_of(model, task, words, limit=None, monkeypatch=None):
    if limit is not None:
        monkeypatch.setattr(cells, "Prefills", lambda: Prefills(limit))
    layers = model.config.num_hidden_layers
    asked = read_algorithms([words], 64, registry())
    grid = [Cell(task, None, 1.0, tuple(range(layers)))]
    grid += [Cell(task, choice, 0.1, (0,)) for choice in asked]
    return [*run_cells(grid, grid_of(model), lambda cell: None)]


def measured(rows):
    return [{name: row[name] for name in row if name not in TIMES} for row in rows]


@pytest.mark.parametrize(
    "choices",
    [
        pytest.param("rocketkv,quest:share=FSS,unit=32,stages=top_p", marks=[pytest.mark.nightly]),
        pytest.param(CHOICES, marks=[pytest.mark.nightly], id="every algorithm"),
    ],
)
def test_rows_are_those_of_contexts_that_are_read_anew(
    model, task, forwards, monkeypatch, choices
):
    """Bit for bit: answers, masses, logits, hits and bytes."""
    shared = rows_of(model, task, choices)
    assert forwards == [*task.contexts]
    anew = rows_of(model, task, choices, 0, monkeypatch)
    assert [row["refused"] for row in anew if "refused" in row] == []
    assert len(forwards) == 2 + 2 * len(anew)
    assert len(anew) == (11 if choices == CHOICES else 3)
    assert measured(shared) == measured(anew)


@pytest.mark.nightly
def test_a_context_is_read_once_for_all_cells(model, task, forwards, monkeypatch):
    shared = rows_of(model, task, "quest,streaming_llm")
    assert forwards == [*task.contexts]
    anew = rows_of(model, task, "quest,streaming_llm", 0, monkeypatch)
    assert measured(shared) == measured(anew)


@pytest.mark.slow
def test_what_changes_a_prefill_is_read_anew(model, task, forwards):
    """Keys and values that are rounded when they come give later layers other ones."""
    rows_of(model, task, "quest,quest:host_format=fp8")
    assert forwards == [*task.contexts, *task.contexts]


@pytest.mark.nightly
def test_a_model_that_selects_for_its_prompts_reads_them_anew(task, forwards):
    model = load_model(DSA_CHECKPOINT).eval()
    rows_of(model, task, "deepseek_dsa")
    assert forwards == [*task.contexts] * 2


def test_what_is_kept_stays_below_the_limit(model, task, forwards):
    """One context fits and is read once, the other one for each cell; then another task comes."""
    config = config_of(Cell(task, None, 1.0, tuple(range(6))), grid_of(model))
    with torch.inference_mode(), attach(model, config, engine="transformers") as handle:
        whole = Prefills(1 << 30)
        whole.read(handle, task, 0, 300)[0].close()
        size = (1 << 30) - whole.left
        assert size > 0
        kept = Prefills(size)
        for _ in range(2):
            for index in (0, 1):
                kept.read(handle, task, index, 300)[0].close()
        assert (kept.forwards, kept.replayed, kept.left) == (3, 1, 0)
        other = replace(task, contexts=(task.contexts[1],))
        kept.read(handle, other, 0, 300)[0].close()
        assert kept.left > 0
        check_integrity(handle.coordinator)


def test_a_replay_that_is_interrupted_leaves_nothing(model, task, monkeypatch):
    config = config_of(Cell(task, None, 1.0, tuple(range(6))), grid_of(model))
    with torch.inference_mode(), attach(model, config, engine="transformers") as handle:
        kept, coordinator = Prefills(1 << 30), handle.coordinator
        kept.read(handle, task, 0, 300)[0].close()
        transfer = coordinator.layers[3].transfer

        def interrupted(*args):
            raise KeyboardInterrupt

        with monkeypatch.context() as broken:
            broken.setattr(transfer, "store_chunk", interrupted)
            with pytest.raises(KeyboardInterrupt):
                replay(handle, kept._read[0])
        assert coordinator.forward is None
        assert handle.stats().occupancy.used_slots == handle.stats().occupancy.used_pages == 0
        cache, _ = kept.read(handle, task, 0, 300)
        assert cache.get_seq_length() == len(task.contexts[0])
