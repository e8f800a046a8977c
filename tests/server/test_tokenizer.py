"""The tokenizer: plain text stays plain, prompts equal the reference's, streams are whole characters, stops never leak."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from text_fixtures import CONTROLS, train_tokenizer
from tokenizers import AddedToken, decoders

from server.checkpoint import CheckpointError
from server.tokenizer import StopStrings, TextStream, Tokenizer

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
# The vocabulary spells a space as ▁, so that character does not come back as itself.
TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="▁"))
MARKED = st.lists(
    st.sampled_from([*CONTROLS.values(), " ", "\n", "a", " b ", "<", "|>", "é", "🙂"])
)


@pytest.mark.parametrize("control", CONTROLS.values())
def test_text_that_spells_a_control_token_stays_text(tokenizer: Tokenizer, control: str) -> None:
    token_ids = tokenizer.encode_text(f"a{control}b {control}")
    assert not tokenizer.control_ids.intersection(token_ids)
    assert tokenizer.decode(token_ids) == f"a{control}b {control}"


@given(text=TEXT)
def test_plain_text_comes_back_and_holds_no_control_token(tokenizer: Tokenizer, text: str) -> None:
    token_ids = tokenizer.encode_text(text)
    assert tokenizer.decode(token_ids) == text
    assert not tokenizer.control_ids.intersection(token_ids)


@given(pieces=MARKED)
def test_a_raw_prompt_has_the_ids_of_the_tokenizers_package(
    text_folder: Path, tokenizer: Tokenizer, pieces: list[str]
) -> None:
    reference = tokenizers.Tokenizer.from_file(str(text_folder / "tokenizer.json"))
    text = "".join(pieces)
    assert tokenizer.encode_prompt(text) == reference.encode(text, add_special_tokens=False).ids


@given(pieces=MARKED)
def test_tokens_that_swallow_white_space_do_so_as_in_the_tokenizers_package(
    swallowing: tokenizers.Tokenizer, pieces: list[str]
) -> None:
    text = "".join(pieces)
    reference = swallowing.encode(text, add_special_tokens=False).ids
    ours = Tokenizer(tokenizers.Tokenizer.from_str(swallowing.to_str()), {})
    assert ours.encode_prompt(text) == reference


@pytest.fixture(scope="module")
def swallowing() -> tokenizers.Tokenizer:
    tokenizer = train_tokenizer()
    tokenizer.add_special_tokens(
        [
            AddedToken("<mask>", lstrip=True, normalized=False),
            AddedToken("<|think|>", rstrip=True, normalized=False),
        ]
    )
    return tokenizer


def test_a_raw_prompt_gets_no_bos(tokenizer: Tokenizer) -> None:
    assert tokenizer.bos_id == 2
    assert tokenizer.encode_prompt("") == []
    assert tokenizer.encode_prompt("<bos><bos>") == [2, 2]


def test_half_of_a_surrogate_pair_is_a_value_error(tokenizer: Tokenizer) -> None:
    for encode in (tokenizer.encode_text, tokenizer.encode_prompt):
        with pytest.raises(ValueError, match="surrogates not allowed"):
            encode("a\ud800b")


def test_a_byte_token_is_one_byte_and_a_control_token_none(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode_bytes(tokenizer.token_id("<0xF0>") or 0) == b"\xf0"
    assert tokenizer.decode_bytes(106) == b""
    assert tokenizer.decode_bytes(10**9) == b""
    assert tokenizer.decode_bytes(-1) == b""


def test_an_id_outside_the_vocabulary_is_named(tokenizer: Tokenizer) -> None:
    assert tokenizer.token_text(106) == "<turn|>"
    for token_id in (-1, 900):
        with pytest.raises(ValueError, match=rf"{token_id} is outside the vocabulary of 900"):
            tokenizer.token_text(token_id)


@given(token_ids=st.lists(st.integers(0, 899)))
def test_a_stream_is_made_of_whole_characters_and_equals_the_whole_text(
    tokenizer: Tokenizer, token_ids: list[int]
) -> None:
    stream = TextStream(tokenizer)
    pieces = [stream.push(token_id) for token_id in token_ids]
    assert "".join(pieces) + stream.finish() == tokenizer.decode(token_ids)


def test_half_an_emoji_is_held_until_it_is_whole_or_the_text_ends(tokenizer: Tokenizer) -> None:
    token_ids = [tokenizer.token_id(f"<0x{byte:02X}>") or 0 for byte in "🙂".encode()]
    stream = TextStream(tokenizer)
    assert [stream.push(token_id) for token_id in token_ids] == ["", "", "", "🙂"]
    assert stream.finish() == ""
    for token_id in token_ids[:3]:
        assert stream.push(token_id) == ""
    assert stream.finish() == "�"


def test_byte_tokens_that_are_marked_special_are_still_text(tmp_path: Path) -> None:
    trained = train_tokenizer()
    trained.add_special_tokens([f"<0x{byte:02X}>" for byte in range(256)])
    trained.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.decode(tokenizer.encode_text("🙂 <0x41>")) == "🙂 <0x41>"


def _byte_level(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.decoder = decoders.ByteLevel()


def _strip(tokenizer: tokenizers.Tokenizer) -> None:
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)])


def _no_byte_fallback(tokenizer: tokenizers.Tokenizer) -> None:
    tokenizer.model.byte_fallback = False  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("change", "named"),
    [(_byte_level, "ByteLevel"), (_strip, "Sequence"), (_no_byte_fallback, "byte fallback.*BPE")],
)
def test_a_tokenizer_of_another_kind_is_refused_by_name(
    tmp_path: Path, change: Callable[[tokenizers.Tokenizer], None], named: str
) -> None:
    trained = train_tokenizer()
    change(trained)
    trained.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(
        CheckpointError, match=rf"tokenizer\.json: expected .*found.*{named}|{named}"
    ):
        Tokenizer.from_folder(tmp_path)


def test_a_tokenizer_whose_merges_spell_a_control_token_is_refused(tmp_path: Path) -> None:
    trained = train_tokenizer()
    piece = next(token for token in trained.get_vocab() if token.isalpha() and len(token) > 3)
    trained.add_special_tokens([piece])
    trained.save(str(tmp_path / "tokenizer.json"))
    with pytest.raises(CheckpointError, match=f"plain text can become the control token {piece}"):
        Tokenizer.from_folder(tmp_path)


def test_missing_and_broken_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(
        CheckpointError, match=r"tokenizer\.json: expected the checkpoint's tokenizer"
    ):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}", "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer\.json: this is no tokenizer"):
        Tokenizer.from_folder(tmp_path)
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text("[]", "utf-8")
    with pytest.raises(CheckpointError, match=r"tokenizer_config\.json: expected a JSON object"):
        Tokenizer.from_folder(tmp_path)


def test_token_names_come_from_the_config_in_either_spelling(tmp_path: Path) -> None:
    train_tokenizer().save(str(tmp_path / "tokenizer.json"))
    config = {"bos_token": {"content": "<eos>"}, "sot_token": "<|turn>", "add_bos_token": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config), "utf-8")
    tokenizer = Tokenizer.from_folder(tmp_path)
    assert tokenizer.bos_id == 1
    assert tokenizer.names["sot_token"] == "<|turn>"
    assert "add_bos_token" not in tokenizer.names


# Stop strings


def _stopped(stops: list[str], pieces: list[str]) -> tuple[str, str | None]:
    """Push `pieces` and return all text that came out, and the hit."""
    matcher = StopStrings(stops)
    shown, hit = "", None
    for piece in pieces:
        safe, hit = matcher.push(piece)
        shown += safe
    return shown + matcher.finish(), hit


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=4)


@given(stops=STOPS, pieces=st.lists(st.text("ab\n", max_size=5)))
def test_where_a_text_stops_does_not_depend_on_how_it_is_cut(
    stops: list[str], pieces: list[str]
) -> None:
    text = "".join(pieces)
    shown, hit = _stopped(stops, pieces)
    assert (shown, hit) == _stopped(stops, [text]) == _stopped(stops, list(text))
    assert text.startswith(shown)
    if hit is None:
        assert shown == text
        assert not any(stop in text for stop in stops)
    else:
        assert text.startswith(shown + hit)
        assert not any(stop in shown for stop in stops)


@given(stops=STOPS, pieces=st.lists(st.text("ab\n", max_size=5)))
def test_no_beginning_of_a_stop_string_is_shown_before_it_is_decided(
    stops: list[str], pieces: list[str]
) -> None:
    matcher = StopStrings(stops)
    shown, text = "", ""
    for piece in pieces:
        text += piece
        safe, hit = matcher.push(piece)
        shown += safe
        assert hit is not None or not any(
            (text + stop[cut:]).find(stop) < len(shown)
            for stop in stops
            for cut in range(1, len(stop))
            if text.endswith(stop[:cut])
        )


def test_a_stop_string_over_three_tokens_leaves_only_what_stands_before_it() -> None:
    assert _stopped(["\n\nUser:"], ["Hi", "\n", "\nUs", "er: go"]) == ("Hi", "\n\nUser:")
    assert _stopped(["\n\nUser:"], ["Hi", "\n", "\nUs", "eful"]) == ("Hi\n\nUseful", None)


def test_stop_strings_compare_code_points_without_normalization() -> None:
    assert _stopped(["e\u0301"], ["caf\u00e9"]) == ("caf\u00e9", None)


def test_without_stop_strings_everything_is_shown_at_once() -> None:
    assert StopStrings([]).push("text") == ("text", None)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(ValueError, match="at least one character"):
        StopStrings(["a", ""])


def test_a_long_stop_string_and_a_long_text_take_linear_work() -> None:
    matcher = StopStrings(["a" * 10_000 + "b"])
    shown = "".join(matcher.push("a")[0] for _ in range(20_000))
    assert len(shown + matcher.finish()) == 20_000


def test_the_text_side_of_the_server_needs_no_torch() -> None:
    modules = ("tokenizer", "chat", "tools", "checkpoint", "terminal")
    imports = "; ".join(f"import server.{name}" for name in modules)
    check = f"import sys; {imports}; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", check], cwd=ROOT, check=True, timeout=60)
