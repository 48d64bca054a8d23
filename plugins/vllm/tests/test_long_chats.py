"""Chats as long as those that people have, with the server; on a GPU alone."""

from __future__ import annotations

import pytest
from transformers import AutoTokenizer

from plugins.vllm.tests.server import serving, stream_all

LONGEST, CHUNK, CHATS = 33 * 1024, 8192, 32

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def patient(save_model, tmp_path_factory):
    """A model of long contexts."""
    return save_model(tmp_path_factory.mktemp("patient"), max_position_embeddings=LONGEST)


@pytest.fixture(scope="module")
def server(patient, tmp_path_factory):
    with serving(patient, tmp_path_factory.mktemp("server"), LONGEST, CHUNK) as started:
        yield started


@pytest.fixture(scope="module")
def stock(engines, make_served, arguments, beside, patient):
    """Stock vLLM with the same model."""
    more = {"model": str(patient), "max_model_len": LONGEST, "max_num_batched_tokens": CHUNK}
    more["kv_cache_memory_bytes"] = 2**29
    engines["patient"] = make_served(**arguments | more, **beside)
    return engines["patient"]


def test_chats_of_8_to_32_thousand_tokens_and_a_third_goes_away(server, stock, patient, prompt):
    """All at once; four of them run at a time."""
    lengths = [8192 + 768 * number for number in range(CHATS)]
    drawn = (prompt(length, number) for number, length in enumerate(lengths))
    chats = ["".join(chr(97 + token % 26) for token in each) for each in drawn]
    given = AutoTokenizer.from_pretrained(patient)(chats)["input_ids"]
    assert [*map(len, given)] == lengths
    expected = [tokens for (tokens,) in stock.answer(given, 24)]
    leaves = [None if number % 3 else 3 for number in range(CHATS)]
    for number, got in enumerate(stream_all(server, chats, 24, leaves)):
        if number % 3:
            assert got == expected[number]
        else:
            assert len(got) >= 3
            assert got == expected[number][: len(got)]
    server.wait_until_nothing_is_held()
