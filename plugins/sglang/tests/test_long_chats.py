"""Chats as long as those that people have, with the server; on a GPU alone."""

from __future__ import annotations

import asyncio

import pytest

from plugins.sglang.tests.conftest import DEVICE, STOCK
from plugins.sglang.tests.server import (
    SETTINGS,
    chat_all,
    serving,
    text_of,
    wait_until_nothing_is_held,
)

LONGEST, CHUNK, CHATS = 33 * 1024, 8192, 32

pytestmark = pytest.mark.skipif(DEVICE == "cpu", reason="a CPU would take hours")


@pytest.fixture(scope="module")
def patient(save_model, tmp_path_factory):
    """A model of long contexts."""
    return save_model(tmp_path_factory.mktemp("patient"), max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def url(needs_sglang, environment, patient, tmp_path_factory):
    """Address of a server that selects all tokens of requests."""
    settings = {**SETTINGS, "budget": LONGEST, "buffer": None, "max_tokens": 4 * LONGEST}
    settings = {name: value for name, value in settings.items() if value is not None}
    log = tmp_path_factory.mktemp("server") / "log"
    sizes = {"longest": LONGEST, "chunk": CHUNK}
    with serving(patient, environment, log, settings, **sizes) as started:
        yield started


def test_chats_of_8_to_32_thousand_tokens_and_a_third_goes_away(url, inside, patient, prompt):
    """All at once; four of them run at a time."""
    given = [prompt(8192 + 768 * number, number) for number in range(CHATS)]
    sizes = {"context_length": LONGEST, "chunked_prefill_size": CHUNK}
    sizes["max_total_tokens"] = 4 * LONGEST
    stock = inside(**STOCK, model_path=str(patient), **sizes)
    expected = [text_of(tokens) for tokens in stock.answer(given, 24)]
    stock.close()
    leaves = [None if number % 3 else 3 for number in range(CHATS)]
    for number, got in enumerate(asyncio.run(chat_all(url, given, 24, leaves))):
        assert got == expected[number] if number % 3 else expected[number].startswith(got)
        assert len(got) >= 3
    wait_until_nothing_is_held(url)
