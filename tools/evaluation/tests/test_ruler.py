"""RULER's tasks beside RULER: its own texts by checksum, its scoring, and other properties."""

from __future__ import annotations

import hashlib
import json
import lzma
import random
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv.errors import ConfigError
from topkv_evaluation.tasks import scoring, words
from topkv_evaluation.tasks.common_words import CommonWords, Shape
from topkv_evaluation.tasks.documents import read_documents
from topkv_evaluation.tasks.needles import Needles
from topkv_evaluation.tasks.ruler import MADE, READ, SEED, scoring_of

OWN_TEXT = {
    name for name, task in MADE.items() if isinstance(task, Needles) and task.haystack == "text"
}
"""Tasks with another haystack than RULER's, whose essays nobody may pass on."""

WORD = re.compile(r"\w+|[^\w\s]")

THEIRS = {
    ("cwe", 2048): "9dbfc639a55aa2b0", ("cwe", 4096): "5cfb03d071061eba",
    ("fwe", 2048): "1476d418cf10d989", ("fwe", 4096): "f8cca1ff7621ee03",
    ("niah_multikey_1", 2048): "6fc0d7f0587368d5", ("niah_multikey_1", 4096): "85c1816652cc12d4",
    ("niah_multikey_2", 2048): "18cef628a4d01fce", ("niah_multikey_2", 4096): "c9a4f8ba52cb0013",
    ("niah_multikey_3", 2048): "331c39ad578a4d7e", ("niah_multikey_3", 4096): "8fff78b4f687d8ad",
    ("niah_multiquery", 2048): "c8152798dd18d5a8", ("niah_multiquery", 4096): "b5775951d3841f06",
    ("niah_multivalue", 2048): "e9c18722f2f09392", ("niah_multivalue", 4096): "1691661c9675d7de",
    ("niah_single_1", 2048): "d5dd9d2008f3fd35", ("niah_single_1", 4096): "92936b586c7623a5",
    ("niah_single_2", 2048): "b37f6d1bfbaaa0df", ("niah_single_2", 4096): "096be3e3d4b5081b",
    ("niah_single_3", 2048): "a0cad8e141b4fb69", ("niah_single_3", 4096): "b01dab2669882c1e",
    ("qa_1", 2048): "a6dea4705ca5a174", ("qa_1", 4096): "a31210c05a534897",
    ("qa_2", 2048): "fc1b49be47f1b1dc", ("qa_2", 4096): "edfcf87b273a027f",
    ("vt", 2048): "2a53a8ae4859e8e9", ("vt", 4096): "17c1f4cb89838d44",
}  # fmt: skip
"""SHA-256 of two samples as the scripts of NVIDIA/RULER at c3f5e3b make them with the seed 42,
2048 and 4096 tokens, ``WORD`` for a tokenizer, and our haystack in the place of the essays."""


def squad():
    """Return eight articles of five paragraphs, each with a question, and one without answer."""
    data = []
    for a in range(8):
        paragraphs = []
        for p in range(5):
            answers = [{"text": f"thing{p}"}, {"text": f"Thing {p}"}]
            asked = {"question": f"What stands in {a} of {p}?", "answers": answers}
            qas = [asked | {"is_impossible": False},
                   {"question": "Nothing?", "answers": [], "is_impossible": True}]  # fmt: skip
            context = " ".join(f"Word{a} thing{p} stands here {i}." for i in range(12))
            paragraphs.append({"context": context, "qas": qas})
        data.append({"title": str(a), "paragraphs": paragraphs})
    return {"data": data}


def hotpotqa():
    """Return twelve questions over ten documents each, of ninety that they share."""
    return [
        {
            "question": f"Which {i}?",
            "answer": f"answer {i}",
            "context": [
                [f"T{n}", [f"First of {n}.", " Second sentence, a little longer than that."]]
                for n in ((i * 7 + j) % 90 for j in range(10))
            ],
        }
        for i in range(12)
    ]


def count(sample):
    return len(WORD.findall(sample.prompt))


@pytest.fixture(scope="module")
def tasks(tmp_path_factory):
    folder, tasks = tmp_path_factory.mktemp("qa"), dict(MADE)
    for name, data in zip(READ, (squad(), hotpotqa()), strict=True):
        (folder / name).write_text(json.dumps(data), encoding="utf-8")
        tasks[name] = read_documents(name, folder / name)
    return tasks


def digest(samples):
    """Return a checksum of all that RULER's lines hold."""
    lines = [
        {
            "input": s.context + s.question,
            "outputs": [*s.answers],
            "length": count(s) + s.new_tokens,
            "answer_prefix": s.prefix,
        }
        for s in samples
    ]
    return hashlib.sha256(json.dumps(lines).encode()).hexdigest()[:16]


