"""Text to token ids and back, with the checkpoint's own tokenizer.

Owns two promises: plain text never becomes a control token, and streamed text is made of whole characters and never
shows a stop string or its beginning. Knows no chat template, no roles and no HTTP.
"""

from __future__ import annotations

import codecs
import json
import re
from typing import TYPE_CHECKING, Final

import tokenizers

from server.checkpoint import CheckpointError

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

_BYTE_TOKEN: Final = re.compile(r"<0x([0-9A-F]{2})>")
# The names and defaults of transformers' GemmaTokenizer, for a checkpoint that does not repeat them.
_GEMMA_NAMES: Final = {
    "bos_token": "<bos>",
    "eos_token": "<eos>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}


class Tokenizer:
    """A Gemma tokenizer: byte-pair merges over whole text, with bytes for what has no piece.

    `control_ids` are the added tokens that tokenizer.json calls special, `names` what tokenizer_config.json calls
    them, as `bos_token` -> `<bos>`.
    """

    def __init__(
        self, inner: tokenizers.Tokenizer, names: Mapping[str, str], *, adds_bos: bool = True
    ) -> None:
        """Take over a tokenizer of Gemma's kind; `names` are added to those that every Gemma has.

        `adds_bos` says whether a raw prompt begins with <bos> though it does not spell it.
        """
        inner.no_padding()
        inner.no_truncation()
        inner.encode_special_tokens = True  # text that spells a special token stays text
        special = {
            token_id: token
            for token_id, token in inner.get_added_tokens_decoder().items()
            if token.special and not _BYTE_TOKEN.fullmatch(token.content)
        }
        self._inner = inner
        self._controls = frozenset(token.content for token in special.values())
        lengths: dict[str, set[int]] = {}
        for content in self._controls:
            lengths.setdefault(content[0], set()).add(len(content))
        self._lengths = {first: sorted(found, reverse=True) for first, found in lengths.items()}
        firsts = "".join(map(re.escape, self._lengths))
        self._first = re.compile(f"[{firsts}]" if firsts else "(?!)")
        self._lstrip = frozenset(i for i, token in special.items() if token.lstrip)
        self._rstrip = frozenset(i for i, token in special.items() if token.rstrip)
        self.control_ids: Final = frozenset(special)
        self.adds_bos: Final = adds_bos
        self.vocab_size: Final = inner.get_vocab_size()
        self.names: Final = {**_GEMMA_NAMES, **names}
        self.bos_id: Final = self.token_id(self.names["bos_token"])

    @classmethod
    def from_folder(cls, folder: Path) -> Tokenizer:
        """Read `tokenizer.json` and, where there is one, `tokenizer_config.json`.

        Raises:
            CheckpointError: a file is missing, broken, or describes a tokenizer of another kind.
        """
        file = folder / "tokenizer.json"
        try:
            text = file.read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(
                f"{file}: expected the checkpoint's tokenizer, {error}"
            ) from error
        try:
            inner = tokenizers.Tokenizer.from_str(text)
        except Exception as error:  # the package raises no narrower class
            raise CheckpointError(f"{file}: this is no tokenizer: {error}") from error
        check_kind(inner, str(file))
        tokenizer = cls(inner, _token_names(read_config(folder)))
        for token_id in tokenizer.control_ids:
            content = tokenizer.token_text(token_id)
            # Merges inside a token's text do not depend on what stands around it, so this one look is a proof.
            if token_id in tokenizer.encode_text(content):
                raise CheckpointError(f"{file}: plain text can become the control token {content}")
        return tokenizer

    def token_id(self, text: str) -> int | None:
        """Return the id of the token spelled exactly `text`, control tokens included."""
        return self._inner.token_to_id(text)

    def token_text(self, token_id: int) -> str:
        """Return how the vocabulary spells a token.

        Raises:
            ValueError: the id is outside the vocabulary.
        """
        text = self._inner.id_to_token(token_id) if token_id >= 0 else None
        if text is None:
            raise ValueError(
                f"token id {token_id} is outside the vocabulary of {self.vocab_size} tokens"
            )
        return text

    def encode_text(self, text: str) -> list[int]:
        """Encode plain text; text that spells a control token becomes ordinary pieces.

        Raises:
            ValueError: the text holds half of a surrogate pair, which no encoding can carry.
        """
        text.encode()  # UnicodeEncodeError is a ValueError and names the character
        return self._inner.encode(text, add_special_tokens=False).ids

    def encode_prompt(self, text: str) -> list[int]:
        """Encode a raw prompt: text that spells a control token is that token. No BOS is added.

        Raises:
            ValueError: the text holds half of a surrogate pair.
        """
        token_ids: list[int] = []
        for piece, control_id in self.split_controls(text):
            token_ids += self.encode_text(piece) if control_id is None else [control_id]
        return token_ids

    def split_controls(self, text: str) -> Iterator[tuple[str, int | None]]:
        """Cut text into its control tokens, each with its id, and the plain pieces between, with None.

        White space beside a token that swallows it (`lstrip`, `rstrip`) is left out, as in the tokenizers package.
        """
        start, swallow = 0, False
        for at, control in self._find_controls(text):
            token_id = self._inner.token_to_id(control)
            piece = text[start:at]
            piece = piece.lstrip() if swallow else piece
            piece = piece.rstrip() if token_id in self._lstrip else piece
            if piece:
                yield piece, None
            yield control, token_id
            start, swallow = at + len(control), token_id in self._rstrip
        rest = text[start:].lstrip() if swallow else text[start:]
        if rest:
            yield rest, None

    def _find_controls(self, text: str) -> Iterator[tuple[int, str]]:
        """Yield where control tokens are spelled, the longest at each place.

        A look-up for each length: Gemma 3 has 6,249 control tokens, which an alternation would try one by one.
        """
        at = 0
        while match := self._first.search(text, at):
            at = match.start()
            for length in self._lengths[match.group()]:
                if (found := text[at : at + length]) in self._controls:
                    yield at, found
                    at += length
                    break
            else:
                at += 1

    def decode_bytes(self, token_id: int) -> bytes:
        """Return the bytes a token adds to the text: none for a control token or an id without a piece.

        A model's table may be padded past its vocabulary, so an unknown id is not an error here.
        """
        piece = self._inner.id_to_token(token_id) if token_id >= 0 else None
        if piece is None or token_id in self.control_ids:
            return b""
        if byte := _BYTE_TOKEN.fullmatch(piece):
            return bytes.fromhex(byte[1])
        return piece.replace("▁", " ").encode()

    def decode(self, token_ids: Sequence[int]) -> str:
        """Return the text of `token_ids`; broken UTF-8 shows as replacement characters."""
        return b"".join(map(self.decode_bytes, token_ids)).decode(errors="replace")


class TextStream:
    """Text from token ids as they come, in whole characters; its pieces joined equal `Tokenizer.decode`."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Return the text that is whole after this token, which may be none."""
        return self._utf8.decode(self._tokenizer.decode_bytes(token_id))

    def finish(self) -> str:
        """Return what is left: a replacement character if the text ended inside a character."""
        return self._utf8.decode(b"", final=True)


class StopStrings:
    """Ends a text before the first stop string, and lets no part of one out before that.

    The stop string that is complete first wins, the longer one where two end together, so the outcome does not depend
    on how the text was cut into pieces. After a hit nothing more comes out.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the strings to stop at.

        Raises:
            ValueError: one of them is empty.
        """
        if not all(stops):
            raise ValueError("expected stop strings of at least one character, found an empty one")
        self._stops = tuple(stops)
        self._held = ""
        self._hit: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Return the text that is safe to show and, once one was hit, the stop string."""
        if self._hit is not None:
            return "", self._hit
        buffer = self._held + text
        found = [
            (at + len(stop), at, stop) for stop in self._stops if (at := buffer.find(stop)) >= 0
        ]
        if found:
            _, at, self._hit = min(found)
            self._held = ""
            return buffer[:at], self._hit
        safe = min((_beginning(buffer, stop) for stop in self._stops), default=len(buffer))
        self._held = buffer[safe:]
        return buffer[:safe], None

    def finish(self) -> str:
        """Return the text that was held back, now that it cannot become a stop string."""
        held, self._held = self._held, ""
        return held


def read_config(folder: Path) -> dict[str, object]:
    """Return `tokenizer_config.json` as a mapping, empty where there is no such file.

    Raises:
        CheckpointError: the file is not a JSON object.
    """
    file = folder / "tokenizer_config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise CheckpointError(f"{file}: expected a JSON object, {error}") from error
    if not isinstance(config, dict):
        raise CheckpointError(f"{file}: expected a JSON object, found {type(config).__name__}")
    return config


def _token_names(config: Mapping[str, object]) -> dict[str, str]:
    """Collect `bos_token`, `sot_token` and the like, which are strings or AddedToken objects."""
    extra = config.get("extra_special_tokens")
    named = {**config, **extra} if isinstance(extra, dict) else dict(config)
    names = {}
    for key, value in named.items():
        text = value.get("content") if isinstance(value, dict) else value
        if key.endswith("_token") and isinstance(text, str):
            names[key] = text
    return names


def check_kind(inner: tokenizers.Tokenizer, where: str) -> None:
    """Refuse a tokenizer that is not of Gemma's kind; `where` names it in errors.

    Raises:
        CheckpointError: its decoder does more or less than Gemma's, or some byte has no token.
    """
    # `decode_bytes` looks at one token at a time, so the decoder is tried rather than read: it must turn ▁ into a space,
    # byte tokens into UTF-8, and do no more, such as stripping the first space.
    decoder = inner.decoder
    if decoder is not None and decoder.decode(["▁a", "<0xC3>", "<0xA9>", "▁"]) != " aé ":
        raise CheckpointError(
            f"{where}: expected Gemma's decoder (▁ to space, byte fallback, fuse), found {type(decoder).__name__}"
        )
    # Without a token for each byte some text would become <unk>, a control token.
    missing = [byte for byte in range(256) if inner.token_to_id(f"<0x{byte:02X}>") is None]
    if missing or not getattr(inner.model, "byte_fallback", False):
        raise CheckpointError(
            f"{where}: expected byte fallback with all 256 byte tokens, found {type(inner.model).__name__} "
            f"with {256 - len(missing)} of them"
        )


def _beginning(text: str, stop: str) -> int:
    """Return where the longest end of `text` that could begin `stop` starts."""
    at = text.find(stop[0], max(0, len(text) - len(stop) + 1))
    while at >= 0 and not stop.startswith(text[at:]):
        at = text.find(stop[0], at + 1)
    return at if at >= 0 else len(text)
