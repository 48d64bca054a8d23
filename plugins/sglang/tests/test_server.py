"""SGLang's server, started by its own command line, and its metrics."""

from __future__ import annotations

import asyncio
import json
import time

import pytest

from plugins.sglang.tests.server import (
    ask,
    chat_all,
    serving,
    text_of,
    wait_until_nothing_is_held,
)


@pytest.fixture(scope="module")
def url(needs_sglang, environment, model, tmp_path_factory):
    """Address of a server."""
    with serving(model, environment, tmp_path_factory.mktemp("server") / "log") as started:
        yield started


def metrics(url):
    """Values of topkv's metrics, by name."""
    lines = [
        line for line in ask(f"{url}/metrics").splitlines() if line.startswith("sglang:topkv")
    ]
    return {line.partition("{")[0]: float(line.rpartition(" ")[2]) for line in lines}


def generate(url, prompt, **options):
    """Return what a server generates."""
    how = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True, **options}
    return json.loads(ask(f"{url}/generate", {"input_ids": prompt, "sampling_params": how}))


def test_a_server_answers_and_counts(url, stock, prompt):
    """Short requests have the tokens of stock SGLang; a long one loads, which is counted."""
    short = prompt(97, 40)
    assert [generate(url, short)["output_ids"]] == stock.answer([short], 16)
    assert len(generate(url, prompt(400, 41))["output_ids"]) == 16
    time.sleep(2)  # it is idle by then
    state = json.loads(ask(f"{url}/server_info"))["internal_states"][0]["topkv"]
    shown = metrics(url)
    assert shown["sglang:topkv_hits_total"] == state["hits"] > 0
    assert shown["sglang:topkv_misses_total"] == state["misses"] > 0
    assert shown["sglang:topkv_loaded_bytes_total"] == state["loaded_bytes"] > 0
    assert shown["sglang:topkv_pages"] == state["pages"]
    assert shown["sglang:topkv_used_pages"] == state["used_pages"] == state["requests"] == 0


def test_clients_stream_chats_and_a_third_goes_away(url, stock, prompt):
    """All at once, so that most of them wait for their turn. Each is within the budget."""
    lengths = [5, 90, 64, 97, 33, 80, 12, 100]
    prompts = [prompt(lengths[n % 8], 60 + n // 8) for n in range(32)]
    leaves = [None if n % 3 else 3 for n in range(32)]
    expected = [text_of(tokens) for tokens in stock.answer(prompts, 24)]
    for n, got in enumerate(asyncio.run(chat_all(url, prompts, 24, leaves))):
        assert got == expected[n] if n % 3 else expected[n].startswith(got)
        assert len(got) >= 3
    wait_until_nothing_is_held(url)


def test_beams_are_refused_and_others_go_on(url, stock, prompt):
    with pytest.raises(OSError, match="400"):
        generate(url, prompt(20, 42), beam_width=2, n=2)
    short = prompt(60, 43)
    assert [generate(url, short)["output_ids"]] == stock.answer([short], 16)
