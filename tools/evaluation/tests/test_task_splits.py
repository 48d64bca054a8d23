"""Tasks beside RULER's, depths, and the two splits of the questions."""

from __future__ import annotations

import ast
import random
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from topkv.errors import ConfigError
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.eval import plot, tasks
from topkv_evaluation.eval.catalogue import Catalogue
from topkv_evaluation.eval.command import evaluate
from topkv_evaluation.eval.options import Options
from topkv_evaluation.eval.plan import Plan
from topkv_evaluation.loading import load_model
from topkv_evaluation.tasks import own, ruler, splits
from topkv_evaluation.tasks.near_keys import LETTERS, near
from topkv_evaluation.tasks.needles import Needles
from topkv_evaluation.tasks.scoring import SCORINGS

ROOT = Path(__file__).parents[3]


def count(sample):
    return len(sample.prompt)


def generator_of(word):
    return own.OWN.get(word) or ruler.MADE[word.removeprefix("ruler:")]


@pytest.fixture(scope="module")
def catalogue():
    def make(**options):
        return Catalogue(load_model(CHECKPOINT), Options(contexts=(2048,), questions=3, **options))

    return make


# Splits.


@given(st.integers(0, splits.MOST - 1), st.integers(0, splits.MOST - 1),
       st.integers(0, splits.MOST - 1), st.integers(0, splits.MOST - 1))  # fmt: skip
def test_seeds_of_the_splits_cannot_meet(one, other, contexts, more):
    """They cannot meet even with the numbers that are added: contexts, and RULER's own 42."""
    tuning = splits.seed_of(splits.TUNING, one) + ruler.SEED + contexts
    reporting = splits.seed_of(splits.REPORTING, other) + more
    assert tuning < reporting + ruler.SEED < 2**32, "numpy's generators take 32 bits"


@pytest.mark.parametrize(("split", "seed"), [("test", 0), ("tuning", -1), ("reporting", 1 << 29)])
def test_a_wrong_split_or_seed_is_reported(split, seed):
    with pytest.raises(ConfigError, match=r"expected the split|seeds go from"):
        splits.seed_of(split, seed)


def test_tuning_keeps_the_seeds_that_results_are_known_by():
    assert splits.seed_of(splits.TUNING, 7) == 7


def test_no_default_reads_the_reporting_split():
    assert Options().split == splits.TUNING
    defaults = {parameter.name: parameter.default for parameter in evaluate.params}
    assert defaults["split"] == splits.TUNING
    assert tasks.text_task.__defaults__ == (0, splits.TUNING)


NAMED = {
    "tools/evaluation/src/topkv_evaluation/tasks/splits.py",  # makes it
    "tools/evaluation/scripts/grid.py",  # reports
    "benchmarks/long_text.py",  # reports
    "benchmarks/drafts.py",  # reports
}


def test_nothing_else_names_the_reporting_split():
    """So every default of any package can only have been chosen by the other split."""
    found = set()
    for folder in ("core", "plugins", "tools", "examples", "benchmarks"):
        for path in (ROOT / folder).rglob("*.py"):
            words = path.read_text(encoding="utf-8")
            if "reporting" not in words.lower() or "tests" in path.parts:
                continue
            nodes = [*ast.walk(ast.parse(words))]
            names = {node.value for node in nodes if isinstance(node, ast.Constant)}
            names |= {getattr(node, "attr", None) for node in nodes}
            names |= {getattr(node, "id", None) for node in nodes}
            if names & {"REPORTING", splits.REPORTING}:
                found.add(path.relative_to(ROOT).as_posix())
    assert found <= NAMED


@pytest.mark.parametrize("word", ["facts", "ruler:niah_multikey_2", "near_keys", "walk"])
def test_the_splits_ask_other_questions(catalogue, word):
    asked = []
    for split in splits.STARTS:
        (task,) = catalogue(split=split).tasks([word])
        assert task.about["split"] == split
        asked.append({(question.tokens, question.answers) for question in task.questions})
    assert not asked[0] & asked[1]


def test_the_splits_predict_other_text(catalogue):
    """Windows may overlap, predicted tokens may not: here by the places of the whole haystack."""
    prompts = catalogue().prompts
    whole = prompts.encode(" ".join(tasks.haystack(1 << 30, once=True)))
    places = []
    for split in splits.STARTS:
        task = tasks.text_task(700, 40, prompts, 3, split)
        found = set()
        for context, question in zip(task.contexts, task.questions, strict=True):
            start = bytes(whole).index(bytes(context))
            assert question.reference == whole[start + 701 : start + 765]
            found |= {*range(start + 700, start + 765)}
        places.append(found)
    assert not places[0] & places[1]


# Answers.

ONCE = {f"ruler:{name}" for name, task in ruler.MADE.items() if isinstance(task, Needles)}
ONCE |= {"near_keys", "four_digits", "lookup"}
"""Tasks whose answers stand in the prompt once each, so that only one place holds an answer."""


@pytest.mark.parametrize("word", sorted(ONCE))
@pytest.mark.parametrize("split", [*splits.STARTS])
def test_an_answer_stands_in_its_prompt_once(word, split):
    seed = ruler.SEED + splits.seed_of(split, 0)
    for sample in generator_of(word)(count, 4096, 8, seed):
        for answer in sample.answers:
            assert sample.prompt.count(answer) == 1