@pytest.mark.parametrize("name", [*MADE, *READ])
def test_the_text_is_rulers(tasks, name):
    for length in (2048, 4096):
        assert digest(tasks[name](count, length, 2, SEED)) == THEIRS[name, length]


def test_templates_are_the_published_ones():
    """They stand in table 2 and appendix B of the paper, and in ``constants.py``."""
    (single,) = MADE["niah_single_1"](count, 1000, 1, 0)
    query = re.search(r"number for (\S+) mentioned", single.question)[1]
    assert single.context.startswith(
        "A special magic number is hidden within the following text. Make sure to memorize it. "
        "I will quiz you about the number afterwards.\nThe grass is green. The sky is blue. "
    )
    assert single.question == (
        f"\nWhat is the special magic number for {query} mentioned in the provided text?"
    )
    assert single.prefix == (
        f" The special magic number for {query} mentioned in the provided text is"
    )
    needle = f"\nOne of the special magic numbers for {query} is: {single.answers[0]}.\n"
    assert needle in single.context + "\n"
    (many,) = MADE["niah_multiquery"](count, 1000, 1, 0)
    assert "\nWhat are all the special magic numbers for " in many.question
    assert many.question.count(", ") == 3
    assert many.prefix.endswith("mentioned in the provided text are")


REPEATS = {"niah_single_1": 1, "niah_single_2": 1, "niah_single_3": 1, "niah_multikey_1": 1,
           "niah_multikey_2": 1, "niah_multikey_3": 1, "niah_multivalue": 1,
           "niah_multiquery": 1}  # fmt: skip
NUMBER = {"niah_multivalue": 4, "niah_multiquery": 4}


@pytest.mark.parametrize("name", REPEATS)
def test_an_answer_occurs_once(name):
    @settings(max_examples=8)
    @given(st.integers(0, 2**31))
    def once(seed):
        for sample in MADE[name](count, 900, 2, seed):
            assert len(sample.answers) == NUMBER.get(name, 1)
            for answer in sample.answers:
                assert sample.prompt.count(answer) == 1

    once()


def test_words_occur_as_often_as_they_should():
    for length, often, seldom in ((2048, 6, 1), (8192, 30, 3)):
        (sample,) = MADE["cwe"](count, length, 1, 7)
        listed = sample.context.rsplit("Memorize the ones", 1)[1].split("\n", 1)[1]
        found = re.findall(r"\d+\. (.*?)(?= \d+\. |$)", listed)
        counts = {word: found.count(word) for word in {*found}}
        assert len(sample.answers) == 10
        assert {counts.pop(word) for word in sample.answers} == {often}
        assert {*counts.values()} == {seldom}
    # In bytes 4096 hold no list of the longer shape.
    (sample,) = MADE["cwe"](lambda sample: len(sample.prompt), 4096, 1, 7)
    assert 3000 < len(sample.prompt) + sample.new_tokens <= 4096
    listed = sample.context.rsplit("Memorize the ones", 1)[1]
    assert {len(re.findall(rf"\. {word}\b", listed)) for word in sample.answers} == {6}
    (sample,) = MADE["fwe"](count, 4096, 1, 7)
    coded = sample.context.rsplit("coded words. ", 1)[1].split(" ")
    counts = sorted(((coded.count(w), w) for w in {*coded} - {"..."}), reverse=True)
    assert [word for _, word in counts[:3]] == [*sample.answers]
    assert counts[2][0] > counts[3][0]
    assert coded.count("...") > counts[0][0]


def test_every_variable_of_the_chain_is_an_answer():
    (sample,) = MADE["vt"](count, 2048, 1, 7)
    example, _, asked = sample.context.rpartition("Memorize and track")
    value = re.search(r"assigned the value (\d+) in", sample.question)[1]
    first, *rest = sample.answers
    assert f"VAR {first} = {value}\n" in asked
    for old, new in zip(sample.answers, rest, strict=False):
        assert asked.count(f"VAR {new} = VAR {old}") == 1
    assert sample.prefix.endswith(f"5 variables are assigned the value {value}, they are: ")
    assert value not in example
    assert not [name for name in sample.answers if name in example.split("they are:")[1]]
    assert "12345" not in sample.prompt


