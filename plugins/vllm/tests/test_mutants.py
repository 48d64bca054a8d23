"""Rules of layers and steps of vLLM broken on purpose: the test beside each must fail."""

from __future__ import annotations

import inspect
from importlib import import_module

import pytest

from plugins.vllm.tests import test_groups
from plugins.vllm.tests import test_padding as tests
from plugins.vllm.tests.test_groups import config as config  # fixtures
from plugins.vllm.tests.test_groups import manager as manager
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


BESIDE = {
    "vLLM merges topkv's layers with a drafter's": (
        *("spec", "TopkvSpec.beside", 'alike["dcp_sharded"] = False', "pass"),
        *("test_a_draft_model_has_the_first_group", ("config",)),
    ),
    "all of topkv's layers are shown": (
        *("mixture", "Mixture.specs", "self.names[: min(Counter(others.values()).values())]"),
        *("self.names", "test_a_drafter_has_a_group_of_its_own", ("config", 2)),
    ),
    "a block has the bytes of the smallest": (
        *("mixture", "Mixture.specs", "like = max(", "like = min("),
        *("test_a_page_beside_blocks_of_several_sizes", ("config",)),
    ),
    "a draft model is planned as it is loaded": (
        *("mixture", "Mixture.specs", "dict(reversed(others.items()))", "others"),
        *("test_a_draft_model_has_the_first_group", ("config",)),
    ),
    "topkv's layers are planned before a draft model": (
        *("mixture", "Mixture.specs", "drafts is not None and drafts.uses_draft_model()", "False"),
        *("test_a_draft_model_has_the_first_group", ("config",)),
    ),
    "pages take memory of the device": (
        *("mixture", "Mixture.memory", "if not isinstance(spec, TopkvSpec)", "if True"),
        *("test_memory_is_what_requests_need_whatever_the_pages", ("config",)),
    ),
    "each request appends a whole step": (
        *("mixture", "Mixture._blocks", "(cdiv(kept, size) + 2) + appended"),
        *("(cdiv(kept, size) + 2 + appended)",),
        *("test_memory_is_what_requests_need_whatever_the_pages", ("config",)),
    ),
    "a drafter has blocks of tokens that no page has": (
        *("mixture", "Mixture._blocks", "min(most, self.pages)", "most"),
        *("test_memory_is_what_requests_need_whatever_the_pages", ("config",)),
    ),
    "stated memory is not heeded": (
        *("mixture", "Mixture.memory", "if stated := ", "if not (stated := 1) and "),
        *("test_memory_is_what_requests_need_whatever_the_pages", ("config",)),
    ),
    "layers that were not shown stay out of their group": (
        *("mixture", "Mixture.join", "[*self.names]", "self.names[:1]"),
        *("test_windows_are_grouped_as_they_would_be_alone", ("config",)),
    ),
    "a window is topkv's": (
        *("backend", "chosen", "if attn_selector_config.has_sliding_window", "if False"),
        *("test_layers_get_the_backend_that_they_ask_for", ("needs_vllm",)),
    ),
    "a drafter is topkv's": (
        *("backend", "chosen", "if asked is not AttentionBackendEnum.CUSTOM", "if False"),
        *("test_layers_get_the_backend_that_they_ask_for", ("needs_vllm",)),
    ),
    "the backend stays when layers are made": (
        *("backend", "chosen", "del current_platform.get_attn_backend_cls", "pass"),
        *("test_layers_get_the_backend_that_they_ask_for", ("needs_vllm",)),
    ),
}
"""Rules of layers that vLLM keeps beside topkv's, as above; a fixture by its name."""


@pytest.mark.parametrize("name", BESIDE)
def test_a_mutant_of_several_kinds_of_layers_is_caught(name, needs_vllm, request, monkeypatch):
    module, path, old, new, test, arguments = BESIDE[name]
    given = [
        request.getfixturevalue(each) if isinstance(each, str) else each for each in arguments
    ]
    held = import_module(f"topkv_vllm.{module}")
    owner, _, method = path.rpartition(".")
    held = getattr(held, owner) if owner else held
    function = inspect.unwrap(getattr(held, method))
    monkeypatch.setattr(held, method, rewritten(function, old, new))
    assert failure_of(getattr(test_groups, test), *given), f"{name}: it survived"


def test_a_mutant_that_takes_blocks_of_any_size_for_pages_is_caught(config, monkeypatch):
    from topkv_vllm.mixture import Mixture

    mutant = rewritten(Mixture.specs, "blocks != {page}", "False")
    monkeypatch.setattr(Mixture, "specs", mutant)
    with pytest.raises(pytest.fail.Exception):
        test_groups.test_blocks_that_are_no_pages_are_refused(config)


PAGES = {
    "pages count as blocks": lambda stock: stock.get_num_blocks_to_allocate,
    "more pages than there are can be had": lambda stock: lambda *_, **__: 0,
}
"""Rules of the manager of pages: what stands in the place of how many blocks a request needs."""


@pytest.mark.parametrize("name", PAGES)
def test_a_mutant_of_pages_is_caught(name, manager, monkeypatch):
    from vllm.v1.core.single_type_kv_cache_manager import FullAttentionManager

    mutant = PAGES[name](FullAttentionManager)
    monkeypatch.setattr(type(manager), "get_num_blocks_to_allocate", mutant)
    assert failure_of(test_groups.test_a_request_takes_pages_and_no_blocks, manager)


def test_a_mutant_that_has_pages_zeroed_is_caught(manager, monkeypatch):
    monkeypatch.setattr(manager, "_record_new_block_ids", True)
    assert failure_of(test_groups.test_a_request_takes_pages_and_no_blocks, manager)


def test_a_mutant_that_reads_the_blocks_of_the_first_group_is_caught(monkeypatch):
    mutant = rewritten(ScheduledRequests.schedule, "new.block_ids[self.group]", "new.block_ids[0]")
    monkeypatch.setattr(ScheduledRequests, "schedule", mutant)
    assert failure_of(test_groups.test_requests_have_the_pages_of_their_group)
