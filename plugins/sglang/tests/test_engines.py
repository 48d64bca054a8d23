"""SGLang where topkv is installed and not used."""

from __future__ import annotations

import pytest

from plugins.sglang.tests.conftest import STOCK


@pytest.mark.nightly
def test_installed_and_not_used_it_changes_nothing(driven, arguments, stock, prompt):
    """Stock SGLang without the plugin has the same tokens, finds as much, and counts as much."""
    plain = driven(SGLANG_PLUGINS="watch")
    plain.do("start", arguments={**arguments, **STOCK, "max_total_tokens": 2048})
    texts = [prompt(length, 50) for length in (5, 150, 150, 64)]
    requests = [{"prompt": each, "tokens": 12} for each in [*texts, texts[1]]]
    stock.idle()
    assert stock.flush()
    assert plain.run(requests) == stock.run(requests)
    states = [engine.idle() for engine in (plain, stock)]
    assert all(state["topkv"] is None for state in states)
    assert states[0]["watched"]["tokens"] == states[1]["watched"]["tokens"] == 0
