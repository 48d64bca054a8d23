"""Layers and steps of vLLM, beside what ``tools/engines/tests`` says of rows and padding."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
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
    """Model runner V1 asks ``_is_uniform_decode`` before it takes a graph; here it is the runner
    of a CPU, which has none. For V2 ``test_graphs.py`` looks at replays."""
    from topkv_vllm import gpu_worker

    engine, asked = served(), []
    (runner,) = engine.llm.collective_rpc(lambda worker: worker.model_runner)
    if not hasattr(runner, "_is_uniform_decode"):
        pytest.skip("this is model runner V2")
    own = runner._is_uniform_decode
    monkeypatch.setattr(runner, "_is_uniform_decode", own)
    gpu_worker._guard_v1(runner, engine.session)
    guarded = runner._is_uniform_decode

    def watched(**batch):
        asked.append((own(**batch), guarded(**batch)))
        return asked[-1][1]

    runner._is_uniform_decode = watched
    engine.add("beside", prompt(50), 4)
    engine.steps(2)
    engine.add("of-one-token", prompt(1), 4)
    engine.run()
    assert asked[:4] == [(False, False), (True, True), (True, False), (True, True)]
    assert all(map(all, asked[3:]))
    engine.check_nothing_is_held()
