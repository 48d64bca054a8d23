"""Rules of layers and steps of vLLM broken on purpose: the test beside each must fail."""

from __future__ import annotations

from importlib import import_module

import pytest

from plugins.vllm.tests import test_padding as tests
from tools.engines.tests.test_mutants import failure_of, rewritten
from topkv_vllm.requests import ScheduledRequests


def test_a_mutant_that_forgets_what_was_generated_before_a_preemption_is_caught(monkeypatch):
    old, new = 'getattr(new, "prefill_token_ids", None)', "None"
    mutant = rewritten(ScheduledRequests.schedule, old, new)
    monkeypatch.setattr(ScheduledRequests, "schedule", mutant)
    assert failure_of(tests.test_what_a_request_had_when_it_was_preempted_is_prompt)


WITHIN = {
    "tokens behind the rows are undefined": (
        *("backend", "TopkvImpl.forward", "output[rows:].zero_()", "pass"),
        *("test_a_layer_leaves_nothing_undefined_behind_the_rows", ()),
    ),
    "padding attends": (
        *("backend", "TopkvImpl.forward", "query[:rows], key[:rows]", "query, key"),
        *("test_a_layer_leaves_nothing_undefined_behind_the_rows", ()),
    ),
    "a step with a prompt of one token is replayed": (
        *("gpu_worker", "_guard", "None if session.prompts() else ", ""),
        *("test_a_step_with_a_prompt_of_one_token_is_not_replayed", ("prompt", "monkeypatch")),
    ),
}
"""Rules in modules that need vLLM: module, function, change, test and its other fixtures."""


@pytest.mark.parametrize("name", WITHIN)
def test_a_mutant_beside_vllm_is_caught(name, served, request, monkeypatch):
    module, path, old, new, test, fixtures = WITHIN[name]
    held = import_module(f"topkv_vllm.{module}")
    owner, _, method = path.rpartition(".")
    held = getattr(held, owner) if owner else held
    monkeypatch.setattr(held, method, rewritten(getattr(held, method), old, new))
    named = [request.getfixturevalue(each) for each in fixtures]
    assert failure_of(getattr(tests, test), served, *named), f"{name}: it survived"
