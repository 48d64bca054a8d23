"""The byte tokenizer: ids are bytes, and any text survives the round trip, saved and read back."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerBase

TRAINING = Path(__file__).parents[1] / "training"


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedTokenizerBase:
    sys.path.insert(0, str(TRAINING))
    try:
        from byte_tokenizer import build_byte_tokenizer
        from retrieval_model import retrieval_config
    finally:
        sys.path.remove(str(TRAINING))
    folder = tmp_path_factory.mktemp("tokenizer")
    build_byte_tokenizer(4096).save_pretrained(folder)
    retrieval_config(4096).save_pretrained(folder)
    return AutoTokenizer.from_pretrained(folder, local_files_only=True)


def test_vocabulary_is_the_256_bytes(tokenizer: PreTrainedTokenizerBase) -> None:
    assert len(tokenizer) == tokenizer.vocab_size == 256
    assert sorted(tokenizer.get_vocab().values()) == list(range(256))
    assert tokenizer.pad_token_id == 0
    assert tokenizer.eos_token_id is None
    assert tokenizer.bos_token_id is None
    assert tokenizer.model_max_length == 4096


def test_any_text_survives(tokenizer: PreTrainedTokenizerBase) -> None:
    # U+0100 is how the vocabulary writes byte 0, the pad token; the others are what tokenizers
    # that normalise, clean up or look for special tokens would change.
    traps = ["\u0100", "\0", "<s>", "</s>", "<pad>", " .", " n't", "\r\n", "\ufeff"]
    texts = st.lists(st.text() | st.sampled_from(traps), max_size=8).map("".join)

    @settings(deadline=None, max_examples=300)
    @given(texts)
    def check(text: str) -> None:
        ids = tokenizer(text)["input_ids"]
        assert ids == list(text.encode())
        assert tokenizer.decode(ids) == text

    check()


def test_every_byte_decodes_and_ascii_maps_to_itself(tokenizer: PreTrainedTokenizerBase) -> None:
    ascii_text = bytes(range(128)).decode()
    assert tokenizer.decode(list(range(128))) == ascii_text
    assert tokenizer("é")["input_ids"] == [0xC3, 0xA9]


def test_padding_is_on_the_left_with_byte_0(tokenizer: PreTrainedTokenizerBase) -> None:
    batch = tokenizer(["abcd", "x"], padding=True)
    assert batch["input_ids"] == [[97, 98, 99, 100], [0, 0, 0, 120]]
    assert batch["attention_mask"] == [[1, 1, 1, 1], [0, 0, 0, 1]]
    assert tokenizer.decode(batch["input_ids"][1], skip_special_tokens=True) == "x"
