"""Layers of topkv among vLLM's groups, and pages among its blocks, without an engine."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from plugins.vllm.tests.test_refusals import configured
from tools.engines.tests.steps import CHUNK, lowered
from topkv import SparseCoordinator
from topkv.errors import CapabilityError
from topkv_vllm.requests import ScheduledRequests

PAGES, PAGE, WINDOW, LONGEST, REQUESTS = 100, 32, 64, 512, 4
STEP = 96
"""Tokens that requests append in a step."""


@pytest.fixture
def config(needs_vllm, model):
    """vLLM's configuration, with a layout of memory as its engine decides it."""
    limits = {"max_model_len": LONGEST, "max_num_seqs": REQUESTS, "max_num_batched_tokens": STEP}
    found = configured(model, block_size=PAGE, async_scheduling=False, **limits)
    found.cache_config.kv_cache_memory_bytes = None
    found.cache_config.kv_cache_layout = "LBHNC"
    return found


def layers(kind, numbers, heads=2, prefix="model", **more):
    """Specs of layers, as vLLM has them."""
    spec = kind(block_size=PAGE, num_kv_heads=heads, head_size=64, dtype=torch.float32, **more)
    return {f"{prefix}.layers.{number}.attn": spec for number in numbers}


def full(numbers, **more):
    from vllm.v1.kv_cache_interface import FullAttentionSpec

    return layers(FullAttentionSpec, numbers, **more)


def windows(numbers):
    from vllm.v1.kv_cache_interface import SlidingWindowSpec

    return layers(SlidingWindowSpec, numbers, sliding_window=WINDOW)


def mixture(config, own, pages=PAGES):
    from topkv_vllm.mixture import Mixture

    return Mixture(config, SimpleNamespace(num_pages=pages, page_tokens=PAGE), [*own])


def planned(config, specs):
    """Plan as vLLM's engine does."""
    from topkv_vllm.mixture import plan

    return plan(config, specs, 2**30)


def kinds(found):
    return [(type(g.kv_cache_spec).__name__, len(g.layer_names)) for g in found.kv_cache_groups]


def placed(config, own, others):
    """Plan a mixture, with all of topkv's layers in their group."""
    made = mixture(config, own)
    found = planned(config, made.specs({**own, **others}))
    group = made.join(found)
    assert found.kv_cache_groups[group].layer_names == [*own]
    for each in found.kv_cache_groups:
        assert each.kv_cache_spec.block_size % PAGE == 0
    assert found.kv_cache_groups[group].kv_cache_spec.block_size == PAGE
    return found


