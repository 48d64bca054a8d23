"""``topkv bench`` on a tiny model: what is measured, by whom, and what is refused."""

from __future__ import annotations

import json
import math
import subprocess
import sys
from itertools import pairwise

import pytest
import torch
from click.testing import CliRunner
from transformers.generation.streamers import BaseStreamer

from topkv.config import SparseConfig
from topkv.errors import HostMemoryError
from topkv.prompts.history import StoredHistory
from topkv_bench import command, contestants, geometry, runs
from topkv_bench.contestants import NAMES, Cell, Topkv, expected
from topkv_bench.document import SCHEMA
from topkv_bench.drift import DriftingSelector, effective
from topkv_bench.phases import MODEL, PHASES, Span, device_times, kernel_phases
from topkv_cli.group import topkv
from topkv_testing.integrity import check_integrity

SPARSE = {"algorithm": "quest", "backend": "triton_attention", "budget": 128, "unit": 16}
SETS = [word for name, value in SPARSE.items() for word in ("--set", f"{name}={value}")]
CPU = torch.device("cpu")


def call(*args):
    return CliRunner().invoke(topkv, ["bench", *map(str, args)])


def tiny(*args):
    few = ("--steps", 3, "--warmup", 1, "--device", "cpu")
    return call("--model", "tiny", *few, *SETS, *args)


def refused(result, *words):
    """Check exit status 2, one error on stderr, nothing on stdout."""
    assert result.exit_code == 2, result.output
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
    text = " ".join(result.stderr.split())
    for word in words:
        assert word in text, text


def options(**given):
    values = {
        "model": "tiny",
        "config_path": None,
        "contestants": ("topkv",),
        "contexts": (512,),
        "requests": (2,),
        "fill": "pool",
        "drift": 0.25,
        "steps": 8,
        "warmup": 2,
        "profiled": 0,
        "kv_limit": None,
        "chunk": 256,
        "settings": SparseConfig(**SPARSE),
        "device": CPU,
        "dtype": torch.float32,
    }
    return runs.Options(**{**values, **given})


@pytest.fixture(scope="module")
def model():
    return geometry.build(geometry.config_of("tiny", None, 1024), CPU, torch.float32)


# Output of the command.


@pytest.mark.slow
def test_the_file_has_what_a_run_depends_on(tmp_path):
    out = tmp_path / "out.json"
    grid = ("--context", 512, "--requests", "2,1", "--prefill-chunk", 128)
    result = tiny(*grid, "--compile", "--profile", "--kv-limit", "4MiB", "--json", out)
    assert result.exit_code == 0, result.stderr
    shown = json.loads(out.read_text())
    assert shown["schema"] == SCHEMA
    assert set(shown) == {
        *("schema", "versions", "device", "command", "commit", "model", "options", "rows"),
        "kv_limit",
    }
    assert shown["versions"]["torch"] == torch.__version__
    assert shown["device"]["type"] == "cpu"
    assert shown["model"]["class"] == "LlamaForCausalLM"
    assert shown["model"]["weights_bytes"] == 4 * shown["model"]["parameters"]
    assert shown["options"]["settings"] == SPARSE
    rows = shown["rows"]
    order = [(row["context"], row["requests"], row["contestant"]) for row in rows]
    assert order == [(512, requests, name) for requests in (2, 1) for name in NAMES]
    refused = {command.COMPILED: "no CUDA graphs", "offloaded": "needs a GPU"}
    for row in rows:
        if row["contestant"] in refused:
            assert row["status"] == "refused"
            assert refused[row["contestant"]] in row["reason"]
            continue
        if row["status"] == runs.OVER:
            continue
        assert row["status"] == "ok"
        step = row["step_ms"]
        assert 0 < step["p10"] <= step["median"] <= step["p90"]
        assert row["tokens_per_second"] == 1e3 * row["requests"] / step["median"]
        assert row["first_token_seconds"] > 0
        assert row["bytes"]["device"] <= 4 * 2**20
        profile = row["profile"]
        assert set(profile) == {"wall_ms", "host_ms"}
        assert math.isclose(sum(profile["host_ms"].values()), profile["wall_ms"])
        assert set(profile["host_ms"]) == {*PHASES, MODEL}
    (sparse,) = (row for row in rows if (row["contestant"], row["requests"]) == ("topkv", 1))
    assert all(sparse["profile"]["host_ms"][phase] > 0 for phase in PHASES)
    assert sparse["drift"] == {"stated": 0.15, "effective": effective(0.15, 7, 31), "layers": 2}
    assert sparse["settings"]["budget"] == 128
    assert sparse["link_bytes_per_step"] > 0
    assert (512, 2, "dense", "over the limit") in {
        (row["context"], row["requests"], row["contestant"], row["status"]) for row in rows
    }
    best = {(row["contestant"], row["context"]): row for row in shown["kv_limit"]["rows"]}
    assert best["dense", 512]["requests"] == 1
    assert best["topkv", 512]["requests"] == 2
    for text in ("tokens/s", "within 0.00390625 GiB", "host time of a step", "refused", "topkv"):
        assert text in result.stdout


