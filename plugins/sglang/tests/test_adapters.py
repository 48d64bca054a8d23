"""LoRA adapters, and prefixes of their own."""

from __future__ import annotations

import pytest

from plugins.sglang.tests.conftest import DEFAULTS, STOCK
from tools.engines.tests.adapters import save_adapter

pytestmark = pytest.mark.nightly

LORA = {"enable_lora": True, "max_loras_per_batch": 3, "lora_backend": "torch_native"}
LORA["disable_cuda_graph"] = True
"""SGLang's own kernels of adapters take no float32, and these cannot be recorded."""


@pytest.fixture(scope="module")
def lora(tmp_path_factory):
    """Arguments for two adapters."""
    paths = [str(save_adapter(seed, tmp_path_factory, layers=3)) for seed in (1, 2)]
    return {**LORA, "lora_paths": [f"a={paths[0]}", f"b={paths[1]}"]}


@pytest.fixture(scope="module")
def stock_lora(driven, arguments, lora):
    """Stock SGLang with adapters."""
    engine = driven()
    engine.do("start", arguments={**arguments, **STOCK, **lora, "max_total_tokens": 2048})
    return engine


@pytest.fixture(scope="module")
def served_lora(driven, arguments, lora):
    """Topkv with adapters."""
    given = {**arguments, **lora}
    config = {**DEFAULTS, "max_request_tokens": given.pop("context_length")}
    engine = driven()
    engine.do("start", arguments=given, config=config)
    return engine


def test_adapters(served_lora, stock_lora, prompt):
    """Requests with one adapter, another one and none in a batch, and again, when all but one
    page of each is found: each has the tokens of its adapter."""
    engine, asked = served_lora, prompt(97, 50)
    requests = [
        {"prompt": asked, "tokens": 24, "adapter": adapter} for adapter in ("a", None, "b")
    ]
    got = [each.run(requests) for each in (stock_lora, engine, engine)]
    tokens = [[each["tokens"] for each in wave] for wave in got]
    assert tokens[0] == tokens[1] == tokens[2]
    assert len({*map(tuple, tokens[0])}) == 3
    assert [[each["found"] for each in wave] for wave in got[1:]] == [[0] * 3, [96] * 3]
    engine.check_nothing_is_held()