def test_windows_are_grouped_as_they_would_be_alone(config):
    """Topkv's layers are one group, however many they are, and take no memory."""
    for few, many in ((2, 10), (10, 2), (3, 3)):
        found = placed(config, full(range(few)), windows(range(few, few + many)))
        group = min(few, many)
        kept = [("SlidingWindowSpec", group)] * (many // group)
        assert kinds(found) == [("TopkvSpec", few), *kept]
        tensor = found.kv_cache_tensors[0]
        assert tensor.size // found.num_blocks == group * PAGE * 2 * 2 * 64 * 4


@pytest.mark.parametrize("heads", [1, 2, 4])
def test_a_drafter_has_a_group_of_its_own(config, heads):
    """A page has as many tokens whatever the heads of the drafter, and is no block of it."""
    own, drafter = full(range(36)), full([36], heads=heads)
    found = placed(config, own, drafter)
    assert kinds(found) == [("TopkvSpec", 36), ("FullAttentionSpec", 1)]
    assert found.kv_cache_tensors[0].size // found.num_blocks == heads * PAGE * 2 * 64 * 4


def test_a_page_beside_blocks_of_several_sizes(config):
    """vLLM gives a block of fewer bytes more tokens, and a page none."""
    drafter = full(range(2), heads=1, prefix="draft_model.model")
    found = placed(config, full([1, 3]), {**windows([0, 2, 4, 6]), **drafter})
    tokens = {group.kv_cache_spec.block_size for group in found.kv_cache_groups}
    assert tokens == {PAGE, 2 * PAGE}


def test_a_draft_model_has_the_first_group(config):
    """Model runner V1 lets it draft with the blocks of that, also where a target has windows."""
    drafts = SimpleNamespace(uses_draft_model=lambda: True)
    drafter = full(range(2), prefix="draft_model.model")
    own, others = full([1, 3]), {**windows([0, 2]), **drafter}
    made = mixture(SimpleNamespace(speculative_config=drafts), own)
    found = planned(config, made.specs({**own, **others}))
    assert {*found.kv_cache_groups[0].layer_names} == {*drafter}


def test_memory_is_what_requests_need_whatever_the_pages(config):
    """A window and a block of each request, one more where it begins within a block, and what all
    append in a step; of a drafter all tokens, and no more than have a page."""
    window = REQUESTS * (2 + 2) + STEP // PAGE
    tokens = REQUESTS * (LONGEST // PAGE + 1)
    own, drafter = full([2, 5]), full([6])
    for others, pages, blocks in (
        (windows([0, 1, 3, 4]), 100, 2 * window),
        (windows([0, 1, 3, 4]), 10**6, 2 * window),
        (drafter, 10**6, tokens),
        (drafter, 20, 20),
    ):
        made = mixture(config, own, pages)
        specs = made.specs({**own, **others})
        found = planned(config, specs)
        block = found.kv_cache_tensors[0].size // found.num_blocks
        assert made.memory(specs) == (1 + blocks) * block
    config.cache_config.kv_cache_memory_bytes = 2**20
    assert made.memory(specs) == 2**20


def test_blocks_that_are_no_pages_are_refused(config):
    own = full([1])
    others = {name: replace(spec, block_size=48) for name, spec in windows([0]).items()}
    with pytest.raises(CapabilityError, match=r"blocks of others have \[48\] tokens"):
        mixture(config, own).specs({**own, **others})


@pytest.fixture
def manager(needs_vllm):
    """The manager of 5 pages, beside a pool of 50 blocks."""
    from vllm.v1.core.block_pool import BlockPool

    from topkv_vllm.spec import TopkvManager, TopkvSpec

    (other,) = full([0]).values()
    return TopkvManager(
        TopkvSpec.beside(other, 5),
        block_pool=BlockPool(50, True, PAGE, enable_kv_cache_events=True),
        enable_caching=True,
        kv_cache_group_id=0,
        scheduler_block_size=PAGE,
        needs_kv_cache_zeroing=True,
    )


def asked(manager, tokens):
    return manager.get_num_blocks_to_allocate("one", tokens, [], 0, 0, tokens)


def test_a_request_takes_pages_and_no_blocks(manager):
    """Where there are not enough, it wants more blocks than there are."""
    device = manager._device
    assert asked(manager, 4 * PAGE) == 0
    assert asked(manager, 4 * PAGE + 1) > device.num_gpu_blocks - 1
    blocks = manager.allocate_new_blocks("one", 3 * PAGE, 3 * PAGE)
    assert [block.block_id for block in blocks] == [1, 2, 3]
    assert asked(manager, 4 * PAGE) == 0
    assert manager.take_new_block_ids() == [], "nothing is zeroed"
    assert device.get_num_free_blocks() == 49
    assert manager.block_pool.get_num_free_blocks() == 1
    manager.free("one")
    assert manager.block_pool.get_num_free_blocks() == 4


def test_events_of_pages_are_among_those_of_blocks(manager):
    """A router that reads them learns what is found, and that it is in host memory."""
    manager.block_pool.reset_prefix_cache()
    (event,) = manager._device.take_events()
    assert type(event).__name__ == "AllBlocksCleared"
    assert manager.block_pool.medium == "CPU"


def test_requests_have_the_pages_of_their_group():
    """Other groups may have new blocks in a step, or none."""
    coordinator = SparseCoordinator(lowered())
    requests = ScheduledRequests(coordinator, group=1)
    cached = SimpleNamespace(
        req_ids=[], resumed_req_ids=[], new_block_ids=[], num_computed_tokens=[]
    )
    cached.num_output_tokens = []
    new = SimpleNamespace(
        req_id="1", prompt_token_ids=[0] * CHUNK, block_ids=([9], [5, 6]), num_computed_tokens=0
    )
    step = SimpleNamespace(
        finished_req_ids=[],
        preempted_req_ids=None,
        scheduled_new_reqs=[new],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={},
        scheduled_spec_decode_tokens={},
    )
    requests.schedule(step)
    step.scheduled_new_reqs = []
    for blocks in ((([], [7])), ([4], []), None):
        step.scheduled_cached_reqs = SimpleNamespace(
            req_ids=["1"],
            resumed_req_ids=[],
            new_block_ids=[blocks],
            num_computed_tokens=[0],
            num_output_tokens=[0],
        )
        requests.schedule(step)
    assert [*coordinator.requests.pages.of(requests.held["1"].slot)] == [5, 6, 7]
    coordinator.close()


def test_layers_get_the_backend_that_they_ask_for(needs_vllm):
    """CUSTOM is topkv's, but for windows; a drafter asks for another, or for none."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.registry import AttentionBackendEnum
    from vllm.v1.attention.selector import AttentionSelectorConfig

    from topkv_vllm.backend import TopkvBackend, chosen

    before = current_platform.get_attn_backend_cls
    plain = AttentionSelectorConfig(64, torch.float32, "auto", PAGE)
    slides = plain._replace(has_sliding_window=True)
    stock, custom = before(None, plain), AttentionBackendEnum.CUSTOM
    with chosen(TopkvBackend):
        choose = current_platform.get_attn_backend_cls
        assert choose(custom, plain, num_heads=4) == "topkv_vllm.backend.TopkvBackend"
        assert choose(custom, slides) == choose(None, plain) == choose(None, slides) == stock
    assert current_platform.get_attn_backend_cls == before
