"""The tokenizer of a GGUF file: transformers' ids from the same file, control tokens out of reach, bad metadata named."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
import tokenizers
from gguf_fixtures import Metadata, gemma3, gemma4
from hypothesis import assume, given
from hypothesis import strategies as st
from text_fixtures import CONTROLS, train_tokenizer

from server.checkpoint import CheckpointError
from server.engine import gguf_metadata
from server.loading import load_text_side, text_side_of
from server.tokenizer import TextStream, Tokenizer
from server.tokenizer_gguf import tokenizer_from_metadata
from tests import gguf_files

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

FILE = "m.gguf"
PIECES = ["\n", " ", "\t", "<table>", "</b>", "[multimodal]", "▁", "the", " argument", "parser."]
PIECES += ["<", "é", "שלום", "日本", "🙂", "👩‍👧", "\r\n", "self", "<0x41>", "\x00", "\u2003"]
MIXED = st.lists(st.one_of(st.sampled_from(PIECES), st.text(max_size=6)), max_size=20).map("".join)
MARKERS = ["<bos>", "<unused1>", "<start_of_turn>", "<end_of_turn>", "<start_of_image>"]


@pytest.fixture(scope="session")
def tokenizer(gguf_file: Path) -> Tokenizer:
    return load_text_side(gguf_file).tokenizer


@pytest.fixture(scope="session")
def reference(gguf_file: Path) -> tokenizers.Tokenizer:
    """transformers' conversion of the file."""
    from transformers.integrations.gguf import convert_gguf_tokenizer, get_gguf_tokenizer

    architecture, tokenizer_dict, _ = get_gguf_tokenizer(str(gguf_file))
    converted, _ = convert_gguf_tokenizer(architecture, tokenizer_dict)
    assert isinstance(converted, tokenizers.Tokenizer)
    return converted


@given(text=MIXED)
def test_a_text_has_the_ids_of_transformers_from_the_same_file(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, text: str
) -> None:
    """Of a text that spells no control token, which is text to us alone (below)."""
    added = reference.get_added_tokens_decoder().values()
    assume(not any(token.special and token.content in text for token in added))
    assert tokenizer.encode_text(text) == reference.encode(text, add_special_tokens=False).ids


@given(pieces=st.lists(st.sampled_from([*PIECES, *MARKERS])))
def test_a_raw_prompt_has_the_ids_of_transformers_from_the_same_file(
    tokenizer: Tokenizer, reference: tokenizers.Tokenizer, pieces: list[str]
) -> None:
    text = "".join(pieces)
    assert tokenizer.encode_prompt(text) == reference.encode(text, add_special_tokens=False).ids


def test_text_that_spells_a_control_token_or_a_byte_stays_text(tokenizer: Tokenizer) -> None:
    controls = [tokenizer.token_text(token_id) for token_id in sorted(tokenizer.control_ids)]
    assert {"<pad>", "<eos>", "<bos>", "<unk>", *MARKERS} <= {*controls}
    text = "a".join([*controls, "<0x41>"])
    token_ids = tokenizer.encode_text(text)
    assert not tokenizer.control_ids.intersection(token_ids)
    assert tokenizer.decode(token_ids) == text


def test_a_control_token_that_merges_would_make_stays_out_of_reach() -> None:
    metadata = gemma3()
    metadata["tokenizer.ggml.tokens"] += ["<bo", "s>"]  # before <bos> they would be its halves
    metadata["tokenizer.ggml.token_type"] += [1, 1]
    metadata["tokenizer.ggml.scores"] += [0.0, 0.0]
    tokenizer = tokenizer_from_metadata(metadata, FILE)
    assert 2 not in tokenizer.encode_text("<bos>")
    assert tokenizer.encode_prompt("<bos>") == [2]


