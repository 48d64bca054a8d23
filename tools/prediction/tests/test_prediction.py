"""Predictions beside what was measured, beside what is allocated, and beside themselves."""

from __future__ import annotations

import ast
import json
import lzma

import numpy as np
import pytest
import torch
from attrs import evolve
from hypothesis import given
from hypothesis import strategies as st

from tests.packaging.packages import ROOT
from topkv.config import SparseConfig, lower
from topkv.coordinator import SparseCoordinator
from topkv.errors import CapabilityError, ConfigError
from topkv.plugins import registry
from topkv.types import IndexerShape, ModelShape
from topkv_prediction.machine import Machine, bytes_ms
from topkv_prediction.probe import rates
from topkv_prediction.report import ERROR, FARTHEST, predict
from topkv_prediction.step import LONG, StepModel
from topkv_simulate.curve import Point

RESULTS = ROOT / "benchmarks" / "results"
LLAMA = ModelShape(32, 32, 8, 128, torch.bfloat16, 128**-0.5)
SMALL = ModelShape(4, 4, 2, 64, torch.bfloat16, 64**-0.5)
WEIGHTS = 15_010_000_000
"""Bytes of Llama-3.1-8B in bfloat16 without the embedding."""


def rows_of(name):
    raw = (RESULTS / name).read_bytes()
    lines = (lzma.decompress(raw) if name.endswith(".xz") else raw).decode().splitlines()
    return [json.loads(line) for line in lines]


def lowered(model, **options):
    settings = {"algorithm": "quest", "backend": "triton_attention", **options}
    config, cpu = SparseConfig(**settings), torch.device("cpu")
    return lower(config, model, device=cpu, registry=registry())


@pytest.fixture(scope="module")
def machine():
    """The rates of the machine of ``benchmarks/results``."""
    link = max(row["gbs"] for row in rows_of("swap_in.jsonl.xz") if row.get("entry") == 8192)
    return Machine(memory=rows_of("selection.jsonl.xz")[0]["read_gbs"], link=link)


def errors(rows, step):
    """By cell how far its prediction is from it, as a share of what was measured."""
    found = {}
    for row in rows:
        size = row["context"], row["requests"]
        rate = row["hit_rate"]
        time = step.resident(*size) if rate is None else step.topkv(*size, rate)
        found[*size, rate] = time.ms / row["ms"] - 1
    return found


def test_attention_alone_is_as_measured_where_costs_were_fitted(machine):
    step = StepModel.of(lowered(LLAMA, max_requests=1, max_tokens=2**17), machine)
    found = errors(rows_of("decode_step.jsonl"), step)
    assert len(found) == 6
    assert max(map(abs, found.values())) <= 0.025, found


def test_whole_steps_are_as_measured(machine):
    """All of them but the first of 32K x 1 without topkv, which one cost was fitted to."""
    config = lowered(LLAMA, max_requests=1, max_tokens=2**17)
    found = errors(
        rows_of("captured_steps.jsonl"),
        StepModel.of(config, machine, machine.model_ms(WEIGHTS, 32)),
    )
    assert len(found) == 14
    assert max(map(abs, found.values())) <= ERROR, found
    assert abs(found[32768, 1, None]) < 0.01


def test_runs_on_other_hosts_are_slower_by_as_much_as_is_said(machine):
    text = lzma.decompress((RESULTS / "spine.log.xz").read_bytes()).decode()
    parts = [part for part in text.split("\n== ") if part.startswith("decode_step ")]
    step = StepModel.of(lowered(LLAMA, max_requests=1, max_tokens=2**17), machine)
    for part in parts:
        rows = [ast.literal_eval(line) for line in part.splitlines() if line.startswith("{")]
        assert len(rows) == 6
        for cell, error in errors(rows, step).items():
            assert -0.22 < error < 0, (cell, error)
    assert len(parts) == 4


MEASURED = {"double_sparsity": {"channels": 32}}
"""Parameters of the measured layers that rows do not say: defaults of then."""

SAID = {
    "quest": (0.7, 1.3),
    "double_sparsity": (0.8, 2.0),
    "snapkv": (0.7, 1.2),
    "streaming_llm": (0.5, 0.9),
    "clusterkv": (3, 5),
    "deepseek_dsa": (0.9, 1.6),
}
"""The share of its prediction that a measured layer takes, at least and at most, as docs/slower.md
says."""


