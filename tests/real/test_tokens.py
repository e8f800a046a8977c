"""The real vocabulary of 262,144 tokens: transformers' ids from the same file, round trips, streams of whole characters."""

from pathlib import Path
from typing import Any

import pytest

from server.loading import load_text_side
from server.tokenizer import TextStream, Tokenizer
from tests.real.texts import corpus


@pytest.fixture(scope="module")
def tokenizer(model_file: Path) -> Tokenizer:
    return load_text_side(model_file).tokenizer


@pytest.mark.short
def test_a_long_text_comes_back_whole_and_holds_no_control_token(tokenizer: Tokenizer) -> None:
    text = corpus()
    token_ids = tokenizer.encode_text(text)
    assert tokenizer.decode(token_ids) == text
    assert not tokenizer.control_ids.intersection(token_ids)


@pytest.mark.short
def test_a_long_text_streams_whole_from_wherever_its_bytes_are_cut(tokenizer: Tokenizer) -> None:
    """A model may say any character byte by byte, so each place in it is a cut."""
    text = corpus(20_000)
    byte_ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in text.encode()]
    for token_ids in (tokenizer.encode_text(text), byte_ids):
        stream, shown = TextStream(tokenizer), 0
        for token_id in token_ids:
            piece = stream.push(token_id)
            assert text.startswith(piece, shown)
            shown += len(piece)
        assert stream.finish() == ""
        assert shown == len(text)


@pytest.mark.short
def test_every_control_token_is_out_of_a_texts_reach(tokenizer: Tokenizer) -> None:
    assert len(tokenizer.control_ids) == 6251
    for token_id in tokenizer.control_ids:
        content = tokenizer.token_text(token_id)
        assert not tokenizer.control_ids.intersection(tokenizer.encode_text(content))
        assert tokenizer.encode_prompt(content) == [token_id]


def test_a_long_text_has_the_ids_of_transformers(
    tokenizer: Tokenizer, reference_tokenizer: Any
) -> None:
    text = corpus()
    assert len(text.encode()) >= 100_000
    expected = reference_tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.encode_text(text) == expected
    with_bos = reference_tokenizer(text).input_ids
    assert [tokenizer.bos_id, *tokenizer.encode_text(text)] == with_bos


def test_a_raw_prompt_with_markers_has_the_ids_of_transformers(
    tokenizer: Tokenizer, reference_tokenizer: Any
) -> None:
    text = "<bos><start_of_turn>user\n\n\nHi  <b>there</b><end_of_turn><unused5>\n<start_of_image>"
    expected = reference_tokenizer(text, add_special_tokens=False).input_ids
    assert tokenizer.encode_prompt(text) == expected