def test_a_picture_is_drawn(tmp_path):
    pytest.importorskip("matplotlib")
    picture = tmp_path / "out.png"
    grid = ("--context", 128, "--contestants", "topkv-resident", "--fill", "pool")
    result = tiny(*grid, "--plot", picture, "--kv-limit", "1GiB")
    assert result.exit_code == 0, result.stderr
    assert picture.read_bytes().startswith(b"\x89PNG")


# Measurements.


@pytest.mark.sampled(2)
@pytest.mark.parametrize("fill", ["pool", "prompt"])
@pytest.mark.parametrize(("drift", "hits"), [(0.25, 0.75), (0.0, 1.0)])
def test_hits_follow_from_the_drift(fill, drift, hits):
    """The buffer holds two selections, and a unit comes back only when it has left."""
    settings = SparseConfig(**SPARSE, scope="shared", buffer=256)
    (row,) = runs.Bench(options(fill=fill, drift=drift, steps=8, settings=settings)).run()
    assert row["status"] == "ok", row
    # 8 steps of a quarter of 7 columns, each of 4 or 5 units: whole columns move.
    assert abs(row["hit_rate"] - hits) <= (0.08 if drift else 0)
    entry = 2 * 2 * 16 * 64 * 4
    lanes, layers, selected = 2, 2, 7
    loaded = (1 - row["hit_rate"]) * lanes * layers * selected * entry
    assert math.isclose(row["link_bytes_per_step"], loaded, abs_tol=1e-6)
    assert (row["first_token_seconds"] is None) == (fill == "pool")


class Watch(BaseStreamer):
    """Keeps the selections of a layer and the attended tokens after every step."""

    def __init__(self, coordinator, layer):
        self.coordinator, self.lanes = coordinator, coordinator.layers[layer].lanes
        self.ids, self.attended, self.lengths = [], [], []

    def put(self, value):
        if self.lanes.step.batch:
            self.ids.append(self.lanes.selection.ids.tolist())
            self.attended.append(self.lanes.tables.lengths.tolist())
            self.lengths.append(self.lanes.step.lengths.tolist())

    def end(self):
        pass