def test_layers_of_other_algorithms_are_as_far_off_as_is_said(machine):
    shares = {name: [] for name in SAID}
    for row in rows_of("selection.jsonl.xz")[1:]:
        if "head_sparsity" in (row["params"] or {}):
            continue  # a stage has it now, which was not measured
        most = 131072 if row["budget"] == 2048 else 4096
        config = lowered(
            evolve(LLAMA, num_layers=1),
            **{name: row[name] for name in ("algorithm", "budget")},
            params={**MEASURED.get(row["algorithm"], {}), **(row["params"] or {})},
            dense_layers=(),
            max_requests=1,
            max_tokens=most + 64,
        )
        step = StepModel.of(config, evolve(machine, step_us=0.0))
        time = step.topkv(row["tokens"], row["requests"], 1.0).ms
        shares[row["algorithm"]].append(row["layer_us"] / 1e3 / time)
    for row in rows_of("dsa_step.jsonl")[1:]:
        latent = ModelShape(
            *(row["layers"], 128, 1, 576, torch.bfloat16, 192**-0.5, "mla", 512),
            indexer=IndexerShape(64, 128),
        )
        options = {"kv_format": "fp8", "budget": 2048, "buffer": 4096, "max_tokens": 131072 + 64}
        config = lowered(latent, algorithm="deepseek_dsa", max_requests=1, **options)
        time = StepModel.of(config, machine).topkv(131072, row["requests"], row["hit_rate"]).ms
        shares["deepseek_dsa"].append(row["layer_us"] / 1e3 * row["layers"] / time)
    for name, (least, most) in SAID.items():
        digits = 1 if isinstance(least, float) else 0
        found = min(shares[name]), max(shares[name])
        assert tuple(round(each, digits) for each in found) == (least, most), (name, found)


HALVED = {"host_format": "fp8"}
STREAMED = {"dense_layers": [0], "dense_residency": "streamed"}
OPTIONS = [
    {},
    HALVED,
    STREAMED,
    {"scope": "shared"},
    {"algorithm": "double_sparsity"},
    {"algorithm": "streaming_llm"},
]


def steps(**options):
    """A small model at any configuration and rates."""
    machines = st.builds(
        lambda memory, link: Machine(memory=memory, link=link),
        st.floats(100, 8000),
        st.floats(1, 500),
    )
    known = {
        i: lowered(SMALL, max_requests=2, max_tokens=8192, budget=256, **each)
        for i, each in enumerate(OPTIONS)
    }
    return st.builds(
        lambda which, machine, ms: StepModel.of(known[which], machine, ms),
        st.sampled_from(sorted(known)),
        machines,
        st.floats(0, 20),
    )


CONTEXT, REQUESTS, RATE = st.integers(1, 2**20), st.integers(1, 512), st.floats(0, 1)


def test_more_takes_longer_and_hits_do_not():
    @given(steps(), CONTEXT, REQUESTS, RATE, st.integers(1, 2**20), st.integers(1, 64), RATE)
    def run(step, context, requests, rate, tokens, rows, other):
        time, dense = step.topkv(context, requests, rate), step.resident(context, requests)
        assert step.topkv(context + tokens, requests, rate).ms >= time.ms
        assert step.topkv(context, requests + rows, rate).ms >= time.ms
        assert step.resident(context + tokens, requests).ms > dense.ms
        assert step.resident(context, requests + rows).ms > dense.ms
        low, high = sorted((rate, other))
        fewer = step.topkv(context, requests, high)
        more = step.topkv(context, requests, low)
        assert fewer.link <= more.link
        assert (fewer.model, fewer.fixed, fewer.device) == (more.model, more.fixed, more.device)
        if context > step.covered and high > low + 1e-9:
            assert fewer.link < more.link
        if context <= step.covered - 64:
            assert fewer.link == more.link

    run()


def test_a_faster_link_never_hurts_and_helps_where_something_is_loaded():
    @given(steps(), CONTEXT, REQUESTS, RATE)
    def run(step, context, requests, rate):
        before = step.topkv(context, requests, rate)
        step.machine = evolve(step.machine, link=2 * step.machine.link)
        after = step.topkv(context, requests, rate)
        assert after.link == pytest.approx(before.link / 2)
        assert after.ms - before.ms == pytest.approx(after.link - before.link)

    run()


