"""Rules of requests, rows and hooks on SGLang broken on purpose: the test beside each must
fail."""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from plugins.sglang.tests import test_decoding as decoding
from plugins.sglang.tests import test_drafts as drafts
from plugins.sglang.tests import test_lives as lives
from plugins.sglang.tests import test_prefix as prefix
from plugins.sglang.tests import test_requests as tests
from tools.engines.tests.test_mutants import failure_of, rewritten
from topkv_sglang.requests import ScheduledRequests, Step
from topkv_sglang.rows import Rows

ALONE = {
    "a row that was given back keeps its slot": (
        *(ScheduledRequests.schedule, "self.release()", "pass"),
        tests.test_a_row_that_was_given_back_ends_before_its_pages_are_used_again,
    ),
    "a request that has ended keeps its number of pages": (
        *(ScheduledRequests.release, "self.pages.pop(row, None)", "pass"),
        tests.test_a_row_that_was_given_back_ends_before_its_pages_are_used_again,
    ),
    "pages that were replaced are held on": (
        *(ScheduledRequests.schedule, "self._replace()", "pass"),
        tests.test_pages_are_replaced_before_others_get_them,
    ),
    "nobody ends": (
        *(ScheduledRequests.release, "in self.rows.ended", "in []"),
        tests.test_a_row_that_was_given_back_ends_before_its_pages_are_used_again,
    ),
    "pages of a row that ended are replaced": (
        *(Rows.note_ended, "self.replaced.pop(row, None)", "pass"),
        tests.test_pages_of_a_row_that_ended_are_not_replaced,
    ),
    "the newest token of a step is computed": (
        *(Step.of, "length - 1 for", "length for"),
        tests.test_steps_are_read_off_batches,
    ),
    "drafts are one row": (
        *(Step.of, "[drafts] * len(rows)", "[1] * len(rows)"),
        tests.test_steps_are_read_off_batches,
    ),
}
"""Rules that need no SGLang: function, change and test."""


@pytest.mark.parametrize("name", ALONE)
def test_a_mutant_is_caught(name, monkeypatch):
    function, old, new, test = ALONE[name]
    function = getattr(function, "__func__", function)
    monkeypatch.setattr(function, "__code__", rewritten_code(function, old, new))
    arguments = [tests.Engine()] if "engine" in test.__code__.co_varnames[:1] else []
    assert failure_of(test, *arguments), f"{name}: it survived"


def test_a_mutant_that_goes_on_for_another_request_is_caught(monkeypatch):
    old = "self._generations[row] != generation"
    monkeypatch.setattr(
        ScheduledRequests, "_take", rewritten(ScheduledRequests._take, old, "False")
    )
    with pytest.raises(pytest.fail.Exception):
        tests.test_a_row_that_was_given_on_without_a_word_is_an_error(tests.Engine())


def rewritten_code(function, old, new):
    """Code of a function with one change; SGLang holds the function itself."""
    made = rewritten(function, old, new)
    return getattr(made, "__func__", made).__code__


WITHIN = {
    "nobody hears that pages were replaced": (
        *("place_hooks", "checkpoint_into_tree", "rows.note_replaced(row, first, before)", "pass"),
        prefix.test_pages_are_replaced_by_equal_ones,
    ),
    "requests stay until the next forward": (
        *("hooks", "on_idle", "session.requests.release()", "pass"),
        decoding.test_equal_prompts_and_several_samples,
    ),
    "the pool has the page of padding too": (
        *("geometry", "pool_tokens", "lowered.num_pages - 1", "lowered.num_pages"),
        lives.test_retracted_requests_go_on,
    ),
    "drafts have places of others": (
        *("drafts", "give_places", "given.to(torch.int32)", "given.to(torch.int32) * 0"),
        drafts.test_prefixes_are_found_behind_drafts,
    ),
    "places of drafts are given again": (
        *("drafts", "give_places", "max(request.kv.kv_allocated_len, tokens)"),
        *("request.kv.kv_allocated_len", drafts.test_prefixes_are_found_behind_drafts),
    ),
}
"""Rules of hooks: module, function, change and test."""


@pytest.fixture
def named(inside):
    """Fixtures of tests by their names, with engines that no other test gets."""

    def served(settings=None, **more):
        return inside(settings or {}, **more)

    def cached(**more):
        return served(disable_overlap_schedule=False, **more)

    def get(name):
        if name == "tight":
            return served({"max_tokens": lives.TIGHT}, schedule_conservativeness=0.01)
        if name == "drafting":
            return served({"max_tokens": 640}, **drafts.NGRAM)
        return {"served": served, "cached": cached}[name]

    return get


@pytest.mark.skipif(torch.cuda.is_available(), reason="rules of the host")
@pytest.mark.parametrize("name", WITHIN)
def test_a_mutant_of_hooks_is_caught(name, named, stock, prompt, monkeypatch):
    module, function, old, new, test = WITHIN[name]
    function = getattr(import_module(f"topkv_sglang.{module}"), function)
    monkeypatch.setattr(function, "__code__", rewritten_code(function, old, new))
    first = test.__code__.co_varnames[0]
    assert failure_of(test, named(first), stock, prompt), f"{name}: it survived"