def test_the_documents_of_a_question_are_there(tasks):
    for name, needed in (("qa_1", 1), ("qa_2", 10)):
        samples = tasks[name](count, 1200, 3, 0)
        assert len(samples) == 3
        for sample in samples:
            texts = re.split(r"Document \d+:\n", sample.context)[1:]
            assert len(texts) >= needed
            assert len(texts) == len({*texts})
    squads = tasks["qa_1"](count, 3000, 99, 0)
    assert len(squads) == 40  # those without an answer are left out
    assert squads[7].answers == ("thing2", "Thing 2")
    assert "Word1 thing2 stands here 3." in squads[7].context


@pytest.mark.parametrize("name", [*MADE, *READ])
def test_lengths_are_never_exceeded(tasks, name):
    @settings(max_examples=10)
    @given(st.integers(400, 5000), st.integers(0, 1000))
    def fits(length, seed):
        try:
            samples = tasks[name](count, length, 2, seed)
        except ConfigError as error:
            assert length < 1200, error  # noqa: PT017
            return
        assert samples == tasks[name](count, length, 2, seed)
        for sample in samples:
            total = count(sample) + sample.new_tokens
            assert total <= length
            # Not much shorter: where it hides in text, RULER steps back by 500 words.
            assert total >= 0.8 * length - (700 if name in OWN_TEXT else 130) or name in READ
        assert samples[0] != samples[1]

    fits()


@pytest.mark.parametrize("name", [*MADE, *READ])
def test_too_short_a_length_is_refused(tasks, name):
    with pytest.raises(ConfigError, match="no sample of 60 tokens can be made"):
        tasks[name](count, 60, 1, 0)


def test_bytes_make_a_length_too(tasks):
    """A worked example of 500 tokens does not exist; RULER's script would try for ever."""
    (sample,) = MADE["vt"](lambda sample: len(sample.prompt), 4096, 1, 0)
    assert 3500 < len(sample.prompt) + sample.new_tokens <= 4096


def test_more_words_than_there_are():
    (sample,) = CommonWords(shape=Shape(2, 1))(count, 80_000, 1, 0)
    assert len(re.findall(r"\d+\.", sample.context)) > len(words.single_words())
    assert all("-" in answer for answer in sample.answers)


def test_compounds_are_the_sorted_products():
    found = words.compounds()
    listed = [found[i] for i in range(0, len(found), 997)]
    assert listed == sorted({*listed})
    near = [i for i, group in enumerate(found.groups) if len(group) > 1]
    assert [found.groups[i][0] for i in near] == ["blue", "high", "old", "teeny", "wide"]
    for i in near:
        first = found.ends[i - 1]
        whole = [found[j] for j in range(first - 50, found.ends[i] + 50)]
        assert whole == sorted({*whole})
    assert len(found) == 910 * 6782
    assert random.Random(0).choice(found) in listed or "-" in random.Random(0).choice(found)


def test_data_is_pinned():
    sums = {
        path.name.partition(".")[0]: hashlib.sha256(
            lzma.decompress(path.read_bytes())
        ).hexdigest()[:16]
        for path in words.DATA.glob("*.txt.xz")
    }
    assert sums == {
        "haystack": "20aece20eba4b6a4", "nouns": "8d88b3ebc2e2969e",
        "adjectives": "66814d46b7e292c8", "verbs": "9fbf5e4e69b8869a",
    }  # fmt: skip
    assert " ".join(words.haystack(30_000)).count(words.haystack(40)[0]) == 2
    assert {name for name in MADE if "niah" in name} - OWN_TEXT == {
        "niah_single_1", "niah_multikey_2", "niah_multikey_3",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("name", "text", "answers", "score"),
    [("all", " 12345 and FOO.", ("12345", "foo"), 1), ("all", "12345", ("12345", "foo"), 0.5),
     ("all", "a\x07b", ("a\nb",), 1), ("contains", "It is Paris", ("london", "paris"), 1),
     ("contains", "It is Rome", ("london", "paris"), 0), ("starts", "  482 and", ("482",), 1),
     ("starts", "no 482", ("482",), 0), ("exact", "The Eiffel Tower!", ("eiffel tower",), 1),
     ("exact", "an Eiffel", ("eiffel tower",), 0), ("f1", "", ("a b",), 0),
     ("f1", "the cat sat", ("cat sat down", "dog"), 2 * 2 / (2 + 3)), ("f1", "dog", ("cat",), 0),
     ("f1", "cat cat", ("cat",), 2 / 3)],
)  # fmt: skip
def test_scores(name, text, answers, score):
    assert scoring.SCORINGS[name](text, answers) == pytest.approx(score)


def test_scoring_by_task():
    assert {scoring_of(name) for name in MADE} == {"all"}
    assert {scoring_of(name) for name in READ} == {"contains"}