def test_topkv_is_faster_from_where_it_says_and_no_earlier():
    @given(steps(), CONTEXT, REQUESTS, RATE)
    def run(step, context, requests, rate):
        found = predict(step, context, requests, rate)

        def longer(tokens, rows, hits):
            return step.topkv(tokens, rows, hits).ms - step.resident(tokens, rows).ms

        slack = 1e-9 * found.resident.ms + 1e-9
        first = found.context_from
        if first is None:
            assert longer(step.covered + FARTHEST, requests, rate) > -slack * FARTHEST
        else:
            for tokens in (first, first + 1, 2 * first, 3 * first + 10**5):
                assert longer(tokens, requests, rate) <= slack
            if first > max(step.covered, LONG) + 2:
                assert longer(first - 2, requests, rate) > -slack
        first = found.requests_from
        if first is None:
            assert longer(context, FARTHEST, rate) > -slack * FARTHEST
        else:
            assert longer(context, first, rate) <= slack
            assert longer(context, 9 * first, rate) <= slack
            if first > 1:
                assert longer(context, first - 1, rate) > -slack
        least = found.hit_rate_from
        if least is None:
            assert longer(context, requests, 1.0) > 0
        else:
            assert longer(context, requests, least) <= slack
            if least > 1e-3:
                assert longer(context, requests, least - 1e-3) > -slack

    run()


@pytest.mark.parametrize("options", OPTIONS, ids=lambda each: "-".join(map(str, each.values())))
@pytest.mark.parametrize("context", [1024, 4096])
def test_a_request_holds_what_is_allocated_for_it(machine, options, context):
    def allocated(requests, **further):
        config = lowered(
            SMALL,
            **{**options, **further},
            budget=256,
            max_requests=requests,
            max_tokens=requests * context,
            max_request_tokens=context,
        )
        return config, SparseCoordinator.required_bytes(config)

    config, one = allocated(1)
    _, three = allocated(3)

    def of_each(name):
        return (getattr(three, name) - getattr(one, name)) / 2

    names = ("buffer", "resident", "representation", "metadata")
    step = StepModel.of(config, machine)
    # There is a page more for each request, which may be filled in part.
    held, more = step.held(context), step.held(context + config.page_tokens)
    assert held.device <= sum(map(of_each, names)) <= more.device
    assert held.host <= of_each("host") <= more.host + 4096  # pools end with a page of the system
    _, resident = allocated(3, layers={"0-": "resident"}, dense_layers=None)
    _, single = allocated(1, layers={"0-": "resident"}, dense_layers=None)
    assert held.resident <= (resident.resident - single.resident) / 2 <= more.resident


def test_what_fits_is_counted_and_what_decodes_then(machine):
    step = StepModel.of(lowered(LLAMA, max_requests=1, max_tokens=2**17), machine, 6.0)
    found = predict(step, 2**17, 6, 0.85, memory=16 * 2**30)
    assert (found.fits_topkv, found.fits_resident) == (6, 1)  # as measured
    assert found.topkv_full == pytest.approx(6e3 / step.topkv(2**17, 6, 0.85).ms)
    assert found.resident_full == pytest.approx(1e3 / step.resident(2**17, 1).ms)
    none = predict(step, 2**17, 6, 0.85, memory=2**20)
    assert (none.fits_topkv, none.fits_resident, none.topkv_full) == (0, 0, 0)
    assert predict(step, 2**17, 6).fits_topkv is None
    assert "16.0 GiB on the GPU hold 6 of them through topkv" in str(found)
    assert "GiB on the GPU hold" not in str(predict(step, 2**17, 6))