def test_a_model_attends_to_the_drifting_selection_and_its_tail(model):
    cell = Cell("topkv", 512, 2, 12, True, 0.5, SparseConfig(**SPARSE))
    with_drift = Topkv(model, cell)
    try:
        coordinator = with_drift.coordinator
        selectors = [path.selector for path in coordinator.layers]
        watch = Watch(coordinator, 3)
        cache = with_drift.cache(filled=True)
        ids = torch.randint(256, (2, cell.columns))
        model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            past_key_values=cache,
            streamer=watch,
            do_sample=False,
            max_new_tokens=12,
        )
        check_integrity(coordinator)
    finally:
        with_drift.close()
    assert [isinstance(each, DriftingSelector) for each in selectors] == [False] * 2 + [True] * 2
    assert not any(isinstance(path.selector, DriftingSelector) for path in coordinator.layers)
    steps = list(zip(watch.ids, watch.attended, watch.lengths, strict=True))[-11:]
    moved = []
    for (before, _, _), (after, attended, lengths) in pairwise(steps):
        for lane, units in enumerate(after):
            tail = (lengths[lane // 2] - 1) % 16 + 1
            assert attended[lane] == 7 * 16 + tail
            assert len({*units}) == 7
            assert min(units) >= 0
            assert max(units) < 31
            moved.append(len({*units} - {*before[lane]}))
    assert max(moved) <= 5
    assert abs(sum(moved) / len(moved) - 3.5) < 0.5


def test_no_drift_leaves_the_selection_of_the_algorithm(model):
    cell = Cell("topkv", 256, 1, 4, True, None, SparseConfig(**SPARSE))
    own = Topkv(model, cell)
    try:
        assert not any(isinstance(p.selector, DriftingSelector) for p in own.coordinator.layers)
        assert "drift" not in own.facts()
        assert own.facts()["capture"].startswith("off: the model is on cpu")
    finally:
        own.close()


@pytest.mark.parametrize("name", ["dense", "topkv-resident", "topkv"])
def test_expected_bytes_are_held_bytes(model, name):
    cell = Cell(name, 256, 2, 4, True, 0.15, SparseConfig(**SPARSE))
    wanted = expected(model, cell, model.device).device
    made = contestants.enter(model, cell)
    try:
        cache = made.cache(filled=True)
        held = made.held(cache)
        if name == "dense":
            row = 4 * 2 * 2 * 64 * 4  # layers, keys and values, kv-heads, dim, bytes
            assert held == {"cache": 2 * 256 * row, "device": 2 * 256 * row, "host": 0}
            assert wanted == 2 * cell.tokens * row
        else:
            assert held["device"] == wanted
    finally:
        made.close()


def test_a_filled_pool_is_what_a_prompt_of_random_keys_leaves(model):
    """Stored whole and represented: history reads back finite, lengths and settling are right."""
    cell = Cell("topkv", 300, 1, 4, True, None, SparseConfig(**SPARSE))
    made = Topkv(model, cell)
    try:
        cache = made.cache(filled=True)
        coordinator = made.coordinator
        (slot,) = cache.slots
        assert coordinator.length(slot) == 300
        check_integrity(coordinator)
        path = coordinator.layers[3]
        blocks = StoredHistory(path, slot, 0, 300, 64, torch.float32, model.device)
        keys = torch.cat([k for _, k, _ in blocks])
        values = torch.cat([v for _, _, v in blocks])
        assert keys.shape == values.shape == (300, 2, 64)
        assert 0.95 < keys.std() < 1.05
        assert 0.95 < values.std() < 1.05
        assert not torch.equal(keys, values)
    finally:
        made.close()


# Cells that do not fit, or are refused.


def test_a_cell_without_memory_is_a_row(monkeypatch):
    given = SparseConfig(**SPARSE, device_memory=2**20)
    rows = list(runs.Bench(options(settings=given, contestants=("topkv", "dense"))).run())
    assert [row["status"] for row in rows] == ["out of memory", "ok"]
    assert "device_memory allows 1048576" in rows[0]["reason"]

    def full(*args):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.\nmore")

    monkeypatch.setattr(runs, "enter", full)
    (row,) = runs.Bench(options(contestants=("dense",))).run()
    assert row["reason"] == "CUDA out of memory. Tried to allocate 2 GiB."
    assert row["status"] == "out of memory"

    def broken(*args):
        raise RuntimeError("a bug")

    monkeypatch.setattr(runs, "enter", broken)
    with pytest.raises(RuntimeError, match="a bug"):
        list(runs.Bench(options(contestants=("dense",))).run())


@pytest.mark.slow
def test_a_cell_leaves_the_model_as_it_was(monkeypatch):
    bench = runs.Bench(options(profiled=1, requests=(1,), contexts=(256, 512)))
    before = bench.model.__dict__.get("generate")

    def full(self, cache):
        raise HostMemoryError("no page is left")

    with monkeypatch.context() as patch:
        patch.setattr(Topkv, "held", full)
        (first, _) = bench.run()
    assert (first["status"], first["reason"]) == ("out of memory", "no page is left")
    assert bench.model.__dict__.get("generate") is before
    assert [row["status"] for row in bench.run()] == ["ok", "ok"]


def test_what_cannot_be_run_is_refused(tmp_path):
    refused(call("--context", "128"), "--model", "--config")
    refused(call("--model", "tiny", "--config", tmp_path), "one of the two")
    refused(call("--model", "gpt-5"), "gpt-5")
    refused(tiny("--context", "0"), "1,4,16")
    refused(tiny("--requests", "1,1"), "each once")
    refused(tiny("--drift", "1.5"), "between 0 and 1")
    refused(tiny("--drift", "much"), "or none")
    refused(tiny("--contestants", "dense,vllm"), "topkv-resident")
    refused(tiny("--set", "budget"), "KEY=VALUE")
    refused(tiny("--set", "budgte=3", "--context", 128), "budgte")
    refused(tiny("--set", "max_tokens=3", "--context", 128), "max_tokens follows")
    refused(tiny("--kv-limit", "much", "--context", 128), "--kv-limit")
    refused(tiny("--context", 128, "--set", "backend=none"), "none")
    refused(call("--config", tmp_path / "config.json"), "config.json")
    refused(tiny("--json", tmp_path / "no" / "x.json"), "there is no directory", "make it")
    refused(tiny("--plot", tmp_path / "x.doc"), "png")
    refused(tiny("--device", "cuda:77", "--context", 128), "cuda:77")


def test_a_config_names_the_geometry_and_no_code(tmp_path):
    values = dict(geometry.GEOMETRIES["tiny"], num_hidden_layers=2, auto_map={"AutoConfig": "x.Y"})
    (tmp_path / "config.json").write_text(json.dumps(values))
    out = tmp_path / "out.json"
    few = ("--steps", 2, "--warmup", 1, "--device", "cpu", "--context", 64, "--fill", "pool")
    result = call("--config", tmp_path, "--contestants", "dense", *few, "--json", out)
    assert result.exit_code == 0, result.stderr
    shown = json.loads(out.read_text())
    assert shown["model"]["config"] == str(tmp_path)
    assert shown["rows"][0]["bytes"]["device"] == 2 * 2 * 2 * 64 * 4 * (64 + 1 + 2 + 1)
    for text in ("[]", "{}", '{"model_type": "no_such"}', '{"model_type": "vit"}', "nonsense"):
        (tmp_path / "config.json").write_text(text)
        refused(call("--config", tmp_path, *few), "no model can be made")


def test_a_run_that_measures_nothing_fails():
    result = tiny("--context", 128, "--contestants", "offloaded")
    assert result.exit_code == 2
    assert "nothing was measured" in result.stderr


# Geometries and phases.


@pytest.mark.parametrize(
    ("name", "billions"),
    [("llama-3.1-8b", 8.03), ("qwen3-8b", 8.19), ("qwen3-30b-a3b", 30.53), ("gpt-oss-20b", 20.91)],
)
def test_geometries_are_those_of_their_names(name, billions):
    config = geometry.config_of(name, None, 200_000)
    model = geometry.build(config, torch.device("meta"), torch.bfloat16)
    assert abs(model.num_parameters() / 1e9 - billions) < 0.05
    assert config.max_position_embeddings == 200_000


def test_the_command_is_listed_without_torch():
    heavy = "{'torch', 'transformers', 'numpy'} & {*sys.modules}"
    script = f"import sys, topkv_bench.command; sys.exit(bool({heavy}))"
    subprocess.run([sys.executable, "-c", script], check=True)
    assert tuple(geometry.GEOMETRIES) == command.MODELS
    assert (*command.CONTESTANTS, command.COMPILED) == NAMES


def test_kernels_go_to_the_phase_that_launched_them():
    spans = [
        Span("topkv.select", 10, 20),
        Span("elementwise", 11, 13),
        Span("_score", 15, 20),
        Span("topkv.load", 30, 34),
        Span("load_kernel", 30, 34),
        Span("gemm", 21, 29),
        Span("gemm", 40, 43),
        Span("_score", 50, 51),
        Span("plan_kernel", 52, 54),
    ]
    times = device_times(spans, {"_score": "select", "plan_kernel": "plan"})
    expected = dict.fromkeys((*PHASES, MODEL), 0.0)
    assert times == expected | {"select": 2 + 5 + 1, "load": 4, MODEL: 11, "plan": 2}


def test_kernels_of_plugins_are_known_by_name(model):
    import topkv_triton_attention.decode_kernels  # noqa: F401

    cell = Cell("topkv", 256, 1, 4, True, None, SparseConfig(**SPARSE))
    made = Topkv(model, cell)
    try:
        names = kernel_phases(made.coordinator)
    finally:
        made.close()
    assert names["plan_kernel"] == "plan"
    kernels = [name for name, phase in names.items() if phase == "select"]
    assert {"score_kernel", "lanes_kernel"} <= {*kernels}
    assert "attend" in names.values()
