"""The words of ``topkv eval`` and the figures that it makes of counts and of keys."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from attrs import field, make_class

from topkv import hookimpl
from topkv.entries import PluginEntry
from topkv.errors import ConfigError
from topkv.plugins import PluginRegistry, registry
from topkv_evaluation.eval import catalogue, choices, tasks
from topkv_evaluation.eval.intervals import wilson
from topkv_evaluation.eval.recall import chosen_tokens, held_mass, lane_mass
from topkv_evaluation.retrieval import ASK_BYTES, VALUE_DIGITS

DIM, LAYERS = 64, 6


def test_wilson_has_the_published_values():
    # Newcombe, "Two-sided confidence intervals for the single proportion", 1998, table I.
    for correct, total, low, high in (
        (81, 263, 0.2553, 0.3662),
        (15, 148, 0.0624, 0.1605),
        (0, 20, 0.0, 0.1611),
        (1, 29, 0.0061, 0.1718),
    ):
        assert wilson(correct, total) == pytest.approx((low, high), abs=5e-5)


def test_the_ends_of_wilson_are_where_the_score_test_turns():
    for correct, total in ((3, 200), (100, 200), (199, 200), (200, 200)):
        for end in wilson(correct, total):
            if end in (0, 1):
                continue
            z = abs(correct / total - end) / math.sqrt(end * (1 - end) / total)
            assert z == pytest.approx(1.959964, abs=1e-5)
    assert wilson(200, 200)[1] == 1.0
    with pytest.raises(ValueError, match="total >= 1"):
        wilson(0, 0)


@pytest.mark.parametrize(
    ("unit", "share", "context", "budget"),
    [(1, 0.01, 8192, 82), (16, 0.01, 8192, 96), (16, 0.25, 16384, 4096), (1, 0.05, 16384, 820),
     (16, 0.05, 16384, 832), (1, 0.1, 1000, 100), (1, 0.07, 100, 7), (64, 0.001, 100, 64)],
)  # fmt: skip
def test_budgets_are_rounded_up_to_units(unit, share, context, budget):
    assert choices.Choice("a", "a", unit).budget(share, context) == budget


def test_buffers_are_two_budgets_as_far_as_a_request_can_reach():
    plain, own = choices.Choice("a", "a", 16), choices.Choice("a", "a", 16, {"buffer": 100})
    assert [plain.buffer(budget, 1088) for budget in (32, 512, 1024)] == [256, 1024, 1088]
    assert own.buffer(64, 1088) == 112


def test_algorithms_and_their_parameters():
    text = (
        "quest:unit=32,sink_units=2, exact,ds@double_sparsity:label=int4,channels=8,streaming_llm"
    )
    quest, exact, double, streaming = choices.read_algorithms([text], DIM, registry())
    assert (quest.label, quest.unit, quest.params) == (
        "quest:unit=32,sink_units=2", 32, {"sink_units": 2},
    )  # fmt: skip
    assert (exact.label, exact.name, exact.params) == (
        "exact",
        "double_sparsity",
        {"channels": 64, "label": "bf16"},
    )
    assert (double.label, double.params) == ("ds", {"label": "int4", "channels": 8})
    assert (double.name, double.unit) == ("double_sparsity", 1)
    (plain,) = choices.read_algorithms(["double_sparsity:label=int4"], DIM, registry())
    assert (plain.label, plain.params) == ("double_sparsity:label=int4", {"label": "int4"})
    assert (streaming.name, streaming.unit) == ("streaming_llm", 16)


def of_ints(names):
    """Parameters of these names, each an int or None."""
    return make_class(
        "Ints", {name: field(default=None, type=int | None) for name in names}, frozen=True
    )


def with_stages():
    """An algorithm, and a stage with parameters and one without."""

    def entry(name, kind, *parameters):
        return PluginEntry(name=name, kind=kind, factories="a:b", parameters=of_ints(parameters))

    algorithms, stages = [entry("own", "algorithm", "sink_units")], [entry("two", "stage")]
    stages.append(entry("one", "stage", "p", "widen"))
    offers = SimpleNamespace(
        topkv_register_algorithms=hookimpl(lambda: algorithms),
        topkv_register_stages=hookimpl(lambda: stages),
    )
    return PluginRegistry([("topkv-own", "1", offers)])


def test_stages_behind_an_algorithm():
    text = "own:stages=one/p=0.95/widen=2+two,sink_units=2"
    (own,) = choices.read_algorithms([text], DIM, with_stages())
    one = {"name": "one", "params": {"p": 0.95, "widen": 2}}
    assert own.settings == {"stages": [one, {"name": "two", "params": {}}]}
    assert own.params == {"sink_units": 2}


def test_wrong_stages_are_refused_all_at_once():
    text = "own:stages=one/p/widen=2/wide=3+two/p=1+three"
    with pytest.raises(ConfigError) as caught:
        choices.read_algorithms([text], DIM, with_stages())
    reported = [reason.removeprefix(f"{text!r}: ") for reason in caught.value.reasons]
    assert reported[:3] == [
        "stage 'one': expected p=value or widen=value, got 'p'",
        "stage 'one': expected p=value or widen=value, got 'wide=3'",
        "stage 'two': expected no parameters, got 'p=1'",
    ]
    assert len(reported) == 4
    assert "three" in reported[3]


@pytest.mark.parametrize(
    ("text", "word"),
    [("quset", "unknown algorithm 'quset'"), ("", "at least one"), ("quest,quest", "twice"),
     ("quest:unit", "key=value"), ("quest:unit=0", "unit must be"), ("@quest", "name before @"),
     ("a@quest,a@exact", "'a' is named twice")],
)  # fmt: skip
def test_wrong_algorithms_are_refused(text, word):
    with pytest.raises(ConfigError, match=word):
        choices.read_algorithms([text], DIM, registry())


def test_a_parameter_goes_before_a_setting_of_its_name():
    """Whatever an algorithm calls its parameters, they reach it."""
    keys = ("label", "scope", "buffer", "eviction", "unit", "name", "algorithm")
    offer = hookimpl(
        lambda: [
            PluginEntry(name="own", kind="algorithm", factories="a:b", parameters=of_ints(keys))
        ]
    )
    found = PluginRegistry([("topkv-own", "1", SimpleNamespace(topkv_register_algorithms=offer))])
    text = "row@own:" + ",".join(f"{key}={i}" for i, key in enumerate(keys))
    (own,) = choices.read_algorithms([text], DIM, found)
    assert own.params == {key: i for i, key in enumerate(keys)}
    assert (own.label, own.settings, own.unit) == ("row", {}, 16)


@pytest.mark.parametrize(
    ("positions", "lengths"),
    [(131072, [4096]), (4608, [4096]), (4607, [2048]), (4096, [2048]), (3000, [1024]),
     (None, [4096])],
)  # fmt: skip
def test_contexts_that_nobody_names_are_those_of_the_model(positions, lengths):
    config = SimpleNamespace(max_position_embeddings=positions)
    assert catalogue.usual_contexts(SimpleNamespace(config=config)) == lengths


def test_budgets_and_layers():
    assert choices.read_budgets("1%, 2.5%,100%") == [0.01, 0.025, 1.0]
    for text, layers in (("none", ()), ("0-1", (0, 1)), ("0,4-", (0, 4, 5))):
        assert choices.read_dense_layers(text, LAYERS) == layers
    for read, texts in (
        (choices.read_budgets, ("5", "0%", "101%", "", "x%")),
        (lambda text: choices.read_dense_layers(text, LAYERS), ("6", "0-6", "all")),
    ):
        for text in texts:
            with pytest.raises(ConfigError):
                read(text)


def test_a_task_asks_every_fact_once():
    task = tasks.retrieval_task(1024, questions=7, per_context=3, seed=5)
    assert [len(context) for context in task.contexts] == [1024] * 3
    assert [question.context for question in task.questions] == [0, 0, 1, 1, 2, 2, 2]
    for question in task.questions:
        key = bytes(question.tokens).decode().split()[-2]
        text = bytes(task.contexts[question.context]).decode()
        assert f"\n# fact: key {key} is {question.answers[0]}.\n" in text
    assert len({question.tokens for question in task.questions}) == 7
    assert task.steps == ASK_BYTES + VALUE_DIGITS - 1
    with pytest.raises(ConfigError, match="no context of 256 tokens"):
        tasks.retrieval_task(256, 4)


def test_mass_equals_plain_python():
    generator = torch.Generator().manual_seed(0)
    heads, kv_heads, dim, tokens, unit, scale = 4, 2, 8, 11, 4, 0.3
    q = torch.randn(heads, dim, generator=generator, dtype=torch.float64)
    k = torch.randn(tokens, kv_heads, dim, generator=generator, dtype=torch.float64)
    for ids, tail in (([[0, -1], [1, 7]], True), ([[0, 0], [2, -1]], False), ([[1, 0]], True)):
        lanes = len(ids)
        held, best = [], []
        for lane in range(lanes):
            own = range(lane * heads // lanes, (lane + 1) * heads // lanes)
            mass = [0.0] * tokens
            for head in own:
                logits = [float(q[head] @ k[t, head // 2]) * scale for t in range(tokens)]
                total = sum(map(math.exp, logits))
                mass = [
                    m + math.exp(x) / total / len(own) for m, x in zip(mass, logits, strict=True)
                ]
            units = {i for i in ids[lane] if i >= 0} | ({2} if tail else set())
            held.append(sum(m for t, m in enumerate(mass) if t // unit in units))
            best.append(sum(sorted(mass)[-5:]))
        chosen = chosen_tokens(torch.tensor(ids, dtype=torch.int32), unit, tail, tokens)
        found = held_mass(lane_mass(q, k, lanes, scale), chosen, 5)
        assert found == pytest.approx((sum(held) / lanes, sum(best) / lanes), abs=1e-5)
