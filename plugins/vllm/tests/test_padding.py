"""Layers and steps of vLLM, beside what ``tools/engines/tests`` says of rows and padding."""

from __future__ import annotations

from types import SimpleNamespace

import torch

from tools.engines.tests.steps import CHUNK, lowered
from topkv import SparseCoordinator
from topkv_vllm.requests import ScheduledRequests


def test_what_a_request_had_when_it_was_preempted_is_prompt():
    """Model runner V2 begins it anew under its name, with all that it had."""
    coordinator = SparseCoordinator(lowered())
    requests, none = ScheduledRequests(coordinator), []
    cached = SimpleNamespace(
        req_ids=none,
        resumed_req_ids=none,
        new_block_ids=none,
        num_computed_tokens=none,
        num_output_tokens=none,
    )
    resumed = SimpleNamespace(
        req_id="1",
        prompt_token_ids=[0] * CHUNK,
        prefill_token_ids=[0] * (CHUNK + 1),
        block_ids=([5, 6, 7],),
        num_computed_tokens=0,
    )
    step = SimpleNamespace(
        finished_req_ids=none,
        preempted_req_ids=None,
        scheduled_new_reqs=[resumed],
        scheduled_cached_reqs=cached,
        num_scheduled_tokens={"1": CHUNK},
        scheduled_spec_decode_tokens={},
    )
    requests.schedule(step)
    assert requests.held["1"].prefill == CHUNK + 1
    assert coordinator.requests.free == 3
    coordinator.close()


def test_a_layer_leaves_nothing_undefined_behind_the_rows(served):
    """vLLM pads tokens of steps with prompts too, and runs layers where nothing attends."""
    from topkv_vllm.backend import TopkvMetadata

    engine = served()
    (layers,) = engine.llm.collective_rpc(
        lambda worker: worker.vllm_config.compilation_config.static_forward_context
    )
    impl, session = next(iter(layers.values())).impl, engine.session
    device = session.coordinator.config.device
    q, k, v = (torch.randn(5, heads, 64, device=device) for heads in (4, 2, 2))
    for metadata in (None, TopkvMetadata(0), TopkvMetadata(session.forward(3, 3))):
        out = torch.full_like(q, torch.nan)
        assert impl.forward(None, q, k, v, None, metadata, out) is out
        assert out.isfinite().all()
        assert not out[metadata.rows if metadata else 0 :].any()
    session.requests.abort()


def test_a_step_with_a_prompt_of_one_token_is_not_replayed(served, prompt, monkeypatch):
    """A manager of graphs does not learn that rows are uniform while one is a prompt's. Here no
    step is replayed; on a GPU ``test_graphs.py`` looks at those that are."""
    from topkv_vllm import gpu_worker

    engine, asked = served(), []
    session, forward = engine.session, engine.session.forward
    manager = SimpleNamespace(dispatch=lambda reqs, tokens, uniform: uniform)
    gpu_worker._guard(manager, session)

    def watched(count, tokens, lengths):
        asked.append(manager.dispatch(count, tokens, 1))
        return forward(count, tokens, lengths)

    monkeypatch.setattr(session, "forward", watched)
    engine.add("beside", prompt(50), 4)
    engine.steps(2)
    engine.add("of-one-token", prompt(1), 4)
    engine.run()
    assert asked == [None, 1, None, 1, 1, 1]
    engine.check_nothing_is_held()
