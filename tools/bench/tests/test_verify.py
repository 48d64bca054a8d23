"""Steps that verify several tokens of a row: what they attend to, accept, miss, and refuse."""

from __future__ import annotations

import json
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from topkv.config import SparseConfig
from topkv.errors import CapabilityError
from topkv_bench import geometry, runs
from topkv_bench.contestants import Cell, enter
from topkv_bench.drift import SCALE, effective, rate_of, write
from topkv_bench.verify import Verifier, accepted, reached
from topkv_cli.group import topkv
from topkv_testing.integrity import check_integrity

SPARSE = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "unit": 16}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def model():
    return geometry.build(geometry.config_of("tiny", None, 1024), CPU, torch.float32)


def cell(name="topkv", queries=4, drift=None, pool=True, **settings):
    settings = SparseConfig(**{**SPARSE, **settings})
    return Cell(name, 512, 2, 64, pool, drift, settings, queries, (0.5,))


# How many drafts are accepted.


@given(steps=st.integers(0, 200), accept=st.floats(0, 1), queries=st.integers(1, 8))
def test_acceptance_is_the_share_that_is_stated(steps, accept, queries):
    counts = accepted(steps, accept, queries)
    assert len(counts) == steps
    assert all(0 <= count < queries for count in counts)
    for end in range(steps + 1):
        assert -1 < sum(counts[:end]) - end * accept * (queries - 1) <= 1e-6


def test_acceptances_of_a_half_and_three_quarters():
    assert accepted(4, 0.5, 4) == [1, 2, 1, 2]
    assert accepted(8, 0.75, 4) == [2, 2, 2, 3, 2, 2, 2, 3]
    assert accepted(3, 1.0, 4) == [3, 3, 3]
    assert accepted(3, 0.5, 1) == [0, 0, 0]
    assert reached(4, (0.5, 1.0), 4) == (4 + 6) + (4 + 12) + 4


# What a step attends to.


def chosen(model, cell, counts, prompt):
    """Tokens that the model chose in each step behind a prompt."""
    made = enter(model, cell)
    try:
        cache = made.cache(filled=False)
        with torch.no_grad():
            model(input_ids=prompt, past_key_values=cache, use_cache=True)
        found = []
        with made.verifying(cache):
            verifier = Verifier(made, cache, prompt[:, : cell.queries])
            for count in counts:
                verifier.run([count])
                found.append(verifier.ids)
        assert cache.get_seq_length() == prompt.shape[1] + len(counts) + sum(counts)
        if cell.contestant == "topkv":
            check_integrity(made.coordinator)
        return found
    finally:
        made.close()


@pytest.mark.filterwarnings("ignore:.past_key_values. is deprecated")
def test_every_token_sees_what_is_before_it_and_no_rejected_one(model):
    """With a budget for everything, topkv chooses what stock attention does over the same tokens,
    which are computed anew, all at once."""
    prompt = torch.randint(256, (2, 100), generator=torch.Generator().manual_seed(3))
    counts = [0, 3, 1, 2, 0, 3, 1, 1]
    ours = chosen(model, cell(budget=256), counts, prompt)
    stock = chosen(model, cell("dense"), counts, prompt)
    kept, ids = prompt, prompt[:, :4]
    for count, our, theirs in zip(counts, ours, stock, strict=True):
        with torch.no_grad():
            anew = model(input_ids=torch.cat([kept, ids], 1)).logits[:, -4:].argmax(-1)
        assert torch.equal(anew, theirs)
        assert torch.equal(anew, our)
        kept, ids = torch.cat([kept, ids[:, : count + 1]], 1), anew


# Drift.


class Watch:
    """Keeps the selections of a layer after every step."""

    def __init__(self, coordinator):
        self.lanes, self.ids = coordinator.layers[3].lanes, []

    def note(self):
        self.ids.append(self.lanes.selection.ids.tolist())


@pytest.mark.parametrize("accept", [0.0, 0.5, 1.0])
@pytest.mark.parametrize(("queries", "drift"), [(4, 0.125), (2, 0.25), (8, 0.125)])
def test_a_step_replaces_a_share_for_each_token_that_it_verifies(model, queries, drift, accept):
    """As many as steps of one token would between them, whatever is accepted."""
    made = enter(model, cell(queries=queries, drift=drift))
    try:
        cache, watch = made.cache(filled=True), Watch(made.coordinator)
        with made.verifying(cache):
            verifier = Verifier(made, cache, torch.zeros((2, queries), dtype=torch.long))
            for count in accepted(8, accept, queries):
                verifier.run([count])
                watch.note()
        check_integrity(made.coordinator)
    finally:
        made.close()
    moved = [
        len({*after} - {*before})
        for pair in pairwise(watch.ids)
        for before, after in zip(*pair, strict=True)
    ]
    assert abs(sum(moved) / len(moved) - queries * drift * 7) < 0.5


def test_steps_of_several_tokens_move_as_far_as_steps_of_one():
    """Their selections are those of every N-th step of one."""

    def ids(walked):
        found = torch.zeros((2, 5), dtype=torch.int32)
        ints = [torch.tensor([each], dtype=torch.int32) for each in (1, walked, 40)]
        write(found, *ints, 3, 40, rate_of(0.125))
        return found

    single = [ids(512 + step) for step in range(1, 13)]
    assert all(torch.equal(ids(512 + 4 * step), single[4 * step - 1]) for step in (1, 2, 3))


def test_the_share_of_a_step():
    assert effective(0.125, 5, 40, 4) == 0.5
    assert effective(0.25, 5, 7, 2) == 0.2
    assert effective(1 / SCALE, 5, 40, 3) == 3 / SCALE


