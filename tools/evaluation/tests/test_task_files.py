"""Task files in three formats, and how samples become tokens."""

from __future__ import annotations

import hashlib
import json

import pytest
from transformers import AutoTokenizer

from topkv.errors import ConfigError
from topkv_evaluation import CHECKPOINT
from topkv_evaluation.tasks.files import read_file
from topkv_evaluation.tasks.longbench import PROMPTS
from topkv_evaluation.tasks.prompts import Prompts
from topkv_evaluation.tasks.sample import Sample

OWN = {"context": "c", "question": "q", "answer": "a"}
RULER = {"index": 0, "input": "text\nand more\nWhat?", "outputs": ["x", "y"], "length": 9}
LONGBENCH = {"input": "Who?", "context": "c", "answers": ["p", "q"], "length": 3,
             "dataset": "hotpotqa", "language": "en", "all_classes": None, "_id": "1"}  # fmt: skip


def written(tmp_path, *lines):
    path = tmp_path / "task.jsonl"
    texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
    path.write_text("\n".join(texts), encoding="utf-8")
    return path


@pytest.mark.parametrize(
    ("line", "scoring", "sample"),
    [(OWN, "starts", Sample("c", "q", "", ("a",), 0)),
     ({**OWN, "answer": ["a", "b"], "prefix": "is ", "new_tokens": 7}, "starts",
      Sample("c", "q", "is ", ("a", "b"), 7)),
     (RULER, "all", Sample("text\nand more", "\nWhat?", "", ("x", "y"), 128)),
     ({**RULER, "answer_prefix": " It is"}, "all",
      Sample("text\nand more", "\nWhat?", " It is", ("x", "y"), 128)),
     ({**LONGBENCH, "dataset": "mine"}, "f1", Sample("c", "\n\nWho?", "\n", ("p", "q"), 64))],
)  # fmt: skip
def test_formats(tmp_path, line, scoring, sample):
    assert read_file(written(tmp_path, line, line, line), 2) == ([sample] * 2, scoring)


@pytest.mark.parametrize(
    ("lines", "reported"),
    [(["{"], ["line 1 is no JSON"]), ([""], ["it is empty", "LongBench"]),
     (["[]", OWN], ["line 1: expected an object, got list"]),
     ([{"a": 1}], ["got a", "input, outputs (RULER)", "context, input, answers (LongBench)"]),
     ([OWN, {**OWN, "answer": 5}, {**OWN, "question": ""}],
      ["line 2: expected a text, or a list of texts, in 'answer'", "line 3: expected a text in"]),
     ([{**OWN, "answer": []}, {**OWN, "new_tokens": 0}], ["line 1", "line 2: new_tokens"]),
     ([{**LONGBENCH, "dataset": "lcc"}], ["line 1: LongBench does not score lcc", "musique"]),
     ([{**RULER, "input": "no line"}], ["line 1: expected the question in a last line"]),
     ([OWN, RULER], ["line 2: expected a text in 'context'", "line 2: expected a text, or a"])],
)  # fmt: skip
def test_wrong_files_get_every_reason(tmp_path, lines, reported):
    path = written(tmp_path, *lines)
    with pytest.raises(ConfigError) as caught:
        read_file(path, 9)
    assert str(path) in str(caught.value)
    for words in reported:
        assert words in str(caught.value)


THEIRS = {
    "narrativeqa": "3fc427a7091acc9d",
    "qasper": "137fd717ffbd35fe",
    "multifieldqa_en": "a334b6ba679d3711",
    "hotpotqa": "2fd5a1e87037e43f",
    "2wikimqa": "2fd5a1e87037e43f",
    "musique": "2fd5a1e87037e43f",
}
"""SHA-256 of LongBench's prompts and numbers of tokens (THUDM/LongBench at 2e00731)."""


@pytest.mark.parametrize("name", PROMPTS)
def test_longbench_is_asked_as_longbench_asks(tmp_path, name):
    line = {**LONGBENCH, "dataset": name, "context": "{context}", "input": "{input}"}
    (sample,), _ = read_file(written(tmp_path, line), 1)
    digest = hashlib.sha256(f"{sample.prompt} {sample.new_tokens}".encode()).hexdigest()[:16]
    assert digest == THEIRS[name]
    assert sample.context.endswith("{context}")


def test_files_that_cannot_be_read(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        read_file(tmp_path / "absent", 9)


TEMPLATE = (
    "<s>{% for m in messages %}[{{ m.role }}]{{ m.content }}[end]{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}"
)


def test_prompts_with_and_without_a_chat_template():
    tokenizer = AutoTokenizer.from_pretrained(CHECKPOINT)
    sample = Sample("Read this: q? yes.", "\nq?", " It is", ("a",), 3)
    plain = Prompts.of(tokenizer)
    assert not plain.chat
    context, question = plain.tokens(sample)
    assert bytes(context + question).decode() == sample.prompt
    assert plain.count(sample) == len(sample.prompt)
    tokenizer.chat_template = TEMPLATE
    assert not Prompts.of(tokenizer, chat=False).chat
    chat = Prompts.of(tokenizer)
    context, question = (bytes(part).decode() for part in chat.tokens(sample))
    assert (context, question) == (
        "<s>[user]Read this: q? yes.\n", "q?[end][assistant] It is",
    )  # fmt: skip
    assert chat.count(sample) == len(context + question)
    tokenizer.chat_template = "{{ messages[0].content | upper }}"
    with pytest.raises(ConfigError, match="chat template"):
        chat.tokens(sample)
