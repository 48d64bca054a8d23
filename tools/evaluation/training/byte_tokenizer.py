"""A tokenizer of 256 tokens, one a byte: the id of a token is the byte's value."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PAD_ID = 0


def byte_characters() -> list[str]:
    """The character by which byte-level tokenizers write each byte, in order of the bytes.

    Printable bytes stand for themselves, the others for the characters from U+0100 on (the table
    that GPT-2 introduced and that the ``ByteLevel`` pre-tokenizer and decoder use).
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return [chr(byte) if byte in printable else chr(next(others)) for byte in range(256)]


def build_byte_tokenizer(max_length: int) -> PreTrainedTokenizerFast:
    """A tokenizer that writes any text as its UTF-8 bytes and reads it back unchanged.

    It pads on the left with byte 0, which no text of the training holds, and knows no other
    special token: a generation ends when its length says so.

    Args:
        max_length: tokens that the model was made for; Transformers warns beyond it.
    """
    characters = byte_characters()
    vocab = {character: byte for byte, character in enumerate(characters)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    # Without split_special_tokens a literal U+0100 in a text would be taken for the pad token,
    # because that is the character that writes byte 0.
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        pad_token=characters[PAD_ID],
        split_special_tokens=True,
        padding_side="left",
        clean_up_tokenization_spaces=False,
        model_max_length=max_length,
    )