@given(text=st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁")))
def test_a_text_comes_back_whole_however_its_bytes_are_cut(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode_text(text)
    stream = TextStream(tokenizer)
    pieces = [stream.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(token_ids) == text
    assert "�" not in "".join(pieces) or "�" in text


# Gemma 4


@pytest.fixture(scope="session")
def original() -> Tokenizer:
    return Tokenizer(train_tokenizer(), {})


@pytest.fixture(scope="session")
def of_gemma4() -> Tokenizer:
    return tokenizer_from_metadata(gemma4(), FILE)


@given(pieces=st.lists(st.sampled_from([*CONTROLS.values(), *PIECES, "\n\n"])))
def test_gemma_4s_file_makes_the_tokenizer_it_was_made_from(
    of_gemma4: Tokenizer, original: Tokenizer, pieces: list[str]
) -> None:
    text = "".join(pieces)
    assert of_gemma4.encode_text(text) == original.encode_text(text)
    assert of_gemma4.encode_prompt(text) == original.encode_prompt(text)
    assert of_gemma4.control_ids == original.control_ids


def test_what_llama_cpp_prints_of_gemma_4s_markers_is_control_here(of_gemma4: Tokenizer) -> None:
    call = of_gemma4.token_id("<|tool_call>")
    assert call in of_gemma4.control_ids
    assert call not in of_gemma4.encode_text("<|tool_call>")
    assert of_gemma4.names["eos_token"] == "<turn|>"


# Names, flags and the chat template


def test_names_and_flags_come_from_the_metadata(tokenizer: Tokenizer) -> None:
    assert (tokenizer.bos_id, tokenizer.adds_bos) == (2, True)
    assert tokenizer.names["eos_token"] == "<eos>"
    metadata = {
        **gemma3(),
        "tokenizer.ggml.add_bos_token": False,
        "tokenizer.ggml.eot_token_id": 8,
    }
    other = tokenizer_from_metadata(metadata, FILE)
    assert not other.adds_bos
    assert other.names["eot_token"] == "<end_of_turn>"


def test_a_chat_template_in_the_file_is_used_and_a_base_model_has_none(
    gguf_file: Path, tmp_path: Path
) -> None:
    assert load_text_side(gguf_file).template is None
    source = "{{ bos_token }}{% for m in messages %}<start_of_turn>{{ m.content }}{% endfor %}"
    keys = {**gemma3(), "tokenizer.chat_template": source}
    text = load_text_side(gguf_files.write(tmp_path / FILE, keys, {}))
    assert text.template is not None
    rendered = text.template.render([{"role": "user", "content": "<end_of_turn>"}])
    assert rendered.text == "<bos><start_of_turn><end_of_turn>"
    controls = [i for i in rendered.token_ids if i in text.tokenizer.control_ids]
    assert controls == [2, text.tokenizer.token_id("<start_of_turn>")]


# Hostile metadata


def _without(key: str) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.pop(f"tokenizer.ggml.{key}")


def _with(key: str, value: Any) -> Callable[[Metadata], object]:
    return lambda metadata: metadata.update({f"tokenizer.ggml.{key}": value})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (_without("model"), r"expected tokenizer\.ggml\.model llama .*, found None"),
        (_with("model", "gpt2"), r"expected tokenizer\.ggml\.model llama .*, found 'gpt2'"),
        (_with("model", ["llama"]), r"tokenizer\.ggml\.model llama .*, found"),
        (_without("tokens"), r"expected tokenizer\.ggml\.tokens, found no such key"),
        (_with("tokens", []), r"tokens: expected a list, found an empty list"),
        (_with("tokens", "a" * 1000), r"tokens: expected a list, found 'aaaa.*…$"),
        (_with("tokens", [1, 2]), r"tokens\[0\]: expected a text, found 1"),
        (_with("tokens", ["a", "b"]), r"token_type: expected a type for each of 2 tokens, found"),
        (_without("token_type"), r"expected tokenizer\.ggml\.token_type, found no such key"),
        (
            _with("token_type", [1.0]),
            r"token_type: expected a type for each of \d+ tokens, found 1",
        ),
        (_with("token_type", 7), r"token_type: expected a list, found 7"),
        (_with("scores", [1.0]), r"scores: expected a score for each of \d+ tokens, found 1"),
        (_with("scores", {}), r"scores: expected a list, found dict"),
        (
            _with("bos_token_id", -1),
            r"bos_token_id: expected the id of one of \d+ tokens, found -1",
        ),
        (_with("eos_token_id", 10**30), r"eos_token_id: expected the id"),
        (_with("eos_token_id", "1"), r"eos_token_id: expected the id .* found '1'"),
        (_with("unknown_token_id", True), r"unknown_token_id: expected the id .* found True"),
        (_with("add_bos_token", 1), r"add_bos_token: expected true or false, found 1"),
        (_with("merges", ["a"]), r"merges\[0\]: expected two tokens .* found 'a'"),
        (_with("merges", [None]), r"merges\[0\]: expected a text, found NoneType"),
    ],
)
def test_bad_metadata_is_refused_with_file_and_key(
    change: Callable[[Metadata], object], message: str
) -> None:
    metadata = gemma3()
    change(metadata)
    with pytest.raises(CheckpointError, match=rf"^m\.gguf.*{message}"):
        text_side_of(metadata, FILE)


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("tokens", "<bos>", r"tokens: expected each token once, found '<bos>' as 2 and 100"),
        ("tokens", "", r"tokens\[100\]: expected 1 to 256 characters, found 0"),
        ("tokens", "a" * 10**6, r"tokens\[100\]: expected 1 to 256 characters, found 1000000"),
        ("tokens", "<byte>", r"tokens: expected byte fallback .* with 255 of them"),
        ("token_type", 9, r"token_type\[100\]: expected one of .*, 0 to 6, found 9"),
        ("token_type", "3", r"token_type\[100\]: expected one of .*, found '3'"),
        ("scores", "0", r"scores\[100\]: expected a number, found '0'"),
        ("scores", None, r"scores\[100\]: expected a number, found NoneType"),
    ],
)
def test_one_bad_entry_is_refused_with_file_and_key(key: str, value: object, message: str) -> None:
    metadata = gemma3()
    metadata[f"tokenizer.ggml.{key}"][100] = value
    with pytest.raises(CheckpointError, match=rf"^m\.gguf, tokenizer\.ggml\.{message}"):
        text_side_of(metadata, FILE)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (["a"], "expected a text, found list"),
        ("{% if %}", "line 1"),
        ("x" * 10_000_000, "expected at most"),
    ],
    ids=["list", "syntax", "ten megabytes"],
)
def test_a_bad_chat_template_is_refused_with_file_and_key(template: object, message: str) -> None:
    metadata = {**gemma3(), "tokenizer.chat_template": template}
    with pytest.raises(CheckpointError, match=rf"^m\.gguf, tokenizer\.chat_template.*{message}"):
        text_side_of(metadata, FILE)


def test_gemma_4_without_merges_is_refused() -> None:
    metadata = gemma4()
    del metadata["tokenizer.ggml.merges"]
    with pytest.raises(CheckpointError, match=r"expected tokenizer\.ggml\.merges beside"):
        tokenizer_from_metadata(metadata, FILE)


def test_the_binding_gives_the_metadata_as_it_was_written(gguf_file: Path) -> None:
    written, read = gemma3(), dict(gguf_metadata(gguf_file))
    assert {key: read[key] for key in written} == written
