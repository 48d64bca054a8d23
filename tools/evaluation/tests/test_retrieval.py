"""The text with planted facts: promises of a prompt, for any size and seed."""

from __future__ import annotations

import hashlib
import sys

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from topkv_evaluation import retrieval
from topkv_evaluation.retrieval import make_prompt, pinned_text, standard_library_text

LINES = np.frombuffer(b"some text of a line\n" * 4000, dtype=np.uint8)
ONE_LINE = np.frombuffer(b"x" * 80000, dtype=np.uint8)


@settings(deadline=None, max_examples=60)
@given(
    tokens=st.integers(1500, 40000),
    facts=st.integers(1, 24),
    seed=st.integers(0, 2**31),
    depth=st.none() | st.floats(0, 1),
    text=st.sampled_from([LINES, ONE_LINE]),
)
def test_prompt_holds_what_it_says(
    tokens: int, facts: int, seed: int, depth: float | None, text: np.ndarray
) -> None:
    document = make_prompt(tokens, facts, seed, depth=depth, sinks=128, text=text)
    written = document.text
    assert len(document.tokens) == len(written) == tokens
    assert document.tokens.dtype == np.uint8
    assert written.endswith(f"\n# ask: key {document.asked.key} is ")
    assert len({fact.key for fact in document.facts}) == facts == written.count("# fact: ")
    for fact in document.facts:
        statement = f"\n# fact: key {fact.key} is {fact.value}.\n"
        assert written[fact.position : fact.position + len(statement)] == statement
        assert written[fact.value_position :][:5] == fact.value
        assert fact.position >= 128
        assert fact.position + len(statement) <= tokens - tokens // 3
    assert document.asked in document.facts
    assert document.expected == document.asked.value
    assert document.distance > tokens // 3
    rest = written[: -retrieval.ASK_BYTES]
    for fact in document.facts:
        rest = rest.replace(retrieval.FACT.format(key=fact.key, value=fact.value), "", 1)
    assert rest in text.tobytes().decode()


def test_same_seed_same_prompt_and_other_seed_another() -> None:
    first, again, other = (make_prompt(4096, 8, seed).text for seed in (3, 3, 4))
    assert first == again
    assert first != other


def test_facts_lie_between_lines_where_lines_are_enough() -> None:
    document = make_prompt(8192, 20, seed=1)
    assert all(document.tokens[fact.position - 1] == ord("\n") for fact in document.facts)


@pytest.mark.parametrize(("depth", "index"), [(0.0, 0), (0.5, 5), (1.0, 10)])
def test_depth_chooses_the_fact(depth: float, index: int) -> None:
    document = make_prompt(8192, 11, seed=2, depth=depth)
    assert document.asked == document.facts[index]


def test_standard_library_text_is_plain_code_in_two_parts() -> None:
    whole, train, held_out = map(standard_library_text, ("all", "train", "held_out"))
    assert len(whole) == len(train) + len(held_out)
    assert 200_000 < len(held_out) < len(train) / 8
    assert whole.max() < 128
    assert not whole.flags.writeable
    assert b"import " in held_out.tobytes()
    assert b"# fact: key" not in whole.tobytes()


def test_the_pinned_text_is_that_of_one_python() -> None:
    text = pinned_text()
    assert hashlib.sha256(text.tobytes()).hexdigest()[:16] == "ab9ae15b8511dd8e"
    assert not text.flags.writeable
    if sys.version_info[:3] == (3, 11, 7):
        assert np.array_equal(text, standard_library_text("held_out"))
    # Prompts are of this text, whatever Python makes them.
    assert hashlib.sha256(make_prompt(4096, seed=1).tokens).hexdigest()[:16] == "d1ca9bc8ed5fd35f"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"tokens": 8192, "facts": 0}, "at least 1 fact, got 0"),
        ({"tokens": 600, "facts": 20}, "600 tokens cannot hold 20 facts"),
        ({"tokens": 8192, "depth": 1.5}, "between 0 and 1, got 1.5"),
        ({"tokens": 8192, "sinks": -1}, "at least 0"),
        ({"tokens": 8192, "recent": 4}, "recent at least 20"),
        ({"tokens": 100_000, "text": LINES}, "the text has 80000"),
        ({"tokens": 8192, "text": np.full(9000, 200, np.uint8)}, "must be ASCII"),
    ],
)
def test_wrong_arguments_are_refused(arguments: dict, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make_prompt(**arguments)


def test_unknown_part_is_refused() -> None:
    with pytest.raises(ValueError, match="got 'test'"):
        standard_library_text("test")


def test_exact_match_looks_at_the_digits_alone() -> None:
    assert retrieval.exact_match("48213.\n\n    def", "48213")
    assert not retrieval.exact_match("4821", "48213")
    assert not retrieval.exact_match(" 48213", "48213")
