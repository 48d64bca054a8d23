"""The conformance kit's suite of engines, run against vLLM, which gets something to attach to."""

from __future__ import annotations

import json

import pytest
import torch

from plugins.vllm.tests.engine_case import ENTRY, Attaching, VllmCase
from tools.engines.tests.served_case import LONGEST
from topkv_testing.engines import EngineTests
from topkv_vllm import engine_args

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="vLLM runs on the GPU here, and this case is one of a CPU"
)

ARGUMENTS = {
    "dtype": "float32",
    "max_num_batched_tokens": 256,
    "enforce_eager": True,
    "enable_prefix_caching": False,
    "max_logprobs": -1,
    "logprobs_mode": "raw_logits",
}


class TestVllm(EngineTests):
    @pytest.fixture
    def plugin(self):
        return ENTRY

    @pytest.fixture
    def options(self, save_model, tmp_path_factory, beside, engines, make_served, monkeypatch):
        def start(**arguments):
            key = json.dumps(arguments, sort_keys=True)
            if key not in engines:
                engines[key] = make_served(**ARGUMENTS, **arguments)
            return engines[key]

        def serve(path, config):
            return start(**engine_args(config, model=path))

        def stock(path):
            return start(model=path, max_model_len=LONGEST, **beside)

        monkeypatch.setattr(Attaching, "serve", staticmethod(serve))
        return VllmCase(save_model, tmp_path_factory.getbasetemp(), stock)

    # An own function: a mark on the inherited one would stand in suites of other engines too.
    @pytest.mark.xfail(
        reason="vLLM refuses what is too long itself, and lets requests wait for room", strict=True
    )
    def test_exhaustion_is_a_typed_error(self, subject):
        super().test_exhaustion_is_a_typed_error(subject)
