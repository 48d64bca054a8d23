"""Questions from files of one JSON object a line: one's own, RULER's and LongBench's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from topkv.errors import ConfigError
from topkv_evaluation.tasks.longbench import OTHERS, PROMPTS
from topkv_evaluation.tasks.sample import Sample

AS_ANSWER = 0
"""Value of ``Sample.new_tokens``: as many as the longest right answer has, and a few more."""


@dataclass(frozen=True)
class Format:
    """Format of a file: the fields of a line, and the function that makes a sample of them.

    Attributes:
        texts: fields with a text, none of them empty.
        answers: field with the right answers, a text or a list of texts.
        scoring: scoring of its answers unless the user chooses another.
        sample: makes a sample of a line whose fields are right, with its answers.
    """

    texts: tuple[str, ...]
    answers: tuple[str, ...]
    scoring: str
    sample: Callable[[Mapping[str, Any], tuple[str, ...]], Sample]

    @property
    def fields(self) -> str:
        return ", ".join([*self.texts, " or ".join(self.answers)])


def _own(line: Mapping[str, Any], answers: tuple[str, ...]) -> Sample:
    new_tokens = line.get("new_tokens", AS_ANSWER)
    return Sample(line["context"], line["question"], line.get("prefix", ""), answers, new_tokens)


def _ruler(line: Mapping[str, Any], answers: tuple[str, ...]) -> Sample:
    # All of RULER's templates end in a line with the question.
    context, end, question = line["input"].rstrip().rpartition("\n")
    return Sample(context, end + question, line.get("answer_prefix", ""), answers, 128)


def _longbench(line: Mapping[str, Any], answers: tuple[str, ...]) -> Sample:
    asked = PROMPTS.get(str(line.get("dataset")))
    if asked is None:
        return Sample(line["context"], "\n\n" + line["input"], "\n", answers, 64)
    question = asked.after.replace("{input}", line["input"])
    return Sample(asked.before + line["context"], question, "", answers, asked.new_tokens)


FORMATS = {
    "topkv": Format(("context", "question"), ("answer", "answers"), "starts", _own),
    "RULER": Format(("input",), ("outputs",), "all", _ruler),
    "LongBench": Format(("context", "input"), ("answers",), "f1", _longbench),
}
"""Formats by name; a file has the format whose fields its first line has."""


def read_file(path: Path, most: int) -> tuple[list[Sample], str]:
    """Read the first questions of a file, and the name of the scoring of its format.

    Args:
        path: file with lines of JSON objects, all of one format.
        most: most questions.

    Raises:
        ConfigError: it cannot be read, or a line is not of its format; with every reason.
    """
    what = f"the task {path} is refused"
    try:
        lines = [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(what, [f"it cannot be read: {error}"]) from error
    if not lines:
        raise ConfigError(what, [f"it is empty; {_expected()}"])
    reasons: list[str] = []
    items = [_object(line, number, reasons) for number, line in enumerate(lines[:most], start=1)]
    known = next((item for item in items if item), None)
    form = None if known is None else _format_of(known)
    if known is not None and form is None:
        reasons.append(f"{_expected()}; got {', '.join(known)}")
    samples = []
    if form is not None:
        for number, item in enumerate(items, start=1):
            if item is not None and not (wrong := _wrong(item, form, number)):
                samples.append(form.sample(item, _answers(item, form)))
            elif item is not None:
                reasons += wrong
    if reasons or form is None:
        raise ConfigError(what, reasons)
    return samples, form.scoring


def _expected() -> str:
    shown = "; ".join(f"{form.fields} ({name})" for name, form in FORMATS.items())
    return f"expected one JSON object a line with the fields {shown}"


def _object(line: str, number: int, reasons: list[str]) -> Mapping[str, Any] | None:
    try:
        item = json.loads(line)
    except ValueError as error:
        reasons.append(f"line {number} is no JSON: {error}")
        return None
    if not isinstance(item, dict):
        reasons.append(f"line {number}: expected an object, got {type(item).__name__}")
        return None
    return item


def _format_of(item: Mapping[str, Any]) -> Format | None:
    # LongBench has RULER's field too, so the longest match counts.
    fitting = [form for form in FORMATS.values() if {*form.texts} <= item.keys()]
    fitting = [form for form in fitting if {*form.answers} & item.keys()]
    return max(fitting, key=lambda form: len(form.texts), default=None)


def _answers(item: Mapping[str, Any], form: Format) -> tuple[str, ...]:
    found = next(item[name] for name in form.answers if name in item)
    return (found,) if isinstance(found, str) else tuple(found)


def _wrong(item: Mapping[str, Any], form: Format, number: int) -> list[str]:
    lacking = [name for name in form.texts if not (isinstance(item.get(name), str) and item[name])]
    reasons = [f"line {number}: expected a text in {name!r}" for name in lacking]
    found = [item[name] for name in form.answers if name in item]
    texts = found[0] if found and isinstance(found[0], list) else found
    if not texts or not all(isinstance(text, str) and text.strip() for text in texts):
        names = " or ".join(map(repr, form.answers))
        reasons.append(f"line {number}: expected a text, or a list of texts, in {names}")
    new_tokens = item.get("new_tokens", 1)
    if form.sample is _own and (type(new_tokens) is not int or new_tokens < 1):
        reasons.append(f"line {number}: new_tokens must be an integer of 1 or more")
    if form.sample is _ruler and not lacking and "\n" not in item["input"].strip():
        reasons.append(f"line {number}: expected the question in a last line of 'input'")
    if form.sample is _longbench and str(item.get("dataset")) in OTHERS:
        known = ", ".join(PROMPTS)
        reasons.append(
            f"line {number}: LongBench does not score {item['dataset']} by F1 of the answer; "
            f"expected one of {known}, or no 'dataset'"
        )
    return reasons
