"""RULER's thirteen tasks by name, with its parameters (``scripts/synthetic.yaml``)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from topkv_evaluation.tasks.common_words import CommonWords
from topkv_evaluation.tasks.frequent_words import FrequentWords
from topkv_evaluation.tasks.needles import Needles
from topkv_evaluation.tasks.sample import Count, Sample
from topkv_evaluation.tasks.tracking import Chain

SEED = 42
"""RULER's seed; seeds of a run count on from it."""

Generator = Callable[[Count, int, int, int], list[Sample]]
"""Called with a count of tokens, the length, how many samples, and the seed."""

MADE: Mapping[str, Generator] = {
    "niah_single_1": Needles("noise"),
    "niah_single_2": Needles("text"),
    "niah_single_3": Needles("text", value="uuids"),
    "niah_multikey_1": Needles("text", keys=4),
    "niah_multikey_2": Needles("needles"),
    "niah_multikey_3": Needles("needles", key="uuids", value="uuids"),
    "niah_multivalue": Needles("text", values=4),
    "niah_multiquery": Needles("text", queries=4),
    "vt": Chain(),
    "cwe": CommonWords(),
    "fwe": FrequentWords(),
}
"""Generators of the eleven tasks that need no data set."""

READ = ("qa_1", "qa_2")
"""Tasks that read SQuAD and HotpotQA."""


def scoring_of(name: str) -> str:
    """Return the name of a task's scoring, see ``scoring.SCORINGS``."""
    return "contains" if name in READ else "all"