@pytest.mark.parametrize("split", [*splits.STARTS])
def test_the_answer_of_a_fact_stands_in_its_context_once(split):
    task = tasks.retrieval_task(4096, 50, 25, splits.seed_of(split, 0))
    for question in task.questions:
        text = bytes(task.contexts[question.context]).decode("ascii")
        assert text.count(f" is {question.answers[0]}.") == 1


def test_near_keys_differ_from_the_one_asked_for_by_a_letter_as_long_as_that_goes():
    rng = random.Random(5)
    keys = near("qwertyui", 230, rng)
    differ = [sum(a != b for a, b in zip(key, "qwertyui", strict=True)) for key in keys]
    assert len({*keys, "qwertyui"}) == 231
    assert differ == sorted(differ) == [1] * 25 * LETTERS + [2] * 30


def test_near_keys_ask_for_one_of_many():
    (sample,) = own.OWN["near_keys"](count, 4096, 1, 0)
    statements = [line for line in sample.context.splitlines() if line.startswith("One of")]
    assert len(statements) > 40
    (holds,) = [line for line in statements if line.endswith(f"{sample.answers[0]}.")]
    key = holds.split(" for ")[1].split(" is")[0]
    assert f" for {key} " in sample.question
    assert sum(key in line for line in statements) == 1


def test_a_walk_goes_where_the_lines_say():
    (sample,) = own.OWN["walk"](count, 4096, 1, 0)
    after = {
        line.split()[1]: line.split()[3].rstrip(".") for line in sample.context.splitlines()[1:]
    }
    start = sample.prefix.split()[-2]
    assert [after[place] for place in (start, *sample.answers[:-1])] == [*sample.answers]
    assert len({start, *sample.answers}) == 33 < len(after)
    assert sample.new_tokens == len(", ".join(sample.answers)) + 3
    reported = [line for line in sample.context.splitlines() if sample.answers[7] in line]
    assert len(reported) == 2, "a place is written where it comes, and where one goes on from it"


def test_a_walk_is_scored_up_to_the_first_wrong_step():
    order, places = SCORINGS["order"], ["ab", "cd", "ef", "gh"]
    assert order(" ab, cd, ef, gh. After", places) == 1
    assert order("ab cd gh ef", places) == 0.5
    assert order("cd, ab, ef, gh", places) == order("", places) == 0


# Depths.


@pytest.mark.parametrize("word", sorted(own.SWEPT))
def test_a_swept_needle_stands_at_its_depth(word):
    where = []
    for depth in (0, 25, 50, 100):
        swept = own.SWEPT[word].at(depth)
        for sample in swept(count, 4096, 2, 42):
            text = sample.context[sample.context.index("\n") :]
            off = text.index(sample.answers[0]) - depth / 100 * len(text)
            assert abs(off) < 250, "half a sentence, and the needle itself"
            where.append(text.index(sample.answers[0]) / len(text))
            assert sample.prompt.count(sample.answers[0]) == 1
            holds = getattr(swept, "count", 1)
            assert sample.context.count("magic") >= holds, "needles were lost"
    assert all(one < other for one, other in pairwise(where[::2])), where


def test_a_needle_without_depth_is_rulers():
    assert Needles("noise").depth is None, "or the checksums of test_ruler would not be RULER's"


def test_a_sweep_is_a_task_for_each_depth_and_length(catalogue):
    model, prompts = load_model(CHECKPOINT), (1024, 2048)
    options = Options(contexts=prompts, questions=2, depths=(0, 100))
    made = Catalogue(model, options).tasks(["near_keys"])
    assert [(t.about["length"], t.about["depth"]) for t in made] == [
        (1024, 0), (1024, 100), (2048, 0), (2048, 100)
    ]  # fmt: skip
    assert len({task.name for task in made}) == len({task.digest for task in made}) == 4
    assert made[0].name == "near_keys, 1024 tokens, depth 0%"


def test_depths_of_a_task_without_one_needle_are_refused():
    words = ("ruler:niah_single_1", "facts", "ruler:vt")
    with pytest.raises(ConfigError) as error:
        Plan.of(Options(tasks=words, depths=(0, 50), contexts=(2048,)))
    assert [reason.split()[0] for reason in error.value.reasons] == ["'facts'", "'ruler:vt'"]


def test_the_report_shows_right_answers_by_length_and_depth():
    pytest.importorskip("matplotlib")
    row = {"model": "m", "family": "near_keys", "question": "sparse", "dense_layers": [],
           "algorithm": "quest", "plugin": "quest", "nominal_percent": 5.0}  # fmt: skip
    rows = [
        {**row, "length": length, "depth": depth, "accuracy": length / 4096 - depth / 1000}
        for length in (2048, 4096)
        for depth in (0, 50)
    ]
    rows += [rows[0] | {"nominal_percent": 10.0}, rows[1] | {"depth": None}]
    groups = plot.swept(rows)
    assert [len(group) for group in groups.values()] == [4, 1]
    text = plot.map_svg(rows)
    assert text.startswith("<svg")
    assert text == plot.map_svg(rows), "the same rows give the same picture"
    assert text != plot.map_svg([rows[0] | {"accuracy": 0.1}, *rows[1:]])
    assert plot.map_svg(rows[-1:]) == ""