# Rows.


def options(**given):
    values = {
        "model": "tiny",
        "config_path": None,
        "contestants": ("topkv",),
        "contexts": (512,),
        "requests": (2,),
        "fill": "pool",
        "drift": 0.125,
        "steps": 8,
        "warmup": 2,
        "profiled": 0,
        "kv_limit": None,
        "chunk": 256,
        "settings": SparseConfig(**SPARSE, buffer=256),
        "device": CPU,
        "dtype": torch.float32,
        "queries": (1, 4),
        "accepts": (0.0, 0.75),
    }
    return runs.Options(**{**values, **given})


def test_a_row_for_each_acceptance():
    """Misses follow from the tokens that are verified, and tokens a second from those kept."""
    one, none, most = runs.Bench(options()).run()
    places = [(row["queries"], row["accept"]) for row in (one, none, most)]
    assert places == [(1, None), (4, 0.0), (4, 0.75)]
    assert [row["tokens_per_step"] for row in (one, none, most)] == [1, 1, 3.25]
    for row in (one, none, most):
        assert row["status"] == "ok", row
        tokens = 2 * row["tokens_per_step"]
        assert row["tokens_per_second"] == 1e3 * tokens / row["step_ms"]["median"]
        assert row["settings"]["max_queries"] == row["queries"]
        assert row["drift"]["effective"] == 0.125 * row["queries"]
        # 2 requests of 2 sparse layers of 2 lanes of 7 units.
        assert abs(row["misses_per_step"] - 56 * row["drift"]["effective"]) < 4
        entry = 2 * 16 * 64 * 4
        assert row["link_bytes_per_step"] == row["misses_per_step"] * entry


@pytest.mark.nightly
def test_the_command_shows_what_was_verified(tmp_path):
    out = tmp_path / "out.json"
    few = ("--steps", "3", "--warmup", "1", "--device", "cpu", "--requests", "2,1")
    sets = [word for name, value in SPARSE.items() for word in ("--set", f"{name}={value}")]
    grid = ("--context", "512", "--contestants", "dense,offloaded,topkv-resident,topkv")
    verify = ("--queries", "1,3", "--accept", "0.5,1", "--kv-limit", "1GiB", "--profile")
    given = ["bench", "--model", "tiny", *few, *sets, *grid, *verify, "--json", str(out)]
    result = CliRunner().invoke(topkv, given, env={"COLUMNS": "200"})
    assert result.exit_code == 0, result.stderr
    shown = json.loads(out.read_text())
    assert shown["options"]["queries"] == [1, 3]
    assert shown["options"]["accepts"] == [0.5, 1.0]
    rows = [row for row in shown["rows"] if row["requests"] == 2]
    found = [(row["contestant"], row["queries"], row.get("accept")) for row in rows]
    assert found == [
        *(("dense", 1, None), ("dense", 3, 0.5), ("dense", 3, 1.0)),
        *(("offloaded", 1, None), ("offloaded", 3, None)),
        *(("topkv-resident", 1, None), ("topkv-resident", 3, 0.5), ("topkv-resident", 3, 1.0)),
        *(("topkv", 1, None), ("topkv", 3, 0.5), ("topkv", 3, 1.0)),
    ]
    for row in rows:
        if row["contestant"] != "offloaded":
            assert row["first_token_seconds"] > 0
            assert row["profile"]["host_ms"]["model"] > 0
    reasons = [row["reason"] for row in rows if row["contestant"] == "offloaded"]
    assert "needs a GPU" in reasons[0]
    assert "one token a step alone; give --queries 1" in reasons[1]
    best = [(row["contestant"], row.get("accept")) for row in shown["kv_limit"]["rows"]]
    assert best == [
        (name, accept)
        for name in ("dense", "topkv-resident", "topkv")
        for accept in (None, 0.5, 1.0)
    ]
    for text in ("queries", "accept", "tokens/step", "misses/step", "topkv 512 2 3 0.5: drift"):
        assert text in result.stdout


# What is refused.


def test_layers_that_forget_are_refused():
    """Both caches, and the model is left as it was."""
    config = geometry.config_of("gpt-oss-20b", None, 1024)
    config.num_hidden_layers, config.num_local_experts, config.hidden_size = 2, 4, 64
    config.layer_types, config.vocab_size = config.layer_types[:2], 256
    made = geometry.build(config, CPU, torch.float32)
    reason = r"cannot be measured:\n  - layers that slide over a window .*; give --queries 1"
    with pytest.raises(CapabilityError, match=reason):
        enter(made, cell("dense")).cache(filled=False)
    for name in ("topkv", "topkv-resident"):
        with pytest.raises(CapabilityError, match=reason):
            enter(made, cell(name, dense_layers=[]))
    assert "generate" not in made.__dict__


def test_what_cannot_be_verified_is_refused():
    def refused(*args, words):
        given = ["bench", "--model", "tiny", "--device", "cpu", "--context", "64", *args]
        result = CliRunner().invoke(topkv, given)
        assert result.exit_code == 2
        assert words in " ".join(result.stderr.split())

    refused("--queries", "9", words="at most 8")
    refused("--queries", "0", words="1 and more")
    refused("--queries", "4", "--accept", "1.5", words="between 0 and 1")
    refused("--accept", "0.5,0.5", words="each once")
    refused("--queries", "1,8", "--drift", "0.15", words="give a share of at most 0.125")
    sets = ("--set", "algorithm=quest", "--set", "backend=reference_none")
    refused("--queries", "4", *sets, words="reference_none")
