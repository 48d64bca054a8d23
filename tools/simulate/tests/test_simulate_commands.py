"""``topkv record`` and ``topkv simulate`` on the shipped model, as a user calls them."""

from __future__ import annotations

import builtins
import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from attrs import evolve
from click.testing import CliRunner

from topkv import attach
from topkv_cli.group import topkv
from topkv_simulate.curve import Curve
from topkv_simulate.record import record_text
from topkv_simulate.recorder import recording
from topkv_simulate.replay import Replayer
from topkv_simulate.trace import KIND, ROW, Trace

pytest.importorskip("topkv_evaluation")
pytest.importorskip("topkv_quest")
pytest.importorskip("topkv_triton_attention")

from topkv_evaluation import CHECKPOINT
from topkv_evaluation.loading import load_model
from topkv_evaluation.retrieval import make_prompt

TOKENS, STEPS, LAYERS, HEADS = 1280, 24, 4, 2
SETTINGS = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "buffer": 160}
ENTRY = 2 * 16 * 64 * 2
"""Bytes of 16 tokens of a kv-head: keys and values of 64 elements in bfloat16."""


def call(*args):
    return CliRunner().invoke(topkv, [str(arg) for arg in args])


def result_of(*args):
    done = call("simulate", *args, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


def refused(done, *words):
    assert done.exit_code == 2, done.output
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    for word in words:
        assert word in done.stderr


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    """Record a trace by the command."""
    path = tmp_path_factory.mktemp("traces") / "shipped.npz"
    sizes = ("--tokens", TOKENS, "--steps", STEPS, "--budget", 128, "--buffer", 160)
    done = call("record", path, *sizes, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert done.stdout == ""
    assert f"{STEPS} decode steps" in done.stderr
    return path


def tokens_of():
    return torch.from_numpy(make_prompt(TOKENS, seed=0).tokens.astype("int64"))[None]


def test_the_shipped_model_replays_to_the_last_miss(recorded):
    """Two rows and their forks, layer by layer, against what the coordinator counted."""
    model = load_model(CHECKPOINT).eval()
    config = {**SETTINGS, "max_requests": 4, "max_tokens": 4 * TOKENS}
    tokens = tokens_of()[:, :600]
    with attach(model, config, engine="transformers") as handle, torch.inference_mode():
        coordinator = handle.coordinator
        with recording(coordinator) as recorder:
            cache = handle.new_cache()
            model(torch.cat([tokens, tokens.flip(1)]), past_key_values=cache, logits_to_keep=1)
            for token in tokens[:, :6].split(1, dim=1):
                model(token.expand(2, 1), past_key_values=cache)
            twin = cache.fork()
            for token in tokens[:, 6:12].split(1, dim=1):
                model(token.expand(2, 1), past_key_values=twin)
            slots = [*cache.slots, *twin.slots]
            (store,) = [s for s in coordinator.manager.stores if s.group.residency == "sparse"]
            counters = store.counters.unflatten(1, (-1, HEADS)).clone().numpy()
            reported = coordinator.transfers_of(slots)
    trace = recorder.trace()
    (counts,) = Replayer(trace).run([10], "lru")
    assert (int(counts.hits.sum()), int(counts.misses.sum())) == (reported.hits, reported.misses)
    assert reported.loaded_bytes == reported.misses * trace.groups[0].geometry.host_entry_bytes
    for slot in slots:
        rows = trace.rows[:, ROW.slot] == slot
        mine = np.stack([counts.hits[rows].sum(0), counts.misses[rows].sum(0)], -1)
        assert np.array_equal(mine, counters[:, slot]), slot
    assert reported.misses > 100
    Replayer(Trace.load(recorded)).check()


def test_a_model_that_is_fetched_goes_by_its_name(tmp_path, monkeypatch):
    from topkv_evaluation import smollm2

    monkeypatch.setattr(smollm2, "folder", lambda: CHECKPOINT)
    (tmp_path / "text").write_text(make_prompt(TOKENS).text, encoding="utf-8")
    path = tmp_path / "named.npz"
    sizes = ("--text", tmp_path / "text", "--tokens", 96, "--steps", 3, "--budget", 32)
    done = call("record", path, "--model", smollm2.NAME, *sizes, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert (Trace.load(path).rows[:, ROW.warm] == 0).sum() == 3


def test_other_buffers_are_those_of_a_model_that_has_them(recorded):
    """Selections do not depend on the buffer, so a model with another one counts the same."""
    model = load_model(CHECKPOINT).eval()
    config = {**SETTINGS, "buffer": 320, "max_requests": 1, "max_tokens": TOKENS}
    with attach(model, config, engine="transformers") as handle:
        other = record_text(handle, tokens_of(), STEPS)
    one = Trace.load(recorded)
    assert np.array_equal(one.groups[0].ids, other.groups[0].ids)
    (counts,) = Replayer(one).run([20], "lru")
    assert np.array_equal(counts.hits, other.groups[0].counts[..., 0])
    assert np.array_equal(counts.misses, other.groups[0].counts[..., 1])
    assert counts.misses.sum() < one.groups[0].counts[..., 1].sum()


def test_json_has_counts_bytes_and_a_recommendation(recorded):
    shown = result_of(recorded, "--link", 50, "--requests", 16)
    trace = Trace.load(recorded)
    counts = trace.groups[0].counts
    hits, misses = counts.sum((0, 1, 2)).tolist()
    counted = {"steps": STEPS, "hits": hits, "misses": misses, "tokens_per_step": 1}
    assert shown["recorded"] == counted
    assert shown["groups"][0]["entry_bytes"] == ENTRY
    points = {(each["buffer_tokens"], each["policy"]): each for each in shown["points"]}
    own = points[160, "lru"]
    steps = trace.rows[:, ROW.warm] == 0
    assert [own["hits"], own["misses"]] == counts[steps].sum((0, 1, 2)).tolist()
    assert own["misses_per_step"] == own["misses"] / STEPS
    assert own["bytes_per_step"] == own["misses"] * ENTRY / STEPS
    per_step = counts[steps][..., 1].sum((1, 2)) * ENTRY
    assert own["bytes_per_token"] == own["bytes_per_step"]
    assert own["p95_bytes_per_step"] == sorted(per_step.tolist())[22]
    assert own["load_ms"] == pytest.approx(1e3 * 16 * own["bytes_per_step"] / 50e9)
    assert own["device_bytes_per_request"] == LAYERS * HEADS * (10 + 2) * ENTRY
    assert list(own["layer_hit_rates"]) == ["2", "3", "4", "5"]
    by_layer = counts[steps].sum((0, 2))
    rates = (by_layer[:, 0] / by_layer.sum(1)).tolist()
    assert list(own["layer_hit_rates"].values()) == rates
    for (buffer, policy), each in points.items():
        assert each["hits"] + each["misses"] == own["hits"] + own["misses"]
        assert each["misses"] >= points[buffer, "belady"]["misses"], policy
    sizes = sorted({buffer for buffer, _ in points})
    assert sizes[0] == 112  # what the budget leaves without the tail
    assert sizes[-1] >= TOKENS
    assert points[sizes[-1], "lru"]["misses"] == 0


def test_steps_of_several_tokens_are_recorded_with_their_joint_selections(recorded, tmp_path):
    """The last step has what is left; misses are those of a model that decodes so."""
    path = tmp_path / "joint.npz"
    sizes = ("--tokens", TOKENS, "--steps", STEPS - 2, "--budget", 128, "--buffer", 160)
    done = call("record", path, *sizes, "--queries", 4, "--device", "cpu")
    assert done.exit_code == 0, done.output
    assert "6 decode steps" in done.stderr
    trace = Trace.load(path)
    steps = trace.rows[trace.rows[:, ROW.warm] == 0]
    assert steps[:, ROW.appended].tolist() == [4, 4, 4, 4, 4, 2]
    assert steps[:, ROW.length].tolist() == [*range(TOKENS - 18, TOKENS - 1, 4), TOKENS]
    assert trace.groups[0].ids.shape[-1] == Trace.load(recorded).groups[0].ids.shape[-1]
    shown = result_of(path, "--buffers", 160, "--policies", "lru")
    (point,) = shown["points"]
    assert shown["recorded"]["tokens_per_step"] == 22 / 6
    assert point["hits"] + point["misses"] == 6 * LAYERS * HEADS * 7
    assert point["bytes_per_token"] == point["misses"] * ENTRY / 22
    assert point["bytes_per_step"] == point["misses"] * ENTRY / 6
    shown = call("simulate", path).stdout
    assert "MB a token" in shown
    assert "a mean step has 3.67 tokens" in shown
    assert "MB a token" not in call("simulate", recorded).stdout


@pytest.mark.parametrize("gain", [0.5, 2.0, 10.0])
def test_the_recommended_buffer_follows_the_rule(recorded, gain):
    sizes = (112, 128, 160, 224, 256, 320, 448, 512, 640, 896, 1024, 1280, 1792)
    sizes += (2560,)
    listed = ",".join(map(str, sizes))
    shown = result_of(recorded, "--buffers", listed, "--gain", gain, "--policies", "lru")
    misses = {each["buffer_tokens"]: each["misses"] for each in shown["points"]}
    units = shown["points"][0]["hits"] + shown["points"][0]["misses"]
    pays = {
        size: misses[size] - misses[2 * size] >= gain / 100 * size / 112 * units
        for size in sizes
        if 2 * size in misses
    }
    best = shown["recommended_buffer_tokens"]
    assert not pays[best]
    assert all(pays[size] for size in pays if size < best)


def test_sticky_selections_are_said_to_depend_on_the_buffer(recorded, tmp_path):
    said = "in another buffer others would be selected"
    assert said not in call("simulate", recorded).stdout
    trace = Trace.load(recorded)
    (group,) = trace.groups
    sticky = evolve(group.geometry, params={**group.geometry.params, "sticky": 0.5})
    evolve(trace, groups=(evolve(group, geometry=sticky),)).save(tmp_path / "sticky.npz")
    assert said in call("simulate", tmp_path / "sticky.npz").stdout


def test_no_buffer_may_be_good_enough(recorded):
    shown = result_of(recorded, "--buffers", 112, "--gain", 0.001)
    assert shown["recommended_buffer_tokens"] is None
    done = call("simulate", recorded, "--buffers", 112, "--gain", 0.001)
    assert "no buffer is recommended" in done.stdout


def test_the_table_says_what_it_is(recorded, tmp_path):
    for name in ("curve.png", "curve.svg"):
        done = call("simulate", recorded, "--link", 25, "--plot", tmp_path / name)
        assert done.exit_code == 0, done.output
        assert (tmp_path / name).stat().st_size > 5000
    lines = done.stdout.splitlines()
    assert lines[0].split()[:2] == ["buffer", "of"]
    rows = [line.split() for line in lines if line.strip().startswith("160 ")]
    assert [row[:3] for row in rows] == [["160", "1.43", "lru"], ["160", "1.43", "belady"]]
    assert "are replayed exactly" in done.stdout
    assert "recommended: buffer" in done.stdout
    assert "25 GB/s" in done.stdout


def test_what_cannot_be_done_is_refused(recorded, tmp_path):
    refused(call("simulate", tmp_path / "absent.npz"), "No such file")
    damaged = tmp_path / "damaged.npz"
    damaged.write_bytes(recorded.read_bytes()[:-5])
    refused(call("simulate", damaged), "cannot be replayed", "zip archive")
    refused(call("simulate", recorded, "--buffers", 64), "does not hold a selection of 7")
    refused(call("simulate", recorded, "--buffers", "64,big"), "expected numbers of 1 and more")
    refused(call("simulate", recorded, "--policies", "clock"), "unknown eviction 'clock'")
    refused(call("simulate", recorded, "--plot", tmp_path / "a.doc"), "ends in one of")
    refused(call("simulate", recorded, "--link", "nan"), "'nan' is not finite")
    refused(call("simulate", recorded, "--link", "inf"), "'inf' is not finite")
    refused(call("simulate", recorded, "--gain", "nan"), "'nan' is not finite")
    refused(call("simulate", "/dev/zero"), "cannot be replayed", "it is no regular file")
    trace = Trace.load(recorded)
    counts = trace.groups[0].counts[3, 1, 0]
    counts[:] = np.where(counts > 0, counts - 1, 1)  # others, and possible ones
    trace.save(damaged)
    refused(call("simulate", damaged), "does not replay as it was recorded", "layer 3: ")


def test_a_trace_of_no_steps_is_refused(recorded, tmp_path):
    model = load_model(CHECKPOINT).eval()
    config = {**SETTINGS, "max_requests": 1, "max_tokens": TOKENS}
    path = tmp_path / "prompt.npz"
    with attach(model, config, engine="transformers") as handle, torch.inference_mode():
        with recording(handle.coordinator) as recorder:
            model(tokens_of()[:, :64], past_key_values=handle.new_cache())
        recorder.trace().save(path)
    refused(call("simulate", path), "0 decode steps")


def test_a_model_and_a_text_of_ones_own(tmp_path):
    text, config = tmp_path / "text", tmp_path / "config.json"
    text.write_text("def f(x):\n    return x\n" * 30)
    config.write_text(json.dumps({"algorithm": "quest", "unit": 8, "budget": 64}))
    path = tmp_path / "trace"
    done = call(
        *("record", path, "--model", CHECKPOINT, "--text", text, "--tokens", 500, "--steps", 5),
        *("--config", config, "--buffer", 96, "--device", "cpu"),
    )
    assert done.exit_code == 0, done.output
    trace = Trace.load(path)
    geometry = trace.groups[0].geometry
    assert (geometry.unit, geometry.select, geometry.buffer_slots) == (8, 7, 12)
    steps = trace.rows[trace.rows[:, ROW.warm] == 0]
    assert steps[:, ROW.length].tolist() == [496, 497, 498, 499, 500]
    assert (trace.events[:, 0] == KIND.PLAN).sum() == 6
    Replayer(trace).check()
    assert Curve(Replayer(trace)).least == 56


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--tokens", 1300, "--steps", 1299), ("too short", "expected at least 1301 tokens")),
        (("--tokens", 300), ("no text can be made", "at least 916")),
        (("--model", CHECKPOINT), ("pass --text",)),
        (("--text", "absent"), ("No such file",)),
        (("--config", "absent"), ("absent",)),
        (("--budget", 0), ("budget",)),
        (("--algorithm", "nonsense"), ("nonsense",)),
    ],
)
def test_recordings_that_cannot_be_made_are_refused(tmp_path, options, words):
    path = tmp_path / "trace.npz"
    done = call("record", path, *options, "--device", "cpu")
    refused(done, *words)
    assert not path.exists()


def test_without_the_evaluation_the_command_says_what_to_install(tmp_path, monkeypatch):
    real = builtins.__import__

    def lacking(name, *args, **kwargs):
        if name.partition(".")[0] == "topkv_evaluation":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("topkv_evaluation")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", lacking)
    done = call("record", tmp_path / "trace.npz")
    refused(done, "pip install topkv-evaluation", "topkv_simulate.recorder.recording")


def test_the_module_of_the_commands_imports_nothing_heavy():
    code = "import sys, topkv_simulate.commands"
    heavy = "; print(sorted({'torch', 'numpy', 'matplotlib'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code + heavy], capture_output=True, text=True)
    assert done.stdout == "[]\n", done.stderr
