"""LongBench's prompts of English question answering that it scores by F1 (Bai et al., 2024)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

SHORT = "Only give me the answer and do not output any other words."
BRIEF = "using a single phrase if possible. Do not provide any explanation."
UNKNOWN = (
    "using a single phrase or sentence if possible. If the question cannot be answered based on "
    'the information in the article, write "unanswerable". If the question is a yes/no question, '
    'answer "yes", "no", or "unanswerable". Do not provide any explanation.'
)
PASSAGES = f"Answer the question based on the given passages. {SHORT}"


@dataclass(frozen=True)
class Prompt:
    """Prompt of a data set.

    Attributes:
        before, after: texts before the context, and between it and the end of the prompt.
        new_tokens: tokens that are generated.
    """

    before: str
    after: str
    new_tokens: int


_PASSAGES = Prompt(
    f"{PASSAGES}\n\nThe following are given passages.\n",
    f"\n\n{PASSAGES}\n\nQuestion: {{input}}\nAnswer:",
    32,
)

# Words that run together and a space at the start of a line are LongBench's.
PROMPTS: Mapping[str, Prompt] = {
    "narrativeqa": Prompt(
        "You are given a story, which can be either a novel or a movie script, and a question. "
        f"Answer the question asconcisely as you can, {BRIEF}\n\nStory: ",
        f"\n\nNow, answer the question based on the story asconcisely as you can, {BRIEF}"
        "\n\nQuestion: {input}\n\nAnswer:",
        128,
    ),
    "qasper": Prompt(
        "You are given a scientific article and a question. Answer the question as concisely as "
        f"you can, {UNKNOWN}\n\nArticle: ",
        "\n\n Answer the question based on the above article as concisely as you can, "
        f"{UNKNOWN}\n\nQuestion: {{input}}\n\nAnswer:",
        128,
    ),
    "multifieldqa_en": Prompt(
        "Read the following text and answer briefly.\n\n",
        "\n\nNow, answer the following question based on the above text, only give me the answer "
        "and do not output any other words.\n\nQuestion: {input}\nAnswer:",
        64,
    ),
    "hotpotqa": _PASSAGES,
    "2wikimqa": _PASSAGES,
    "musique": _PASSAGES,
}

OTHERS = frozenset(
    ("multifieldqa_zh", "dureader", "gov_report", "qmsum", "multi_news", "vcsum", "trec",
     "triviaqa", "samsum", "lsht", "passage_count", "passage_retrieval_en",
     "passage_retrieval_zh", "lcc", "repobench-p")
)  # fmt: skip
"""Data sets that LongBench scores by other means, or of the first line alone."""
