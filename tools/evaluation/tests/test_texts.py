"""Tasks for models that were not trained on tasks: texts of four kinds, look-ups, copies."""

from __future__ import annotations

import re
from itertools import pairwise

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from topkv.errors import ConfigError
from topkv_cli.group import topkv
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.eval.tasks import TEXT_TOKENS, texts_task
from topkv_evaluation.loading import load_tokenizer
from topkv_evaluation.tasks import own, texts
from topkv_evaluation.tasks.prompts import Prompts
from topkv_evaluation.tasks.splits import REPORTING, TUNING


@given(
    tokens=st.integers(3, 20_000),
    length=st.integers(1, 400),
    behind=st.integers(1, 40),
    count=st.integers(1, 60),
)
def test_no_token_is_predicted_twice_and_splits_keep_to_their_part(tokens, length, behind, count):
    third, said = tokens // 3, []
    for split, (begin, end) in ((TUNING, (0, third)), (REPORTING, (third, tokens))):
        try:
            starts = texts.windows(tokens, length, behind, count, split)
        except ConfigError:
            room = end - begin - length - behind
            assert room < 0 or room // max(count - 1, 1) < behind
            continue
        assert len(starts) == count
        assert begin <= starts[0]
        assert starts[-1] + length + behind <= end
        said += [(start + length, start + length + behind) for start in starts]
    said.sort()
    assert all(this[1] <= after[0] for this, after in pairwise(said))


def test_a_kind_is_fetched_once_and_cut_into_windows(index, monkeypatch):
    pages = {f"page{n}.txt": f"{n}\tis\r\n" * 3000 for n in range(3)}
    wheel = index.add("pages", **pages, **{"other.bin": "no" * 100})
    source = texts.Source(wheel, ("pages/page*.txt",), most=9000)
    monkeypatch.setattr(texts, "KINDS", {"prose": (source,)})
    whole = texts.text_of("prose")
    assert whole == "\n".join("".join(f"{n}\nis\n" * 1500) for n in range(3))
    index.path("pages").unlink()
    assert texts.text_of("prose") == whole
    prompts = Prompts.of(load_tokenizer(CHECKPOINT))
    task = texts_task("prose", 100, 5, prompts, REPORTING)
    tokens = prompts.encode(whole)
    assert len(task.contexts) == len(task.questions) == 5
    for context, question in zip(task.contexts, task.questions, strict=True):
        follows = (*context, *question.tokens, *question.reference)
        assert len(question.reference) == TEXT_TOKENS
        assert bytes(follows) in bytes(tokens[len(tokens) // 3 :])


def test_other_files_of_a_package_are_another_folder(index, monkeypatch):
    wheel = index.add("pages", **{"a.txt": "one", "b.txt": "two"})
    for name, said in (("a", "one"), ("b", "two")):
        kinds = {"prose": (texts.Source(wheel, (f"pages/{name}.txt",)),)}
        monkeypatch.setattr(texts, "KINDS", kinds)
        assert texts.text_of("prose") == said


def test_a_kind_that_is_none_is_refused_by_name():
    done = CliRunner().invoke(topkv, ["eval", "--tasks", "texts:songs"])
    assert done.exit_code != 0
    assert "expected prose, code, tables, dialogue" in done.stderr


@pytest.fixture(scope="module")
def prompts():
    return Prompts.of(load_tokenizer(CHECKPOINT))


@pytest.mark.parametrize("word", ["four_digits", "lookup", "copy"])
@pytest.mark.parametrize("length", [1024, 4096])
def test_samples_fit_and_hold_their_answers(word, length, prompts):
    samples = own.OWN[word](prompts.count, length, 8, 3)
    assert len({sample.prompt for sample in samples}) == 8
    for sample in samples:
        assert prompts.count(sample) + sample.new_tokens <= length
        # RULER's text grows by 500 words, of which a token is a letter here.
        assert prompts.count(sample) >= (0.25 if word == "four_digits" else 0.6) * length
        for answer in sample.answers:
            assert answer in sample.context
    assert own.OWN[word](prompts.count, length, 8, 3) == samples
    assert own.OWN[word](prompts.count, length, 8, 4) != samples


@pytest.mark.parametrize("word", ["four_digits", "lookup"])
def test_a_number_of_four_digits_stands_in_the_context_once(word, prompts):
    for sample in own.OWN[word](prompts.count, 2048, 20, 1):
        (answer,) = sample.answers
        assert re.fullmatch(r"[1-9]\d{3}", answer)
        assert sample.context.count(answer) == 1
        assert answer not in sample.question + sample.prefix


def test_a_copy_goes_on_with_the_sentence_that_is_named(prompts):
    for sample in own.OWN["copy"](prompts.count, 4096, 20, 1):
        begin = sample.prefix.strip()
        assert f'"{begin}"' in sample.question
        rest = sample.context.partition(begin)[2].split()[: len(sample.answers)]
        assert tuple(word.replace(",", "").rstrip(".") for word in rest) == sample.answers