def test_steps_of_several_tokens_cost_what_they_load_and_their_own_units(machine):
    step = StepModel.of(lowered(LLAMA, max_requests=1, max_tokens=2**17), machine, 6.0)
    one, four = (predict(step, 2**17, 4, 0.7, 2**35, queries=n, accept=0.5) for n in (1, 4))
    assert (one.tokens, four.tokens) == (1, 2.5)
    assert four.topkv.link == one.topkv.link  # both miss 30 % of a selection
    assert four.topkv.fixed == one.topkv.fixed
    assert four.resident == one.resident
    unit = 4 * 30 * 16 * 2 * 8 * 128 * 2  # 3 further tokens of 4 requests reach a unit more
    added = bytes_ms(unit, machine.memory)
    assert four.topkv.device - one.topkv.device == pytest.approx(added)
    full = 1e3 * four.fits_topkv * 2.5 / step.topkv(2**17, four.fits_topkv, 0.7, 4).ms
    assert four.topkv_full == pytest.approx(full)
    assert four.resident_full == pytest.approx(2.5 * one.resident_full)
    rates = [1e3 * 4 * 2.5 / time.ms for time in (four.topkv, four.resident)]
    said = "captured steps of 4 tokens of each, of which 2.5 stay:"
    assert said in str(four)
    assert f"that is {rates[0]:.0f} tokens/s through topkv, and {rates[1]:.0f} without" in str(
        four
    )
    assert "stay" not in str(one)
    assert "that is" not in str(one)


def test_hits_that_are_assumed_of_several_tokens_are_fewer(machine):
    step = StepModel.of(lowered(LLAMA, max_requests=1, max_tokens=2**17), machine)
    rates = [predict(step, 2**17, 1, queries=queries).hit_rate for queries in (1, 2, 4, 8)]
    assert rates == pytest.approx([0.85, 0.7, 0.4, 0.0])


def test_close_times_are_called_close(machine):
    step = StepModel.of(
        lowered(LLAMA, max_requests=1, max_tokens=2**17), machine, machine.model_ms(WEIGHTS, 32)
    )
    assert predict(step, 32768, 16).verdict == f"about as fast, within {ERROR:.0%}"
    assert predict(step, 32768, 16, 1.0).verdict.endswith("times as fast")
    assert predict(step, 32768, 16, 0.0).verdict.endswith("times as slow")
    assert "no hit rate" in str(predict(step, 32768, 1))


def test_simulated_bytes_take_as_long_as_predicted_ones(machine):
    """``topkv simulate`` and a prediction are one model: a step of a trace waits as long."""
    for options in ({}, HALVED):
        step = StepModel.of(
            lowered(SMALL, max_requests=2, max_tokens=8192, budget=256, **options), machine
        )
        ((group, _),) = [each for each in step.groups if each[0].shape.residency == "sparse"]
        shape, misses = group.shape, 7
        selected = len(shape.layers) * shape.lane_heads * shape.select
        loaded = np.array([misses * shape.host_entry_bytes])
        point = Point(0, "lru", selected - misses, misses, loaded, {}, 0)
        expected = step.topkv(8192, 3, point.hit_rate).link
        assert point.load_ms(machine.link, 3) == pytest.approx(expected)
        assert point.load_ms(machine.link, 3) == bytes_ms(3 * loaded[0], machine.link)


def test_all_that_cannot_be_asked_is_refused_at_once(machine):
    step = StepModel.of(lowered(SMALL, max_requests=2, max_tokens=8192, budget=256), machine)
    with pytest.raises(ConfigError) as caught:
        predict(step, 0, 1.5, 1.01, memory=-1)
    assert caught.value.reasons == (
        "context must be a positive number of tokens, got 0",
        "requests must be a positive number of requests, got 1.5",
        "hit_rate must be from 0 to 1, got 1.01",
        "memory must be a positive number of bytes, got -1",
    )
    with pytest.raises(ConfigError, match="hit_rate must be from 0 to 1, got nan"):
        predict(step, 1, 1, float("nan"))
    with pytest.raises(
        ConfigError, match=r"queries must be .* got 0\n.*accept must be from 0 to 1"
    ):
        predict(step, 1, 1, queries=0, accept=2)
    with pytest.raises(ConfigError, match="tokens, got True"):
        predict(step, True, 1)


def test_a_cpu_is_not_measured():
    with pytest.raises(CapabilityError, match="cannot be measured on cpu; give link and"):
        rates(torch.device("cpu"))


@pytest.mark.gpu
def test_the_rates_of_a_gpu_are_those_of_a_gpu():
    """Wide bounds: other tests may use the GPU meanwhile. The log of a run says the figures."""
    memory, link = rates(torch.device("cuda", 0))
    print(f"device memory {memory:.0f} GB/s, link {link:.1f} GB/s")
    assert 20_000 > memory > link > 0.5
