"""Selections of a trace, as they are written over others: what they keep, and what they refuse."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from topkv.config import SparseConfig
from topkv.errors import ConfigError
from topkv_bench import geometry, recorded, recorded_kernels
from topkv_bench.command import bench
from topkv_bench.contestants import Cell, enter
from topkv_bench.recorded import Recorded
from topkv_bench.verify import Verifier

WRITERS = {"reference": recorded.write, "triton": recorded_kernels.write}


def ints(*values):
    return torch.tensor(values, dtype=torch.int32)


def table_of(generator, steps, heads, width, units):
    """Make distinct units of each step and lane, -1 in some columns."""
    order = torch.rand(steps, heads, units, generator=generator).argsort(-1)[..., :width]
    gone = torch.rand(steps, heads, width, generator=generator) < 0.1
    return order.masked_fill(gone, -1).to(torch.int32)


sizes = {
    "seed": st.integers(0, 999),
    "steps": st.integers(2, 9),
    "heads": st.integers(1, 3),
    "width": st.integers(1, 40),
    "spare": st.integers(0, 50),
    "copies": st.integers(1, 4),
    "more": st.integers(0, 3),
}


@given(**sizes, beyond=st.integers(0, 60), length=st.integers(1, 2**20), slot=st.integers(0, 70))
def test_a_step_replaces_what_it_replaces_in_the_trace(
    seed, steps, heads, width, spare, copies, more, beyond, length, slot
):
    units, stretch = width + spare, copies + more
    table = table_of(torch.Generator().manual_seed(seed), steps, heads, width, units)
    select = copies * width + beyond % width
    found = Recorded.of(table[:, None], units)
    assert found.copies(select, stretch * units) == (copies, stretch)
    written = []
    for at in range(length, length + 2 * steps):
        ids = torch.zeros(heads, select, dtype=torch.int32)
        room = ints(stretch * units)
        recorded.write(ids, ints(slot), ints(at), room, table, stretch * units, copies, stretch)
        sets = [{unit for unit in lane if unit >= 0} for lane in ids.tolist()]
        assert [len(each) for each in sets] == (ids >= 0).sum(1).tolist()
        assert all(unit < stretch * units for each in sets for unit in each)
        assert all({unit // stretch for unit in each} <= {*range(units)} for each in sets)
        written.append(sets)
    of_trace = [[{unit for unit in lane if unit >= 0} for lane in step] for step in table.tolist()]
    changes = {
        tuple(copies * len(new - old) for old, new in zip(before, after, strict=True))
        for turned in (of_trace, of_trace[::-1])
        for before, after in pairwise(turned)
    }
    for before, after in pairwise(written):
        assert tuple(len(new - old) for old, new in zip(before, after, strict=True)) in changes


def test_what_is_replaced_is_counted():
    ids = ints([[0, 1, 2], [3, 4, -1]], [[0, 1, 3], [3, 5, 6]], [[0, 1, 3], [3, 5, 6]])
    assert Recorded.of(ids[:, None], 8).replaced == 3 / 12


@pytest.mark.parametrize("writer", WRITERS)
def test_rows_that_are_padded_or_too_short_stay(writer):
    table = table_of(torch.Generator().manual_seed(0), 3, 2, 4, 10)
    held = torch.full((8, 11), -5, dtype=torch.int32)
    ids = held[:, :9]
    slots, lengths, limit = ints(3, -1, 0, 2), ints(641, 0, 321, 642), ints(20, 0, 19, 21)
    WRITERS[writer](ids, slots, lengths, limit, table, 20, 2, 2)
    assert (ids[2:6] == -5).all()
    assert (ids[[0, 1, 6, 7]] >= -1).all()
    assert (ids[[0, 1, 6, 7], 8] == -1).all()
    assert (held[:, 9:] == -5).all()


@given(
    **sizes,
    lengths=st.lists(st.integers(0, 2**20), min_size=1, max_size=3),
    beyond=st.integers(0, 300),
)
def test_the_kernel_writes_the_same(
    seed, steps, heads, width, spare, copies, more, lengths, beyond
):
    units, stretch, rows = width + spare, copies + more, len(lengths)
    table = table_of(torch.Generator().manual_seed(seed), steps, heads, width, units)
    ids = torch.zeros(rows * heads, copies * width + beyond, dtype=torch.int32)
    slots, limit = ints(*range(rows - 1, -1, -1)), ints(*(stretch * units for _ in lengths))
    both = [ids.clone(), ids.clone()]
    for each, over in zip(both, WRITERS.values(), strict=True):
        over(each, slots, ints(*lengths), limit, table, stretch * units, copies, stretch)
    assert torch.equal(*both)


def test_a_trace_that_selects_more_is_refused():
    found = Recorded.of(torch.zeros(2, 1, 1, 8, dtype=torch.int32), 64)
    with pytest.raises(ConfigError, match="selects 8 units, and a selection here has 7"):
        found.copies(7, 640)
    with pytest.raises(ConfigError, match="selects 8 of 64 units, and here 32 of 250 are"):
        found.copies(32, 250)


def test_a_trace_stands_for_a_drift(tmp_path):
    record = pytest.importorskip("topkv_simulate.record", reason="needs topkv-simulate")
    pytest.importorskip("topkv_evaluation", reason="needs topkv-evaluation")
    sizes = {"budget": 96, "buffer": 192, "dense_layers": [], "capture": "off"}
    config = SparseConfig(**record.DEFAULTS, **sizes)
    trace = record.run(record.Job(config, tokens=1280, steps=6))
    path = tmp_path / "trace.npz"
    trace.save(path)
    found = recorded.load(str(path))
    assert 0 < found.replaced < 1
    out = tmp_path / "bench.json"
    options = ["--model", "tiny", "--contestants", "topkv", "--context", "5120", "--requests", "2"]
    options += ["--fill", "pool", "--steps", "4", "--warmup", "1", "--drift", str(path)]
    options += ["--set", "budget=192", "--set", "buffer=384", "--set", "algorithm=quest"]
    options += ["--set", "backend=triton_attention", "--json", str(out)]
    done = CliRunner().invoke(bench, options)
    assert done.exit_code == 0, done.output
    (row,) = json.loads(out.read_text())["rows"]
    assert row["drift"]["stated"] == str(path)
    assert row["drift"]["effective"] == pytest.approx(found.replaced)
    assert 0 < row["hit_rate"] < 1
    two = CliRunner().invoke(bench, [*options, "--queries", "2"])
    assert isinstance(two.exception, ConfigError)
    advice = "1 tokens, and here they verify 2; record it with topkv record --queries 2"
    assert advice in str(two.exception)
    missing = CliRunner().invoke(bench, ["--model", "tiny", "--drift", "gone.npz"])
    assert missing.exit_code == 2
    assert "there is no file" in missing.output


@pytest.mark.slow
def test_joint_selections_of_a_trace_are_made_in_their_order(tmp_path):
    """A step of the bench makes the next step of the trace, whatever is accepted."""
    record = pytest.importorskip("topkv_simulate.record", reason="needs topkv-simulate")
    pytest.importorskip("topkv_evaluation", reason="needs topkv-evaluation")
    sizes = {"budget": 96, "buffer": 192, "dense_layers": [], "capture": "off", "max_queries": 4}
    config = SparseConfig(**record.DEFAULTS, **sizes)
    path = tmp_path / "trace.npz"
    record.run(record.Job(config, tokens=1280, steps=24, queries=4)).save(path)
    found = recorded.load(str(path))
    assert (found.tokens, len(found.ids)) == (4, 6)
    sparse = {"algorithm": "quest", "backend": "triton_attention", "budget": 96, "buffer": 192}
    given = Cell("topkv", 1300, 1, 64, True, str(path), SparseConfig(**sparse), 4, (0.5,))
    model = geometry.build(
        geometry.config_of("tiny", None, 1400), torch.device("cpu"), torch.float
    )
    made = enter(model, given)
    try:
        cache, chosen = made.cache(filled=True), []
        with made.verifying(cache):
            verifier = Verifier(made, cache, torch.zeros((1, 4), dtype=torch.long))
            for accepted in (0, 3, 1, 2, 0, 3, 1, 2, 3, 0):
                verifier.run([accepted])
                chosen.append(made.coordinator.layers[3].lanes.selection.ids.tolist())
    finally:
        made.close()
    depth = found.ids.shape[1] // 2  # of two sparse layers the second
    start = 1300 % 10
    places = [min(place, 10 - place) for place in ((start + n) % 10 for n in range(1, 11))]
    wanted = [found.ids[place, depth][[0, found.ids.shape[2] // 2]].tolist() for place in places]
    assert chosen == wanted
